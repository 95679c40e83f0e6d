"""The conversation itself: a message in, an answer out, and what keeps the session going when that fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from localspec.cli.chat.prompt import LineReader
from localspec.cli.chat.screen import Screen, hidden_keys
from localspec.cli.chat.speed import MeasuredPolicy, PlainSteps
from localspec.cli.running import detail_line, model_lines, status_line, why_plain
from localspec.conversation import Conversation
from localspec.errors import InvalidOptionError, LocalspecError
from localspec.sampling import SamplingParams, check_rule
from localspec.session import Session, Stream
from localspec.text import Message, StopStrings
from localspec.tuning import DrafterName, PolicyName, ProfileLookup
from localspec.wording import counted

__all__ = ["Interrupts", "Settings", "Talk", "introduction"]


@dataclass(slots=True)
class Settings:
    """What commands may change while talking.

    Attributes:
        params: how laws are made.
        num_draft_tokens: γ; None drafts as far as it pays.
        policy: how that is decided.
        drafter: where drafts come from; None is as the session was started.
        use_draft: False decodes plainly without forgetting γ.
        rule: how drafts are verified.
        draft_temperature: the draft's own; None is the target's.
        seed: of the first answer to a message, which makes a run repeatable; None draws one each time.
        max_tokens: the longest answer; None is as long as the context holds.
        stop: strings that end an answer.
        show_stats: whether the detail follows each answer.
    """

    params: SamplingParams
    num_draft_tokens: int | None = None
    policy: PolicyName = "adaptive"
    drafter: DrafterName | None = None
    use_draft: bool = True
    rule: str = "block"
    draft_temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    show_stats: bool = False

    def take(self, values: dict[str, Any], session: Session) -> None:
        """Take over the options of the command line, and refuse at once what no answer could use."""
        self.rule = check_rule(values["rule"])
        self.seed, self.max_tokens, self.stop = values["seed"], values["max_tokens"], values["stop"]
        StopStrings(self.stop)  # checks them
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidOptionError(f"max_tokens is {self.max_tokens}; use 1 or more")
        self.policy, self.draft_temperature = values["policy"], values["draft_temperature"]
        self.draft_by(values["num_draft_tokens"], session)

    def draft_by(self, num_draft_tokens: int | None, session: Session) -> None:
        """Change γ; raises InvalidOptionError or ProfileError where the session cannot have it."""
        session.policy(num_draft_tokens, self.policy, self.params, self.drafter)
        self.num_draft_tokens = num_draft_tokens
        self.use_draft = session.can_draft

    def draft_with(self, drafter: DrafterName, session: Session) -> None:
        """Change where drafts come from; errors as ``draft_by``."""
        session.policy(self.num_draft_tokens, self.policy, self.params, drafter)
        self.drafter, self.use_draft = drafter, True

    @property
    def gamma(self) -> int | None:
        """The draft length in use; None where the session decides."""
        return self.num_draft_tokens if self.use_draft else 0


@dataclass(slots=True)
class Totals:
    """Sums over the answers of a session."""

    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


class Interrupts:
    """Ctrl-C as a wish that is granted between two passes.

    KeyboardInterrupt anywhere else could cut a line in half, or arrive between prompt and answer and end the program.
    """

    def __init__(self, enabled: bool) -> None:
        self.seen = False
        self._enabled = enabled

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of Ctrl-C while a block runs; blocks may be nested."""
        if not self._enabled:
            yield
            return
        previous = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def stopping_an_answer(self) -> Iterator[None]:
        """Do the same, without echoing what is typed into the answer; the next prompt shows it."""
        with self.noted(), hidden_keys() if self._enabled else nullcontext():
            yield
        self.seen = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.seen = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user asked to stop."""
        if self.seen:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Talk:
    """A conversation with a session.

    Attributes:
        session: answers.
        settings: as commands change them.
        screen: shows.
        conversation: so far.
        interrupts: whether Ctrl-C stops an answer only, and was pressed; else it ends the program.
        totals: over all answers.
        last: what the last answer took, for /stats.
        over: whether the user is done.
    """

    session: Session
    settings: Settings
    screen: Screen
    conversation: Conversation
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(False))
    totals: Totals = field(default_factory=Totals)
    last: str | None = None
    over: bool = False
    _plain: PlainSteps = field(default_factory=PlainSteps)
    _attempts: int = 0

    def check(self) -> None:
        """Refuse at once a template that is missing or broken, and a system text that leaves no room."""
        self.conversation.ask("Hello").fit(self._count, self.session.context, 0)

    def run(self, reader: LineReader) -> None:
        """Take line after line until the user leaves."""
        with self.interrupts.noted():
            while not self.over:
                self.interrupts.seen = False  # what comes between this prompt and the answer counts
                line = reader.read()
                if line is None:
                    return
                self.take(line)

    def take(self, line: str) -> None:
        """Act on what the user typed: a command or a message.

        Raises:
            OSError: nobody can read the answers any more.
        """
        from localspec.cli.chat.commands import find_command

        if not line.strip():
            return
        try:
            if command := find_command(line):
                command(self)
            else:
                self.say(line[1:] if line.startswith("//") else line)
        except LocalspecError as error:
            self.screen.error(error)

    def say(self, text: str) -> None:
        """Send a message."""
        self._attempts = 0
        self._answer(self.conversation.ask(text))

    def retry(self) -> None:
        """Answer the last message again, with other draws."""
        self._attempts += 1
        self._answer(self.conversation.retry())

    def _count(self, messages: Sequence[Message]) -> int:
        return len(self.session.encode(messages))

    def _answer(self, asked: Conversation) -> None:
        """Let the model answer the last message; if it is refused, the conversation stays as it was."""
        capacity = self.session.context
        room = min(self.settings.max_tokens or capacity, capacity // 4)
        fitted = asked.fit(self._count, capacity, room)
        dropped = fitted.num_dropped - asked.num_dropped
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self.screen.note(f"The conversation outgrew the context: the oldest {turns} dropped.")
        settings = self.settings
        policy = self.session.policy(settings.gamma, settings.policy, settings.params, settings.drafter)
        measured = MeasuredPolicy(policy, self._plain)
        with self.interrupts.stopping_an_answer():
            answer = _Answer(self.screen, self.interrupts)
            stream = self.session.stream(
                fitted.messages(),
                settings.params,
                max_tokens=settings.max_tokens,
                seed=None if settings.seed is None else settings.seed + self._attempts,
                policy=measured,
                rule=settings.rule,
                draft_temperature=settings.draft_temperature,
                stop=settings.stop,
                progress=answer.progress,
            )
            failure = answer.read(stream)
        if failure and not answer.text:
            self.conversation = asked  # what made room for this message may stay, if another one takes its place
        else:
            self.conversation = fitted.answer(answer.text, interrupted=failure is not None)
        self._report(stream, measured, failure, answer.text)

    def _report(self, stream: Stream, policy: MeasuredPolicy, failure: BaseException | None, text: str) -> None:
        stats, totals = stream.stats, self.totals
        totals.answers += 1
        totals.tokens += stats.tokens
        totals.drafted += stats.drafted
        totals.accepted += stats.accepted
        totals.prompt_tokens += stats.prompt_tokens
        totals.reused_tokens += stats.reused_tokens
        why = why_plain(self.session, policy.policy, stats.steps, drafter=self.settings.drafter)
        status = status_line(stats, num_draft_tokens=self.settings.gamma, speedup=policy.speedup, why=why)
        self.last = f"{status}\n{detail_line(stats, stream.seed)}"
        if isinstance(failure, KeyboardInterrupt):
            kept = "what there is of the answer is kept" if text else "no answer yet; /retry asks again"
            self.screen.note(f"Interrupted: {kept}.")
        elif failure:
            self.screen.error(failure)
        elif stream.finish_reason == "context":
            self.screen.note(
                f"The context of {counted(self.session.context, 'token')} is full; the answer ends here."
            )
        elif stream.finish_reason == "length":
            self.screen.note(f"The answer ends at {counted(stats.tokens, 'token')}, as --max-tokens says.")
        if stats.tokens:
            self.screen.note(self.last if self.settings.show_stats else status)


class _Answer:
    """Reads one stream onto the screen.

    Attributes:
        text: what was shown.
    """

    def __init__(self, screen: Screen, interrupts: Interrupts) -> None:
        self.text = ""
        self._screen = screen
        self._interrupts = interrupts
        self._advance = screen.waiting("reading")

    def progress(self, done: int, total: int) -> None:
        """Say how far the prompt is read; raises KeyboardInterrupt where the user asked for it."""
        self._interrupts.check()
        self._advance(done, total)

    def read(self, stream: Stream) -> BaseException | None:
        """Show the answer; return what cut it short, if anything did."""
        try:
            for event in stream:
                self.text += event.text
                self._screen.event(event)
                self._advance = self._screen.waiting("the draft is reading")
                if event.finish_reason is None:
                    self._interrupts.check()
        except LocalspecError as error:
            return error
        except KeyboardInterrupt as interrupt:
            if not self._interrupts.seen:
                raise
            return interrupt
        finally:
            self._screen.end_answer()
        return None


def introduction(session: Session, named: str = "") -> list[str]:
    """Return what to say before the first prompt; ``named`` holds options, see ``profile_options``."""
    return [
        *model_lines(session),
        *_profile_lines(session.pair.profile, named),
        "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.",
    ]


def _profile_lines(lookup: ProfileLookup, named: str) -> list[str]:
    """Return which profile is in use, or why none is."""
    if lookup.profile is None:
        # The problem ends with its remedy, `localspec calibrate`.
        gain = "it finds how far drafting pays here, if at all"
        return [f"{lookup.problem[:1].upper()}{lookup.problem[1:]}{named} ({gain})"] if lookup.problem else []
    speeds = [verdict.speedup for verdict in lookup.profile.verdicts]
    gain = f"up to {max(speeds):.2f}× plain is expected" if max(speeds) > 1 else "speculation does not pay here"
    return [f"Measured here on {lookup.profile.created[:10]}: {gain}."]
