"""What is being checked: a session whose contexts keep accounts while the check lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts, take_turns
from localspec.checking.ledger import Ledger
from localspec.drafters import ModelDrafter
from localspec.encoding import Prompt
from localspec.engine import Engine
from localspec.errors import InvalidOptionError, TemplateError
from localspec.generation import Generation, Request
from localspec.lookup import LookupDrafter, LookupOrModel
from localspec.policy import MAX_DRAFT_TOKENS, FixedPolicy, check_num_draft_tokens
from localspec.sampling import Rule, SamplingParams
from localspec.session import Session

__all__ = ["CheckSettings", "Subject", "Text", "audited"]

_TEXTS = 3
_TEXT_TOKENS = 40
_USUAL_PROMPT = 96
_FEWEST_PROMPTS = 3
_LONG_BUDGET_S = 40.0
_BESIDE_DRAFTS = 8  # tokens: generations are led to the end of the context, and a few past a whole draft


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """How to check.

    Attributes:
        params: the user's sampling settings.
        num_draft_tokens: the draft length that matters to the user; shorter and longer ones are tried as well.
        budget_s: seconds for all parts together; each does a least amount of work whatever it is.
        seed: of every random choice.
        prompts: to generate from.
    """

    params: SamplingParams
    num_draft_tokens: int = 4
    budget_s: float = 120.0
    seed: int = 0
    prompts: tuple[CalibrationPrompt, ...] = field(default_factory=built_in_prompts)

    def __post_init__(self) -> None:
        if check_num_draft_tokens(self.num_draft_tokens) < 1:
            raise InvalidOptionError("the number of draft tokens is 0; a check needs drafts, use 1 or more")
        if not self.budget_s > 0:
            raise InvalidOptionError(f"the budget is {self.budget_s} s; use a number above 0")

    @property
    def answer_tokens(self) -> int:
        """Length of an answer."""
        return 64 if self.budget_s >= _LONG_BUDGET_S else 24

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths to try."""
        return tuple(sorted({1, self.num_draft_tokens, min(self.num_draft_tokens + 3, MAX_DRAFT_TOKENS)}))

    @property
    def sampling(self) -> SamplingParams:
        """The user's settings, or at temperature 0 the same at 0.8: a certain token is no test of a law."""
        return replace(self.params, temperature=0.8) if self.params.greedy else self.params

    @property
    def greedy(self) -> SamplingParams:
        """The user's settings at temperature 0."""
        return replace(self.params, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target alone wrote on it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Both."""
        return [*self.prompt, *self.answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A session under audit.

    Attributes:
        session: generates through ``engine`` for the time being.
        target: the account of the target.
        draft: the account of the draft.
        engine: the session's engine, on these contexts.
        settings: how to check.
        prompts: what to generate from, and its token ids; the kinds take turns.
        raw: whether prompts are taken as text, for want of a chat template.
    """

    session: Session
    target: Ledger
    draft: Ledger
    engine: Engine
    settings: CheckSettings
    prompts: tuple[tuple[Prompt, tuple[int, ...]], ...]
    raw: bool

    @property
    def capacity(self) -> int:
        """Tokens that both contexts hold."""
        return min(self.target.capacity, self.draft.capacity)

    def clear(self) -> None:
        """Empty both contexts, whatever state a fault has left them in."""
        for ledger in (self.target, self.draft):
            ledger.clear()
            ledger.on_row = None
            ledger.capacity = ledger.context.capacity
        self.engine.clear()

    def take_faults(self) -> list[str]:
        """Return what the accounts found since the last call."""
        return [*self.target.take_faults(), *self.draft.take_faults()]

    def write(
        self, prompt: Sequence[int], params: SamplingParams, max_tokens: int, gamma: int, *, rule: Rule = "block"
    ) -> Generation:
        """Generate from token ids, with ``gamma`` drafted tokens a step."""
        request = Request(
            prompt=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=self.settings.seed,
            rule=rule,
            policy=FixedPolicy(gamma),
        )
        generation = self.engine.start(request)
        while generation.finish_reason is None:
            self.engine.step([generation])
        return generation

    def texts(self) -> list[Text]:
        """Let the target alone answer the first prompts."""
        found = []
        for _, prompt in self.prompts[:_TEXTS]:
            room = min(_TEXT_TOKENS, self.settings.answer_tokens, self.capacity - len(prompt))
            answer = self.write(prompt, self.settings.sampling, room, 0).tokens
            found.append(Text(prompt, tuple(answer)))
        return found


@contextmanager
def audited(session: Session, settings: CheckSettings) -> Iterator[Subject]:
    """Put accounts between a session's engine and its contexts, as long as the block runs.

    Raises:
        InvalidOptionError: the session has no draft model, or a context too small for any of the prompts.
    """
    engine = session.engine
    drafter = engine.drafter
    if not isinstance(drafter, LookupOrModel):
        raise InvalidOptionError("a check needs a draft model; name one with --draft, or use --pair")
    target, draft = Ledger(engine.target, "target"), Ledger(drafter.model.context, "draft")
    ends = session.vocabulary.ends_generation
    engine.clear()
    model = ModelDrafter(draft, vocabulary_size=target.vocabulary_size, ends_generation=ends)
    watched = Engine(target, LookupOrModel(LookupDrafter(ends_generation=ends), model), ends_generation=ends)
    prompts, raw = _encoded(session, settings, min(target.capacity, draft.capacity))
    session.engine = watched
    try:
        yield Subject(
            session=session,
            target=target,
            draft=draft,
            engine=watched,
            settings=settings,
            prompts=prompts,
            raw=raw,
        )
    finally:
        for ledger in (target, draft):
            ledger.clear()
        session.engine = engine


def _encoded(
    session: Session, settings: CheckSettings, capacity: int
) -> tuple[tuple[tuple[Prompt, tuple[int, ...]], ...], bool]:
    """Return the prompts that are short enough to be worth their reading, and whether they are raw."""
    contents = [prompt.content for prompt in take_turns(settings.prompts)]
    try:
        encoded = [(content, tuple(session.encode(content))) for content in contents]
        raw = False
    except TemplateError:
        texts = [content for content in contents if isinstance(content, str)]
        if not texts:
            raise  # conversations cannot do without
        encoded = [(content, tuple(session.encode(content, raw=True))) for content in texts]
        raw = True
    room = min(capacity // 2, capacity - max(settings.lengths) - _BESIDE_DRAFTS)
    fitting = [entry for entry in encoded if len(entry[1]) <= room]
    short = [entry for entry in fitting if len(entry[1]) <= _USUAL_PROMPT]
    if len(short) < _FEWEST_PROMPTS:
        short = sorted(fitting, key=lambda entry: len(entry[1]))[:_FEWEST_PROMPTS]
    if not short:
        raise InvalidOptionError(
            f"none of the prompts fits a context of {capacity} tokens beside as long an answer and drafts of"
            f" {max(settings.lengths)}; use a larger --ctx, a smaller --gamma, or shorter --prompts"
        )
    return tuple(short), raw
