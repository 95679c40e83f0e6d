"""From measurements to a profile, and to the findings that a report is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from localspec.acceptance import Interval
from localspec.calibration.agreement import KindAgreement, Observation, best_draft_temperatures
from localspec.calibration.confidence import fit_confidence
from localspec.calibration.costs import Setting
from localspec.calibration.report import Findings
from localspec.curves import CostCurves
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
from localspec.tuning import PROFILE_DEPTH

__all__ = ["findings_of", "fitted_confidence", "make_profile"]


def make_profile(
    key: ProfileKey,
    max_draft_tokens: int,
    setting: Setting,
    curves: Sequence[CostCurves],
    sampler: SamplerCost,
    observations: Sequence[Observation],
    agreements: Sequence[KindAgreement],
) -> Profile:
    """Return the profile that measurements make.

    Args:
        key: what they hold for.
        max_draft_tokens: the longest draft that was considered.
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
        target_plan=evaluation_plan(target, limit=max_draft_tokens + 1),
        draft_plan=evaluation_plan(draft),
        sampler=sampler,
        threads=setting.threads,
        flash_attention=setting.flash_attention,
        agreement=tuple(_for_profile(a) for a in agreements),
        confidence=tuple(fitted_confidence(observations, t) for t in sorted({o.temperature for o in observations})),
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


def fitted_confidence(observations: Sequence[Observation], temperature: float) -> ConfidenceAt:
    """Fit confidence to acceptance where there was a law to be confident in."""
    chosen = [o for o in observations if o.temperature == temperature]
    pairs = [(float(c), float(a)) for o in chosen for c, a in zip(o.confidence, o.overlap, strict=True) if c > 0]
    confidence, overlap = zip(*(pairs or [(0.0, 0.0)]), strict=True)
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
