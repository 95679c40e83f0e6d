"""The whole calibration of one pair: settings, costs, agreement, and the profile that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from localspec.backend import FlashAttention
from localspec.backend.choice import backend_in_use
from localspec.backend.native import NativeContext
from localspec.calibration.agreement import (
    AgreementPlan,
    KindAgreement,
    Observation,
    default_temperatures,
    observe,
    summarise,
)
from localspec.calibration.bandwidth import Bandwidth, bytes_per_pass, measure_memory_read
from localspec.calibration.costs import PassLoad, Setting, choose_setting, measure_costs, thread_candidates
from localspec.calibration.overhead import measure_sampler
from localspec.calibration.profiles import make_profile
from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts
from localspec.errors import ContextOverflowError, InvalidOptionError
from localspec.loading import LoadedPair
from localspec.profile import Profile, SamplerCost
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from localspec.tuning import PROFILE_DEPTH, profile_key
from localspec.wording import counted

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "agreement_contexts",
    "agreement_room",
    "calibrate",
    "draft_loads",
    "like_context",
    "sampler_cost",
    "target_load",
]

Progress = Callable[[str, float], None]
"""Called with the name of the phase and the share of the whole that is done."""

_STEPS, _QUICK_STEPS = 12, 5  # to time what is not inside a pass
_AGREEMENT_SEQUENCES = 4
_AGREEMENT_CONTEXT = 640


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """What to measure, and for how long.

    Attributes:
        params: the user's sampling settings.
        prompts: to measure agreement on.
        max_draft_tokens: the longest draft to consider.
        budget_s: seconds for the measurements together; loading comes on top.
        quick: leave out what rarely changes the verdict: the comparison of threads and attention kernels, deep
            caches, and temperatures other than the user's and 0.
    """

    params: SamplingParams = LLAMACPP_DEFAULTS
    prompts: tuple[CalibrationPrompt, ...] = field(default_factory=built_in_prompts)
    max_draft_tokens: int = 8
    budget_s: float = 180.0
    quick: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= 32:
            raise InvalidOptionError(f"the longest draft is {self.max_draft_tokens}; use 1 to 32 tokens")
        if not self.budget_s > 0:
            raise InvalidOptionError(f"the budget is {self.budget_s} s; use a number above 0")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """At which agreement is measured."""
        if self.quick:
            return tuple(sorted({0.0, self.params.temperature}))
        return default_temperatures(self.params)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration found.

    Attributes:
        profile: to be kept.
        bandwidth: what the target's pass over one token reaches, beside what memory can.
        agreements: with their intervals.
        interrupted: whether the user ended it early.
    """

    profile: Profile
    bandwidth: Bandwidth
    agreements: tuple[KindAgreement, ...]
    interrupted: bool


