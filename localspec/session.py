"""The library's front door: a loaded pair that generates text."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex, get_args

from localspec.adaptive import AdaptivePolicy
from localspec.backend import Context
from localspec.backend.choice import BackendChoice
from localspec.backend.vocabulary import Vocabulary
from localspec.drafters import Drafter, ModelDrafter
from localspec.encoding import Prompt, PromptEncoder
from localspec.engine import Engine
from localspec.errors import InvalidOptionError, ProfileError, RollbackError
from localspec.generation import FinishReason, Generation, Request, Stats, Step
from localspec.loading import LoadedPair, check_rollback, load_models
from localspec.lookup import LookupDrafter, LookupOrModel
from localspec.plans import PlannedContext
from localspec.policy import FixedPolicy, Policy
from localspec.profile import Profile
from localspec.sampling import SamplingParams, check_rule, fresh_seed
from localspec.text import ChatTemplate, IncrementalDecoder, Message, StopStrings, template_source
from localspec.tuning import DrafterName, PolicyName, RoughProfile, measure_roughly, policy_for

__all__ = ["GenerationResult", "Prompt", "Session", "Stream", "TokenEvent", "load_pair"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        token: its id.
        text: what it adds to the text: nothing while a character or a stop string may still be incomplete, and
            then more than its own.
        drafted: whether the draft proposed it, rather than the target having the word.
        finish_reason: set on the last event: "stop", "length" or "context".
    """

    token: int
    text: str
    drafted: bool
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: the answer, without control tokens and stop strings.
        tokens: ids emitted, an end-of-generation token included.
        finish_reason: "stop" (end-of-generation token or stop string), "length" or "context".
        seed: gives the same draws again.
        stats: what it took.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Return what ``generate --json`` prints."""
        derived = {"tokens_per_s": self.stats.tokens_per_s, "tokens_per_step": self.stats.tokens_per_step}
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": asdict(self.stats) | derived,
        }


class _Transcript:
    """Turns the tokens of a generation into text and watches for stop strings."""

    def __init__(self, vocabulary: Vocabulary, stop: Iterable[str]) -> None:
        self._vocabulary = vocabulary
        self._decoder = IncrementalDecoder()
        self._stops = StopStrings(stop)
        self.pending: list[str] = []  # text of the tokens not yet handed out

    def watch(self, token: int) -> bool:
        """Take the next token; return whether a stop string is complete."""
        ends = self._vocabulary.ends_generation(token)
        result = self._stops.feed("" if ends else self._decoder.feed(self._vocabulary.piece(token)))
        self.pending.append(result.text)
        return result.stopped

    def take(self, *, last: bool) -> list[str]:
        """Return the text of each token since the last call; at the end, what was held back goes to the last one."""
        if last:
            self.pending[-1] += self._stops.feed(self._decoder.flush()).text + self._stops.flush()
        taken, self.pending = self.pending, []
        return taken


class Stream(Iterator[TokenEvent]):
    """The tokens of one generation, as they are verified.

    A session can be asked for something else before a stream is exhausted; the stream cannot go on then.
    """

    def __init__(self, session: Session, generation: Generation, transcript: _Transcript) -> None:
        self._session = session
        self._generation = generation
        self._transcript = transcript
        self._events: deque[TokenEvent] = deque()
        self._text: list[str] = []

    def __next__(self) -> TokenEvent:
        if not self._events:
            if self.finished:
                raise StopIteration
            self._step()
        return self._events.popleft()

    def _step(self) -> None:
        step = self._session.advance(self._generation)
        reason = self._generation.finish_reason
        texts = self._transcript.take(last=reason is not None)
        self._text += texts
        last = len(step.tokens) - 1
        for i, (token, text) in enumerate(zip(step.tokens, texts, strict=True)):
            self._events.append(TokenEvent(token, text, i < step.num_accepted, reason if i == last else None))

    @property
    def finished(self) -> bool:
        """Whether the generation has ended; events may still be waiting to be read."""
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs."""
        return self._generation.finish_reason

    @property
    def stats(self) -> Stats:
        """What it took so far."""
        return self._generation.stats

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._generation.request.seed

    def result(self) -> GenerationResult:
        """Return the whole answer; raises InvalidOptionError before the end."""
        g = self._generation
        if g.finish_reason is None:
            raise InvalidOptionError("the generation is not finished; read the stream to its end first")
        return GenerationResult("".join(self._text), g.tokens, g.finish_reason, g.request.seed, g.stats)


