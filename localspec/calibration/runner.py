"""The whole calibration of one pair: settings, costs, agreement, and the profile that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from localspec.acceptance import Interval
from localspec.backend import FlashAttention
from localspec.backend.choice import backend_in_use
from localspec.backend.native import NativeContext
from localspec.calibration.agreement import (
    AgreementPlan,
    KindAgreement,
    Observation,
    best_draft_temperatures,
    default_temperatures,
    observe,
    summarise,
)
from localspec.calibration.bandwidth import Bandwidth, bytes_per_pass, measure_memory_read
from localspec.calibration.confidence import fit_confidence
from localspec.calibration.costs import PassLoad, Setting, choose_setting, measure_costs, thread_candidates
from localspec.calibration.overhead import measure_sampler
from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts
from localspec.calibration.report import Findings
from localspec.curves import CostCurves
from localspec.errors import ContextOverflowError, InvalidOptionError
from localspec.loading import LoadedPair
from localspec.plans import evaluation_plan
from localspec.profile import (
    ConfidenceAt,
    DraftTemperatureAt,
    Estimate,
    Profile,
    ProfileKey,
    SamplerCost,
    Verdict,
    best,
    predicted_speedups,
)
from localspec.profile import KindAgreement as ProfileAgreement
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from localspec.tuning import PROFILE_DEPTH, profile_key

__all__ = ["Calibration", "CalibrationSettings", "calibrate", "findings_of", "make_profile"]

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
        notice: told what became of an interrupt that does not end it at once.

    Raises:
        KeyboardInterrupt: too little was measured to conclude anything.
        ContextOverflowError: a prompt leaves no room for an answer; said before anything is measured.
        EvaluationError: a model pass failed.
    """
    assert pair.draft is not None
    assert pair.draft_header is not None
    settings.params.check_ids(pair.target.vocabulary_size)
    room = _agreement_room(pair, [len(encode(prompt.content)) for prompt in settings.prompts])
    shares = (0.0, 0.35) if settings.quick else (0.2, 0.35)
    setting = Setting(pair.target.threads, "off")
    if not settings.quick:
        setting = _choose_setting(pair, shares[0] * settings.budget_s, _phase(progress, "settings", 0.0, shares[0]))
    target, draft = (_context(c, setting, capacity=c.capacity) for c in (pair.target, pair.draft))
    memory = measure_memory_read(setting.threads)
    costs_share = _phase(progress, "costs", shares[0], shares[1])
    costs = _measure_costs(target, draft, settings, shares[1] * settings.budget_s, costs_share)
    interrupted = costs.interrupted
    try:
        sampler = _measure_sampler(target, draft, settings, encode)
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
    agreements = summarise(observations, max_draft_tokens=settings.max_draft_tokens)
    backend = backend_in_use() or "llamacpp"
    key = profile_key(pair.target_header.path, pair.draft_header.path, threads=threads, backend=backend)
    profile = make_profile(key, settings, setting, costs.curves, sampler, observations, agreements)
    one_s = costs.curves[0].seconds(1, 0)
    bandwidth = Bandwidth(bytes_per_pass(pair.target_header.path), one_s, memory)
    return Calibration(profile, bandwidth, agreements, interrupted)


def _phase(progress: Progress, name: str, start: float, share: float) -> Callable[[float], None]:
    return lambda done: progress(name, start + share * min(1.0, done))