def calibrate(
    pair: LoadedPair,
    settings: CalibrationSettings,
    *,
    encode: Callable[[Any], Sequence[int]],
    threads: int | None = None,
    progress: Progress = lambda phase, share: None,
    notice: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure a loaded pair.

    An interrupt ends the phase it arrives in. Costs say nothing without agreement: if it arrives earlier, agreement
    is measured on the first few prompts only, and ``notice`` says so.

    Args:
        pair: with a draft.
        settings: what to measure.
        encode: makes token ids of a prompt.
        threads: as asked for when the pair was loaded; part of the profile's key.
        progress: told what is going on.
        notice: told what became of an interrupt that does not end it at once, and of rows that cannot be used.

    Raises:
        KeyboardInterrupt: too little was measured to conclude anything.
        ContextOverflowError: a prompt leaves no room for an answer; said before anything is measured.
        EvaluationError: a model pass failed, or a row of the target's logits is none.
    """
    assert pair.draft is not None
    assert pair.draft_header is not None
    settings.params.check_ids(pair.target.vocabulary_size)
    room = agreement_room(pair.target.capacity, [len(encode(prompt.content)) for prompt in settings.prompts])
    shares = (0.0, 0.35) if settings.quick else (0.2, 0.35)
    setting = Setting(pair.target.threads, "off")
    if not settings.quick:
        setting = _choose_setting(pair, shares[0] * settings.budget_s, _phase(progress, "settings", 0.0, shares[0]))
    target, draft = (like_context(c, setting, capacity=c.capacity) for c in (pair.target, pair.draft))
    memory = measure_memory_read(setting.threads)
    costs_share = _phase(progress, "costs", shares[0], shares[1])
    costs = _measure_costs(target, draft, settings, shares[1] * settings.budget_s, costs_share)
    interrupted = costs.interrupted
    try:
        sampler = sampler_cost(target, draft, settings, encode)
    except KeyboardInterrupt:
        sampler, interrupted = SamplerCost(), True  # a hundredth of a step: no verdict hangs on it
    target.close(), draft.close()
    budget_s = (1 - sum(shares)) * settings.budget_s
    if interrupted:
        notice("interrupted: a verdict needs some agreement as well, so a few prompts follow")
        budget_s = 0.0
    observations: list[Observation] = []
    agreement_share = _phase(progress, "agreement", sum(shares), 1 - sum(shares))
    try:
        for observation in _observe(pair, settings, setting, encode, room, budget_s, agreement_share):
            observations.append(observation)
    except KeyboardInterrupt:
        interrupted = True
        if not observations:
            raise
    say_undraftable(observations, notice)
    agreements = summarise(observations, max_draft_tokens=settings.max_draft_tokens)
    backend = backend_in_use() or "llamacpp"
    key = profile_key(pair.target_header.path, pair.draft_header.path, threads=threads, backend=backend)
    profile = make_profile(key, settings.max_draft_tokens, setting, costs.curves, sampler, observations, agreements)
    one_s = costs.curves[0].seconds(1, 0)
    bandwidth = Bandwidth(bytes_per_pass(pair.target_header.path), one_s, memory)
    return Calibration(profile, bandwidth, agreements, interrupted)


def _phase(progress: Progress, name: str, start: float, share: float) -> Callable[[float], None]:
    return lambda done: progress(name, start + share * min(1.0, done))


def like_context(like: NativeContext, setting: Setting, *, capacity: int, num_sequences: int = 1) -> NativeContext:
    """Return a context on the same weights that runs with ``setting``."""
    return NativeContext(
        like.model,
        capacity=capacity,
        num_sequences=num_sequences,
        threads=setting.threads,
        flash_attention=setting.flash_attention,
    )


def _choose_setting(pair: LoadedPair, budget_s: float, progress: Callable[[float], None]) -> Setting:
    assert pair.draft is not None
    contexts: dict[FlashAttention, list[NativeContext]] = {
        kernel: [
            like_context(c, Setting(pair.target.threads, kernel), capacity=min(2048, c.capacity))
            for c in (pair.target, pair.draft)
        ]
        for kernel in ("off", "on")
    }
    try:
        measured = choose_setting(
            contexts,
            threads=thread_candidates(pair.target.threads),
            sizes=[(1, 4), (1,)],
            depth=1024,
            budget_s=budget_s,
            progress=progress,
        )
    finally:
        for context in (c for both in contexts.values() for c in both):
            context.close()
    return measured[0].setting


def _measure_costs(
    target: NativeContext,
    draft: NativeContext,
    settings: CalibrationSettings,
    budget_s: float,
    progress: Callable[[float], None],
) -> Any:
    loads = [target_load(target, settings), *draft_loads(draft, settings)]
    depths = (PROFILE_DEPTH,) if settings.quick else (64, 1024)
    return measure_costs(loads, depths=depths, budget_s=budget_s, progress=progress)


def target_load(target: NativeContext, settings: CalibrationSettings) -> PassLoad:
    """Return the passes of a target that a profile needs: of drafts, and larger ones for batches."""
    largest = (12, 16) if settings.quick else (12, 16, 24, 32)
    sizes = {n for n in (*range(1, settings.max_draft_tokens + 2), *largest) if n <= target.capacity // 2}
    return PassLoad(target, sorted(sizes), lambda n: n)


def draft_loads(draft: NativeContext, settings: CalibrationSettings) -> tuple[PassLoad, PassLoad]:
    """Return the passes of a draft that a profile needs: for one sequence, and with a row for each of several."""
    of_batch = [n for n in ((1, 4, 16) if settings.quick else (1, 2, 4, 8, 16)) if n <= draft.capacity // 2]
    return PassLoad(draft, (1, 2, 3, 4), lambda n: 1), PassLoad(draft, of_batch, lambda n: n)


def sampler_cost(
    target: NativeContext, draft: NativeContext, settings: CalibrationSettings, encode: Callable[[Any], Sequence[int]]
) -> SamplerCost:
    """Measure what steps cost beside passes, after the first prompt."""
    prompt = encode(settings.prompts[0].content)[: target.capacity // 4]
    steps = _QUICK_STEPS if settings.quick else _STEPS
    return measure_sampler(target, draft, prompt=prompt, params=settings.params, num_steps=steps)


def agreement_room(capacity: int, lengths: Sequence[int]) -> int:
    """Return how many tokens a sequence must hold for the longest prompt and its answer, ``capacity`` at most.

    Raises:
        ContextOverflowError: a prompt leaves no room for an answer.
    """
    longest = max(lengths)
    if longest >= capacity:
        raise ContextOverflowError(
            f"a prompt has {counted(longest, 'token')} and the context holds {capacity}, one of them for"
            " the answer; shorten the prompt, or use a larger --ctx"
        )
    answered = min(longest + AgreementPlan().tokens_per_prompt, capacity)
    return max(_AGREEMENT_CONTEXT, answered)


def agreement_contexts(like: Sequence[NativeContext], setting: Setting, room: int) -> list[NativeContext]:
    """Return contexts on the same weights for several sequences of ``room`` tokens at a time."""
    # Long prompts take turns, so that the caches grow no larger.
    sequences = max(1, min(_AGREEMENT_SEQUENCES, _AGREEMENT_SEQUENCES * _AGREEMENT_CONTEXT // room))
    return [like_context(one, setting, capacity=room, num_sequences=sequences) for one in like]


def _observe(
    pair: LoadedPair,
    settings: CalibrationSettings,
    setting: Setting,
    encode: Callable[[Any], Sequence[int]],
    room: int,
    budget_s: float,
    progress: Callable[[float], None],
) -> Any:
    assert pair.draft is not None
    contexts = agreement_contexts((pair.target, pair.draft), setting, room)
    # The user's own temperature first: whenever an interrupt comes, there is something to report about it.
    temperatures = tuple(sorted(settings.temperatures, key=lambda t: t != settings.params.temperature))
    plan = AgreementPlan(params=settings.params, temperatures=temperatures, budget_s=budget_s)
    began = perf_counter()
    try:
        yield from observe(
            contexts[0],
            contexts[1],
            settings.prompts,
            plan,
            encode=encode,
            ends_generation=pair.target.model.vocabulary.ends_generation,
            progress=lambda done, total: progress(
                max(done / total, (perf_counter() - began) / budget_s if budget_s else 0.0)
            ),
        )
    finally:
        for context in contexts:
            context.close()


def say_undraftable(observations: Sequence[Observation], notice: Callable[[str], None]) -> None:
    """Say at how many positions the draft had no usable logits, if at any."""
    if number := sum(o.num_undraftable for o in observations):
        tokens = counted(sum(len(o.transcript) for o in observations), "token")
        notice(
            f"at {number} of {tokens} the draft model computed no usable logits (NaN, or nothing finite): nothing can"
            " be drafted there, and so it is counted"
        )