class Session:
    """A loaded target with its draft; made by ``load_pair``.

    One generation runs at a time; a second thread that asks meanwhile gets an InvalidOptionError.

    Attributes:
        pair: the files, contexts and vocabulary.
        engine: the loop over them.
        default_params: llama.cpp's defaults, and above them what the target's entry in models.toml recommends.
        drafter: where drafts come from unless a generation says otherwise; "model" without one is plain decoding.
    """

    def __init__(self, pair: LoadedPair, *, template: ChatTemplate | None, drafter: DrafterName = "auto") -> None:
        self.pair = pair
        self.drafter = drafter
        self.vocabulary = pair.target.model.vocabulary
        self._encoder = PromptEncoder(self.vocabulary, template, name=pair.target.model.path.name)
        self._busy = threading.Lock()
        self._measured: Profile | RoughProfile | None = pair.profile.profile
        self._policies: dict[tuple[PolicyName, DrafterName, float], Policy] = {}
        profile = pair.profile.profile
        target: Context = pair.target
        self.default_params = pair.default_params
        lookup = LookupDrafter(ends_generation=self.vocabulary.ends_generation)
        proposer: Drafter = lookup
        if pair.draft is not None:
            draft: Context = pair.draft
            if profile is not None:
                target = PlannedContext(target, profile.target_plan)
                draft = PlannedContext(draft, profile.draft_plan)
            model = ModelDrafter(
                draft,
                vocabulary_size=self.vocabulary.size,
                ends_generation=self.vocabulary.ends_generation,
            )
            proposer = LookupOrModel(lookup, model)
        self.engine = Engine(target, proposer, ends_generation=self.vocabulary.ends_generation)

    @property
    def can_draft(self) -> bool:
        """Whether there is anything to draft with."""
        return self.pair.draft is not None or self.drafter != "model"

    @property
    def context(self) -> int:
        """Tokens the context holds, prompt and answer together."""
        return self.pair.target.capacity

    def close(self) -> None:
        """Free both models; the session cannot be used afterwards.

        Raises:
            InvalidOptionError: another thread is generating, and its pass would lose the memory it works on.
        """
        with self._exclusively():
            self.pair.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        try:
            self.close()
        except InvalidOptionError:
            if kind is None:  # else what ended the block is what the caller has to hear of
                raise

    def encode(self, prompt: Prompt, *, raw: bool = False, special: bool = False) -> list[int]:
        """Return the token ids of a prompt; see ``PromptEncoder.encode``."""
        return self._encoder.encode(prompt, raw=raw, special=special)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        num_draft_tokens: int | None = None,
        policy: PolicyName | Policy = "adaptive",
        drafter: DrafterName | None = None,
        rule: str = "block",
        draft_temperature: float | None = None,
        stop: Iterable[str] = (),
        raw: bool = False,
        special: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Stream:
        """Generate, yielding every token as soon as it is verified.

        Args:
            prompt: see ``encode``, as ``raw`` and ``special``.
            params: how laws are made; default ``default_params``: llama.cpp's own (temperature 0.8, top-k 40,
                top-p 0.95, min-p 0.05) unless models.toml recommends others for the target.
            max_tokens: emit no more; default as many as the context holds.
            seed: of the noise; default a fresh one.
            num_draft_tokens: tokens drafted per step; 0 does not speculate. Default as ``policy`` decides.
            policy: what ``Session.policy`` returned, or a name: "adaptive" decides token by token what pays,
                "calibrated" takes the length that calibration found best on average. Without a profile costs are
                measured for a second at the first use of a draft model.
            drafter: where drafts come from: "model", "lookup" (what followed when the text's end occurred before), or
                "auto", for each step whichever should gain more, by a set ``num_draft_tokens`` the model if there is
                one. Default the session's.
            rule: "block", "token" or "coupled"; all are exact. With "coupled" the text depends on the seed and not on
                drafts (``docs/seeds.md``).
            draft_temperature: the draft's; default the target's, or what calibration found to agree with it better.
            stop: strings that end the answer and are not part of it.
            raw: take the text as it is.
            special: with ``raw``, let control markers become control tokens.
            progress: called with the tokens read and the prompt's length while a long prompt is read, first by the
                target and, after the first token, by the draft. What it raises ends the generation.

        Raises:
            InvalidOptionError: an option is out of range, or the session is busy.
            PromptError: the prompt cannot be used or does not fit.
            EvaluationError: a model pass failed.
        """
        params = self.default_params if params is None else params
        transcript = _Transcript(self.vocabulary, stop)
        if draft_temperature is None and rule != "coupled":  # for which calibration measures nothing
            draft_temperature = self._calibrated_draft_temperature(params)
        request = Request(
            prompt=self.encode(prompt, raw=raw, special=special),
            params=params,
            max_tokens=self.context if max_tokens is None else max_tokens,
            seed=fresh_seed() if seed is None else _seed(seed),
            rule=check_rule(rule),
            policy=self.policy(num_draft_tokens, policy, params, drafter) if isinstance(policy, str) else policy,
            draft_params=None if draft_temperature is None else _with_draft_temperature(params, draft_temperature),
            watch=transcript.watch,
            progress=progress,
        )
        with self._exclusively():
            return Stream(self, self.engine.start(request), transcript)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> GenerationResult:
        """Generate to the end; arguments and errors as ``stream``."""
        stream = self.stream(prompt, params, **options)
        for _event in stream:
            pass
        return stream.result()

    def chat(self, messages: Sequence[Message | Mapping[str, str]], **options: Any) -> Stream:
        """Answer a conversation; what the caches hold of it from the turn before is not read again."""
        return self.stream(messages, **options)

    def advance(self, generation: Generation) -> Step:
        """Run one step; ``Stream`` does."""
        with self._exclusively():
            (step,) = self.engine.step([generation])
        return step

    def policy(
        self,
        num_draft_tokens: int | None,
        name: PolicyName,
        params: SamplingParams,
        drafter: DrafterName | None = None,
    ) -> Policy:
        """Return what decides how much to draft; arguments as ``stream``.

        Raises:
            InvalidOptionError: there is nothing to draft with, or no such policy or drafter.
            ProfileError: "calibrated" is asked for and there is no profile.
        """
        if drafter == "model" and self.pair.draft is None:
            raise InvalidOptionError("there is no draft model; name one with --draft, or use the drafter lookup")
        source = self._source(num_draft_tokens, drafter or self.drafter)
        if num_draft_tokens is not None:
            return FixedPolicy(0, num_draft_tokens) if source == "lookup" else FixedPolicy(num_draft_tokens)
        if name not in get_args(PolicyName):
            raise InvalidOptionError(f"policy is {name!r}; use one of {', '.join(get_args(PolicyName))}")
        if self.pair.draft is None and (source == "model" or name == "calibrated"):
            return FixedPolicy(0)
        if name == "calibrated" and source == "lookup":
            raise InvalidOptionError("the policy calibrated is for draft models; use adaptive with lookup")
        # Kept between generations: what a policy has learned of the text and the machine holds for the next one.
        key = (name, source, params.temperature)
        if key not in self._policies:
            self._policies[key] = policy_for(self._measure(name, source), params, name=name, drafter=source)
        policy = self._policies[key]
        if isinstance(policy, AdaptivePolicy):
            policy.renew()
        return policy

    def _source(self, num_draft_tokens: int | None, drafter: DrafterName) -> DrafterName:
        """Return where drafts come from here and now."""
        if drafter not in get_args(DrafterName):
            raise InvalidOptionError(f"drafter is {drafter!r}; use one of {', '.join(get_args(DrafterName))}")
        alone = self.pair.draft is None
        if drafter == "model" and alone and num_draft_tokens:
            raise InvalidOptionError(
                f"{num_draft_tokens} draft tokens need a draft model; name one with --draft, draft by lookup"
                " (--drafter lookup), or use --gamma 0"
            )
        if drafter != "auto":
            return drafter
        if alone:
            return "lookup"
        return "auto" if num_draft_tokens is None else "model"

    def _measure(self, name: PolicyName, source: DrafterName) -> Profile | RoughProfile | None:
        """Return what is known of costs, measured if a draft model needs it and it is not known."""
        if self._measured is None:
            if name == "calibrated":
                raise ProfileError(f"{self.pair.profile.problem}, or leave out --policy calibrated")
            if self.pair.draft is not None and source != "lookup":
                with self._exclusively():
                    self.engine.clear()
                    self._measured = measure_roughly(self.pair.target, self.pair.draft)
        return self._measured

    def _calibrated_draft_temperature(self, params: SamplingParams) -> float | None:
        profile = self.pair.profile.profile
        return profile.draft_temperature(params.temperature) if profile is not None else None

    def _exclusively(self) -> _Exclusive:
        return _Exclusive(self._busy)


