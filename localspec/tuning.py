"""From a loaded pair to a drafting policy: by its profile, or by a rough measurement where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Literal

from localspec.adaptive import UNCALIBRATED, AdaptivePolicy
from localspec.backend import Context, FlashAttention, Span
from localspec.backend.choice import BACKENDS, LIBRARIES, BackendName, identity_at_hand, load_binding
from localspec.backend.identity import cpu_name, file_fingerprint
from localspec.backend.threads import usable_cores
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.drafters import ids_with_logits
from localspec.errors import ProfileError
from localspec.plans import EvaluationPlan
from localspec.policy import FixedPolicy, Policy
from localspec.profile import (
    KindAgreement,
    Profile,
    ProfileKey,
    SamplerCost,
    best,
    find,
    load_all,
    predicted_speedups,
)
from localspec.registry import cache_dir
from localspec.sampling import SamplingParams, draft_params

__all__ = [
    "POOLED",
    "PROFILE_DEPTH",
    "DrafterName",
    "GuessedCosts",
    "PolicyName",
    "ProfileLookup",
    "RoughProfile",
    "agreements_at",
    "draft_sampling",
    "look_up_profile",
    "measure_roughly",
    "policy_for",
    "profile_directory",
    "profile_key",
    "remembered_backend",
    "rough_curve",
]

PolicyName = Literal["adaptive", "calibrated"]

DrafterName = Literal["auto", "model", "lookup"]
"""Where drafts come from: a draft model, the text itself, or for each step whichever should gain more."""

PROFILE_DEPTH = 256
"""Tokens in the cache for which speedups are predicted: a short chat, or a function being written."""

_ROUGH_SIZES = (1, 2, 4, 8, 16)
POOLED = "all"
"""The kind of text that stands for all kinds together."""


def profile_directory() -> Path:
    """Return where profiles are kept."""
    return cache_dir() / "profiles"


def profile_key(
    target: Path,
    draft: Path,
    *,
    threads: int | None,
    flash_attention: FlashAttention = "auto",
    backend: BackendName = "llamacpp",
    build: str | None = None,
) -> ProfileKey:
    """Return what a profile of these two files must have been measured with to hold here and now.

    ``build`` is the library's; by default it is loaded and asked, which a process can do with one of them only.
    """
    return ProfileKey(
        target=file_fingerprint(target),
        draft=file_fingerprint(draft),
        cpu=cpu_name(),
        threads=threads or usable_cores(),
        build=build or load_binding(backend).build(),
        backend=LIBRARIES[backend],
        flash_attention=flash_attention,
    )


@dataclass(frozen=True, slots=True)
class ProfileLookup:
    """The profile of a pair, or why there is none to use."""

    profile: Profile | None
    problem: str | None


def look_up_profile(
    target: Path, draft: Path, *, threads: int | None, backend: BackendName = "llamacpp"
) -> ProfileLookup:
    """Return the profile of two files on this machine; a damaged or foreign one is a problem, not an error."""
    try:
        key = profile_key(target, draft, threads=threads, backend=backend)
        return ProfileLookup(find(profile_directory(), key), None)
    except ProfileError as error:
        return ProfileLookup(None, str(error))


def remembered_backend(target: Path, draft: Path | None, *, threads: int | None) -> BackendName | None:
    """Return the backend with the fastest profile of these files here, of those at hand; None without any profile.

    Without a draft, speed is that of plain decoding, and profiles of the target with any draft count.
    """
    profiles = load_all(profile_directory())
    if not profiles:
        return None
    wanted = (
        file_fingerprint(target),
        file_fingerprint(draft) if draft else None,
        cpu_name(),
        threads or usable_cores(),
    )
    speeds: dict[BackendName, float] = {}
    for name in BACKENDS:
        of_it = [p for p in profiles if p.key.backend == LIBRARIES[name]]
        identity = identity_at_hand(name) if of_it else None
        for profile in of_it:
            key = profile.key
            found = key.target, key.draft if draft else None, key.cpu, key.threads
            if identity is not None and found == wanted and key.build.startswith(identity):
                speed = profile.best_tokens_per_s if draft else profile.plain_tokens_per_s
                speeds[name] = max(speed, speeds.get(name, 0.0))
    return max(speeds, key=speeds.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class RoughProfile:
    """Costs measured in a second, at the start of a session."""

    target: CostCurves
    draft: CostCurves


def measure_roughly(target: Context, draft: Context) -> RoughProfile:
    """Measure a few passes over both models, one or two of each; sequence 0 is emptied.

    Enough to see whether verification is cheap, not enough to trust for more than a session.
    """
    curves = [rough_curve(target, _ROUGH_SIZES), rough_curve(draft, (1, 2))]
    return RoughProfile(*curves)


def rough_curve(context: Context, sizes: tuple[int, ...]) -> CostCurves:
    """Return the seconds of passes over ``sizes`` tokens with a row each, in an empty cache: the best of two."""
    token = ids_with_logits(context)[context.vocabulary_size // 2]
    context.truncate(0, 0)
    points = []
    for size in sizes:
        if size > context.capacity:
            break
        times = []
        for _ in range(3 if size < 8 else 2):  # the first builds the graph of this size
            started = perf_counter()
            context.decode([Span(0, [token] * size, size)])
            times.append(perf_counter() - started)
            context.truncate(0, 0)
        points.append(PassCost(size, size, min(times[1:]), 0.0, len(times) - 1))
    return CostCurves((CostCurve(0, tuple(points)),))


class _Costs:
    """Measured seconds of a step's parts, as the adaptive policy asks for them."""

    def __init__(
        self,
        target: CostCurves,
        draft: CostCurves,
        plans: tuple[EvaluationPlan, EvaluationPlan] = (EvaluationPlan(), EvaluationPlan()),
        sampler: SamplerCost | None = None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._target_plan, self._draft_plan = plans
        self._sampler = sampler or SamplerCost()
        self.max_lookup_tokens = max(target.sizes) - 1
        self.max_draft_tokens = self.max_lookup_tokens

    def verify_s(self, num_tokens: int, depth: int) -> float:
        sampling_s = self._sampler.plain_s
        if num_tokens > 1:
            sampling_s = self._sampler.step_s + (num_tokens - 1) * self._sampler.draft_s
        return self._target_plan.seconds(self._target, num_tokens, depth) + sampling_s

    def draft_s(self, num_tokens: int, depth: int) -> float:
        return self._draft_plan.seconds(self._draft, num_tokens, depth)


class GuessedCosts:
    """Costs of a target alone, in passes over one token: a guess that the adaptive policy corrects by the clock.

    It has no profile, and timing passes before the first word would take longer than a short answer may gain. The
    guess lies between machines with many cores and with few.
    """

    max_draft_tokens = 0
    max_lookup_tokens = 16

    def verify_s(self, num_tokens: int, depth: int) -> float:
        """Return the cost of a pass over ``num_tokens``."""
        return _GUESS.seconds(num_tokens)

    def draft_s(self, num_tokens: int, depth: int) -> float:
        """Return infinity: there is no draft model."""
        return inf


_GUESS = CostCurve(
    0, tuple(PassCost(n, n, s, 0.0, 1) for n, s in ((1, 1.0), (2, 1.4), (4, 1.9), (8, 2.8), (16, 3.5)))
)


def policy_for(
    source: Profile | RoughProfile | None,
    params: SamplingParams,
    *,
    name: PolicyName = "adaptive",
    drafter: DrafterName = "auto",
    max_draft_tokens: int = 8,
) -> Policy:
    """Return the policy that measured costs and agreement recommend for these sampling settings.

    Args:
        source: what was measured; None for a target alone, whose costs are guessed and corrected.
        params: the temperature decides which of the profile's agreements counts: the nearest.
        name: "adaptive" decides token by token; "calibrated" uses the draft model, by the best length on average.
        drafter: where drafts may come from.
        max_draft_tokens: the longest draft of a model.
    """
    lookup = drafter != "model"
    if source is None:
        return AdaptivePolicy(GuessedCosts(), UNCALIBRATED, worthwhile=False, lookup=lookup)
    if isinstance(source, RoughProfile):
        costs = _limited(_Costs(source.target, source.draft), max_draft_tokens)
        return AdaptivePolicy(costs, UNCALIBRATED, worthwhile=drafter != "lookup", lookup=lookup)
    speedups = {a.kind: _speedups(source, a) for a in agreements_at(source, params.temperature)}
    if name == "calibrated":
        pooled = speedups.get(POOLED) or next(iter(speedups.values()))
        return FixedPolicy(best(pooled))
    plans = (source.target_plan, source.draft_plan)
    model = min(source.confidence, key=lambda c: abs(c.temperature - params.temperature)).model
    return AdaptivePolicy(
        _limited(_Costs(source.target, source.draft, plans, source.sampler), max_draft_tokens),
        model,
        worthwhile=drafter != "lookup" and any(best(speed) for speed in speedups.values()),
        lookup=lookup,
    )


def _limited(costs: _Costs, max_draft_tokens: int) -> _Costs:
    costs.max_draft_tokens = min(costs.max_draft_tokens, max_draft_tokens)
    return costs


def draft_sampling(
    profile: Profile | None, params: SamplingParams, *, rule: str, temperature: float | None
) -> SamplingParams | None:
    """Return how draft laws are made if not as the target's: at ``temperature``, or at what calibration found better.

    Raises:
        InvalidOptionError: it is no temperature.
    """
    if temperature is None and profile is not None and rule != "coupled":  # for which calibration measures nothing
        temperature = profile.draft_temperature(params.temperature)
    return None if temperature is None else draft_params(params, temperature)


def agreements_at(profile: Profile, temperature: float) -> list[KindAgreement]:
    """Return what a profile knows of agreement at the temperature nearest to ``temperature``."""
    nearest = min({a.temperature for a in profile.agreement}, key=lambda t: abs(t - temperature))
    return [a for a in profile.agreement if a.temperature == nearest]


def _speedups(profile: Profile, agreement: KindAgreement) -> tuple[float, ...]:
    return predicted_speedups(
        agreement.tokens_per_step(),
        target=profile.target,
        draft=profile.draft,
        depth=PROFILE_DEPTH,
        target_plan=profile.target_plan,
        draft_plan=profile.draft_plan,
        sampler=profile.sampler,
    )
