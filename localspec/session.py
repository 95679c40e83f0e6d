"""The library's front door: a loaded pair that generates text."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, get_args

from localspec.answers import GenerationResult, Stream, TokenEvent, Transcript
from localspec.backend import Context
from localspec.backend.choice import BackendChoice
from localspec.batch_run import BatchRunner
from localspec.batching import Batch, BatchAnswer, BatchOptions, BatchProgress, BatchRequest
from localspec.drafters import Drafter, ModelDrafter
from localspec.encoding import Prompt, PromptEncoder
from localspec.engine import Engine
from localspec.errors import InvalidOptionError, RollbackError
from localspec.generation import Generation, Request, Step
from localspec.loading import LoadedPair, check_parallel, check_rollback, load_models, widened
from localspec.lookup import LookupDrafter, LookupOrModel
from localspec.plans import PlannedContext
from localspec.policies import PolicyChooser
from localspec.policy import Policy
from localspec.sampling import SamplingParams, check_rule, check_seed, fresh_seed
from localspec.text import ChatTemplate, Message, template_source
from localspec.tuning import DrafterName, PolicyName, RoughProfile, draft_sampling, measure_roughly

__all__ = ["GenerationResult", "Prompt", "Session", "Stream", "TokenEvent", "load_pair"]


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
        self._policies = PolicyChooser(pair.profile, has_draft=pair.draft is not None)
        self.default_params = pair.default_params
        self.engine = self._engine_on(pair)
        self._open_batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._batches = BatchRunner(self._encoder)

    def _engine_on(self, pair: LoadedPair) -> Engine:
        profile = pair.profile.profile
        target: Context = pair.target
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
        return Engine(target, proposer, ends_generation=self.vocabulary.ends_generation)

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
        for batch in list(self._open_batches):
            with suppress(InvalidOptionError):  # another thread is in it, and the session busy
                batch.close()
        with self._exclusively():
            self.pair.close()

    def clear(self) -> None:
        """Empty the caches, so that the next prompt is read from its beginning.

        Raises:
            InvalidOptionError: the session is busy.
        """
        with self._exclusively():
            self.engine.clear()

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
        transcript = Transcript(self.vocabulary, stop)
        request = Request(
            prompt=self._encoder.encode(prompt, raw=raw, special=special, capacity=self.context),
            params=params,
            max_tokens=self.context if max_tokens is None else max_tokens,
            seed=fresh_seed() if seed is None else check_seed(seed),
            rule=check_rule(rule),
            policy=self.policy(num_draft_tokens, policy, params, drafter) if isinstance(policy, str) else policy,
            draft_params=draft_sampling(self.pair.profile.profile, params, rule=rule, temperature=draft_temperature),
            watch=transcript.watch,
            progress=progress,
        )
        with self._exclusively():
            return Stream(self.advance, self.engine.start(request), transcript)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> GenerationResult:
        """Generate to the end; arguments and errors as ``stream``."""
        stream = self.stream(prompt, params, **options)
        for _event in stream:
            pass
        return stream.result()

    def chat(self, messages: Sequence[Message | Mapping[str, Any]], **options: Any) -> Stream:
        """Answer a conversation; what the caches hold of it from the turn before is not read again."""
        return self.stream(messages, **options)

    def generate_batch(
        self,
        requests: Iterable[BatchRequest],
        *,
        seed: int | None = None,
        parallel: int | None = None,
        num_draft_tokens: int | None = None,
        policy: PolicyName = "adaptive",
        rule: str = "block",
        progress: Callable[[BatchProgress], None] | None = None,
    ) -> Batch:
        """Generate for many prompts, several at a time, yielding each answer as soon as it is finished.

        Args:
            requests: what to generate, taken one by one as there is room: a few more than run are held.
            seed: with its id it decides the seed of each record that has none; default a fresh one.
            parallel: how many run together. By default what costs and agreement recommend, as far as there is memory
                and there are requests; without a profile costs are measured for a few seconds. 1 gives what
                ``generate`` gives.
            num_draft_tokens: tokens drafted per step and sequence; 0 does not speculate. Default as ``policy``
                decides.
            policy: "adaptive" drafts what pays with as many sequences as are running, and learns from what is
                accepted and from the clock; "calibrated" keeps to the profile.
            rule: for records that name none; see ``stream``.
            progress: called after every step. What it raises ends the batch.

        Returns:
            An iterator, and a context manager that closes it. A record that cannot run, or goes wrong, has an answer
            with its error, and the others go on.

        Raises:
            InvalidOptionError: an option is out of range; while iterating, the session is busy.
            ProfileError: "calibrated" is asked for and there is no profile.
            EvaluationError: while iterating: measuring failed, or there is no memory for so many sequences.
        """
        counts = BatchProgress()
        options = BatchOptions(
            seed=fresh_seed() if seed is None else check_seed(seed),
            parallel=None if parallel is None else check_parallel(parallel),
            num_draft_tokens=num_draft_tokens,
            policy=policy,
            rule=check_rule(rule),
        )
        self._policies.check(num_draft_tokens, policy)
        batch = Batch(self._run_batch(iter(requests), options, counts, progress), counts)
        self._open_batches.add(batch)
        return batch

    def _run_batch(
        self,
        requests: Iterator[BatchRequest],
        options: BatchOptions,
        counts: BatchProgress,
        progress: Callable[[BatchProgress], None] | None,
    ) -> Generator[BatchAnswer]:
        with self._exclusively():
            yield from self._batches.run(
                self,
                requests,
                options,
                counts,
                policy_for=lambda params: self._policies.choose(
                    options.num_draft_tokens, options.policy, params, self.drafter, measure=self._measure
                ),
                progress=progress,
            )

    def widen(self, num_sequences: int) -> None:
        """Make room for so many sequences; generations that run cannot go on.

        Raises:
            OutOfMemoryError: there is no room; all is as it was.
        """
        self.pair = widened(self.pair, num_sequences)
        self.engine = self._engine_on(self.pair)

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
        return self._policies.choose(
            num_draft_tokens, name, params, drafter or self.drafter, measure=self._measure_alone
        )

    def _measure_alone(self) -> RoughProfile:
        with self._exclusively():
            return self._measure()

    def _measure(self) -> RoughProfile:
        assert self.pair.draft is not None
        self.engine.clear()
        return measure_roughly(self.pair.target, self.pair.draft)

    def _exclusively(self) -> _Exclusive:
        return _Exclusive(self._busy)


class _Exclusive(AbstractContextManager[None]):
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
    parallel: int | None = None,
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
        parallel: make room for so many sequences of ``context`` tokens each, for ``generate_batch``; without it that
            makes room itself, once it knows for how many. ``generate`` and ``chat`` use one.
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
    if drafter == "lookup" and draft is not None:
        raise InvalidOptionError(f"the drafter is lookup and the draft {str(draft)!r} is named; give one of the two")
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
        parallel=parallel,
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


def _template(loaded: LoadedPair, choice: str | None) -> ChatTemplate | None:
    header = loaded.target_header
    if choice is None and header.chat_template is None:
        return None
    vocabulary = loaded.target.model.vocabulary

    def marker(token: int | None) -> str:
        return "" if token is None else vocabulary.marker(token)

    source = template_source(choice, header.chat_template)
    return ChatTemplate(source, bos_token=marker(vocabulary.bos), eos_token=marker(header.eos_id))