class _Exclusive:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidOptionError("the session is busy with another generation; wait for it, or load a second one")

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


def load_pair(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    use_draft: bool = True,
    drafter: DrafterName = "auto",
    context: int = 4096,
    threads: int | None = None,
    template: str | None = None,
    use_profile: bool = True,
    backend: BackendChoice = "auto",
    progress: bool = False,
) -> Session:
    """Load a target and its draft, fetching the files if they are not at hand.

    Args:
        pair: a pair's name (``localspec models list``); default the default pair, unless ``target`` is given.
        target: a model's name or the path of a GGUF file, in place of a pair.
        draft: the same for the draft; without one, a ``target`` drafts by lookup.
        use_draft: False leaves the draft of a pair out, and decodes plainly unless ``drafter`` says otherwise.
        drafter: "auto", "model" or "lookup", see ``Session.stream``; with "lookup" no draft is loaded.
        context: tokens that prompt and answer share.
        threads: threads per pass; default the physical cores this process may use.
        template: a built-in template's name ("chatml", ...) or a Jinja file, in place of the model's own.
        use_profile: let calibration's profile of the pair, if there is one, decide how it runs.
        backend: what evaluates: "llamacpp", "ik" (ik_llama.cpp, if its library is at hand), or "auto": what
            calibration found fastest here, without profiles llama.cpp. A process can use only one of them.
        progress: show on stderr what is being fetched.

    Raises:
        LocalspecError: see ``localspec.errors``; the message says what to do.

    >>> session = load_pair(target="big.gguf", draft="small.gguf")     # doctest: +SKIP
    >>> session.generate("Why is the sky blue?", max_tokens=64).text   # doctest: +SKIP
    """
    if drafter not in get_args(DrafterName):
        raise InvalidOptionError(f"drafter is {drafter!r}; use one of {', '.join(get_args(DrafterName))}")
    if drafter == "model" and not use_draft:
        raise InvalidOptionError("the drafter is model and the draft is switched off; give one of the two options")
    if drafter == "model" and target is not None and draft is None:
        raise InvalidOptionError("the drafter is model and there is none; name it with --draft, or use lookup")
    if not use_draft and drafter == "auto":
        drafter = "model"  # of which there is none
    loaded = load_models(
        pair,
        target=target,
        draft=draft,
        use_draft=use_draft and drafter != "lookup",
        context=context,
        threads=threads,
        use_profile=use_profile,
        backend=backend,
        progress=progress,
    )
    if loaded.draft is None and drafter != "model":
        try:
            check_rollback(loaded.target, loaded.target_header)
        except RollbackError:
            if drafter == "lookup":
                loaded.close()
                raise
            drafter = "model"
    return Session(loaded, template=_template(loaded, template), drafter=drafter)


def _seed(value: SupportsIndex) -> int:
    """Return a whole number of any kind, numpy's too, as Python's: hashing needs more than 64 bits, JSON an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidOptionError(f"the seed is {value!r}; use a whole number") from None


def _with_draft_temperature(params: SamplingParams, temperature: float) -> SamplingParams:
    try:
        return replace(params, temperature=temperature)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"draft_{error}") from None


def _template(loaded: LoadedPair, choice: str | None) -> ChatTemplate | None:
    header = loaded.target_header
    if choice is None and header.chat_template is None:
        return None
    vocabulary = loaded.target.model.vocabulary

    def marker(token: int | None) -> str:
        return "" if token is None else vocabulary.marker(token)

    source = template_source(choice, header.chat_template)
    return ChatTemplate(source, bos_token=marker(vocabulary.bos), eos_token=marker(header.eos_id))