def _context(like: NativeContext, setting: Setting, *, capacity: int, num_sequences: int = 1) -> NativeContext:
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
            _context(c, Setting(pair.target.threads, kernel), capacity=min(2048, c.capacity))
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
    # What a batch of several sequences needs comes on top: large passes, and of the draft a row for each sequence.
    largest, of_draft = ((12, 16), (1, 4, 16)) if settings.quick else ((12, 16, 24, 32), (1, 2, 4, 8, 16))
    sizes = {n for n in (*range(1, settings.max_draft_tokens + 2), *largest) if n <= target.capacity // 2}
    loads = [
        PassLoad(target, sorted(sizes), lambda n: n),
        PassLoad(draft, (1, 2, 3, 4), lambda n: 1),
        PassLoad(draft, [n for n in of_draft if n <= draft.capacity // 2], lambda n: n),
    ]
    depths = (PROFILE_DEPTH,) if settings.quick else (64, 1024)
    return measure_costs(loads, depths=depths, budget_s=budget_s, progress=progress)


def _measure_sampler(
    target: NativeContext, draft: NativeContext, settings: CalibrationSettings, encode: Callable[[Any], Sequence[int]]
) -> SamplerCost:
    prompt = encode(settings.prompts[0].content)[: target.capacity // 4]
    steps = _QUICK_STEPS if settings.quick else _STEPS
    return measure_sampler(target, draft, prompt=prompt, params=settings.params, num_steps=steps)


def _agreement_room(pair: LoadedPair, lengths: Sequence[int]) -> int:
    """Return how many tokens a sequence must hold for the longest prompt and its answer, the user's --ctx at most."""
    longest = max(lengths)
    if longest >= pair.target.capacity:
        raise ContextOverflowError(
            f"a prompt has {longest} tokens and the context holds {pair.target.capacity}, one of them for the answer;"
            " shorten the prompt, or use a larger --ctx"
        )
    answered = min(longest + AgreementPlan().tokens_per_prompt, pair.target.capacity)
    return max(_AGREEMENT_CONTEXT, answered)


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
    # Long prompts take turns, so that the caches grow no larger.
    sequences = max(1, min(_AGREEMENT_SEQUENCES, _AGREEMENT_SEQUENCES * _AGREEMENT_CONTEXT // room))
    contexts = [_context(c, setting, capacity=room, num_sequences=sequences) for c in (pair.target, pair.draft)]
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


def make_profile(
    key: ProfileKey,
    settings: CalibrationSettings,
    setting: Setting,
    curves: Sequence[CostCurves],
    sampler: SamplerCost,
    observations: Sequence[Observation],
    agreements: Sequence[KindAgreement],
) -> Profile:
    """Return the profile that measurements make.

    Args:
        key: what they hold for.
        settings: what was asked for.
        setting: how passes ran.
        curves: of the target, of the draft, and of the draft with a row for every token.
        sampler: what a step costs beside passes.
        observations: of agreement.
        agreements: what these come to.
    """
    target, draft, draft_batch = curves
    empty = Profile(
        key=key,
        created=datetime.now(UTC).date().isoformat(),
        target=target,
        draft=draft,
        target_plan=evaluation_plan(target, limit=settings.max_draft_tokens + 1),
        draft_plan=evaluation_plan(draft),
        sampler=sampler,
        threads=setting.threads,
        flash_attention=setting.flash_attention,
        agreement=tuple(_for_profile(a) for a in agreements),
        confidence=tuple(_confidence(observations, t) for t in sorted({o.temperature for o in observations})),
        draft_temperatures=tuple(
            DraftTemperatureAt(d.temperature, d.draft_temperature) for d in best_draft_temperatures(observations)
        ),
        plain_tokens_per_s=1 / (target.seconds(1, PROFILE_DEPTH) + sampler.plain_s),
        verdicts=(),
        draft_batch=draft_batch,
    )
    return replace(empty, verdicts=tuple(_verdict(empty, a) for a in empty.agreement))


def _verdict(profile: Profile, agreement: ProfileAgreement) -> Verdict:
    speedups = predictor(profile)(agreement.tokens_per_step())
    return Verdict(agreement.kind, agreement.temperature, best(speedups), speedups)


def predictor(profile: Profile) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """Return what makes speedups of tokens per step with a profile's costs."""
    return lambda tokens_per_step: predicted_speedups(
        tokens_per_step,
        target=profile.target,
        draft=profile.draft,
        depth=PROFILE_DEPTH,
        target_plan=profile.target_plan,
        draft_plan=profile.draft_plan,
        sampler=profile.sampler,
    )


def _confidence(observations: Sequence[Observation], temperature: float) -> ConfidenceAt:
    chosen = [o for o in observations if o.temperature == temperature]
    confidence = [float(c) for o in chosen for c in o.confidence]
    overlap = [float(a) for o in chosen for a in o.overlap]
    return ConfidenceAt(temperature, fit_confidence(confidence, overlap))


def _for_profile(agreement: KindAgreement) -> ProfileAgreement:
    def estimates(values: Sequence[float], bounds: Sequence[Interval] | None) -> tuple[Estimate, ...]:
        known: Sequence[Interval | None] = bounds or [None for _ in values]
        return tuple(_estimate(value, bound) for value, bound in zip(values, known, strict=True))

    return ProfileAgreement(
        kind=agreement.kind,
        temperature=agreement.temperature,
        num_tokens=agreement.num_tokens,
        num_prompts=agreement.num_prompts,
        acceptance_rate=_estimate(agreement.acceptance_rate, agreement.acceptance_interval),
        token=estimates(agreement.token.tokens_per_step, agreement.token.intervals),
        block=estimates(agreement.block.tokens_per_step, agreement.block.intervals),
        accepted_prefix=agreement.block.accepted_prefix,
    )


def _estimate(value: float, bound: Interval | None) -> Estimate:
    return Estimate(value, bound.low, bound.high) if bound else Estimate(value, value, value)


def findings_of(
    profile: Profile, agreements: tuple[KindAgreement, ...], *, target: str, draft: str, temperature: float
) -> Findings:
    """Return what a report is made from."""
    sizes = range(1, len(profile.agreement[0].token) + 1)
    one_s = profile.target.seconds(1, PROFILE_DEPTH)
    return Findings(
        target=target,
        draft=draft,
        target_pass_s=tuple(profile.target_plan.seconds(profile.target, n, PROFILE_DEPTH) for n in sizes),
        draft_pass_s=tuple(profile.draft_plan.seconds(profile.draft, n, PROFILE_DEPTH) for n in (1, 2)),
        agreements=agreements,
        temperature=temperature,
        sampler_cost=(profile.sampler.step_s - profile.sampler.plain_s) / one_s,
        predict=predictor(profile),
    )
