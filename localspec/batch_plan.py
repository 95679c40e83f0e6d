"""How many sequences to run together and how much to draft for each: one choice, from measured costs (docs/batch.md).

Sequences in a pass and drafted tokens compete for the same thing, a pass that is cheap per token:

    throughput(B, γ) = B·E(γ) / (t(B·(γ + 1)) + γ·d(B) + B·s(γ))

with E(γ) the tokens a step emits, t and d the seconds of a pass of target and draft over so many tokens with a row of
logits each, s the sampler's. γ = 0 is always a candidate, and the usual winner once B is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from localspec.adaptive import UNCALIBRATED
from localspec.averages import ForgettingRatio
from localspec.backend import Context
from localspec.curves import CostCurves
from localspec.guard import Guard
from localspec.plans import EvaluationPlan
from localspec.policy import FixedPolicy, StepOutcome
from localspec.profile import WORTHWHILE, Profile, SamplerCost
from localspec.sampling import Rule
from localspec.tuning import POOLED, PROFILE_DEPTH, agreements_at, rough_curve

__all__ = [
    "MAX_PARALLEL",
    "BatchCosts",
    "BatchPlan",
    "BatchPolicy",
    "accepted_prefix",
    "choose_batch",
    "measure_batch",
]

MAX_PARALLEL = 16
"""More sequences hardly gain: from there on a CPU is busy computing, and every one has its share of memory."""

_MAX_PASS = 64  # tokens in a pass; no plan goes further past what was measured
_MAX_DRAFT_TOKENS = 8
_ENOUGH = 0.98  # of the best throughput: where fewer sequences reach it, they save memory
_COUPLED = 0.93  # of the acceptance of the token rule (docs/sampling.md)
_TARGET_SIZES, _DRAFT_SIZES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Seconds of the passes that a step of a batch consists of.

    Attributes:
        target: passes of the target with a row for every token.
        draft: the same of the draft; None if there is none.
        target_plan: how a single sequence's tokens are evaluated.
        sampler: what a step of one sequence costs beside passes.
    """

    target: CostCurves
    draft: CostCurves | None
    target_plan: EvaluationPlan = field(default_factory=EvaluationPlan)
    sampler: SamplerCost = field(default_factory=SamplerCost)

    def step_s(self, parallel: int, tokens_per_step: Sequence[float], depth: int = PROFILE_DEPTH) -> float:
        """Return seconds of a step that drafts γ tokens for each of ``parallel`` sequences.

        Args:
            parallel: B.
            tokens_per_step: E(0), …, E(γ).
            depth: tokens each sequence holds. They share one cache, and a token looks through all of it.
        """
        gamma = len(tokens_per_step) - 1
        num_tokens = parallel * (gamma + 1)
        if parallel == 1:
            seconds = self.target_plan.seconds(self.target, num_tokens, depth)
        else:
            seconds = _seconds(self.target, num_tokens, parallel * depth)
        if gamma == 0:
            return seconds + parallel * self.sampler.plain_s
        assert self.draft is not None
        # After full acceptance the draft lacks two tokens of a sequence instead of one.
        catching_up = parallel * min(1.0, max(0.0, tokens_per_step[-1] - tokens_per_step[-2]))
        seconds += _seconds(self.draft, parallel + catching_up, parallel * depth)
        seconds += (gamma - 1) * _seconds(self.draft, parallel, parallel * depth)
        return seconds + parallel * (self.sampler.step_s + gamma * self.sampler.draft_s)


def _seconds(curves: CostCurves, num_tokens: float, depth: int) -> float:
    """Return seconds of a pass; past the largest measured one a token costs what it did on average up to there.

    The last two points alone would not do: the curves have steps, and the last line may be flat.
    """
    last = curves.sizes[-1]
    if num_tokens <= last:
        whole = int(num_tokens)
        left = curves.seconds(whole, depth)
        return left + (num_tokens - whole) * (curves.seconds(whole + 1, depth) - left) if whole < num_tokens else left
    top = curves.seconds(last, depth)
    slope = max(0.0, top - curves.seconds(1, depth)) / max(1, last - 1)
    return top + (num_tokens - last) * slope


def measure_batch(target: Context, draft: Context | None, profile: Profile | None) -> BatchCosts:
    """Return costs: a profile's, and what it lacks measured now, in some seconds; sequence 0 is emptied then."""
    draft_curve = profile.draft_batch if profile is not None else None
    if draft is not None and draft_curve is None:
        draft_curve = rough_curve(draft, _DRAFT_SIZES)
    if profile is None:
        return BatchCosts(rough_curve(target, _TARGET_SIZES), draft_curve)
    return BatchCosts(profile.target, draft_curve, profile.target_plan, profile.sampler)


def accepted_prefix(profile: Profile | None, temperature: float, rule: Rule) -> tuple[float, ...]:
    """Return S_0, S_1, …: the chance that a step's first i drafted tokens are all accepted.

    As calibration found at the nearest temperature, over all kinds of text; without a profile as drafts of the
    target's own family roughly do.
    """
    if profile is None:
        typical = sum(UNCALIBRATED.typical) / len(UNCALIBRATED.typical)
        chances = [typical**i for i in range(_MAX_DRAFT_TOKENS + 1)]
    else:
        agreements = agreements_at(profile, temperature)
        pooled = next((a for a in agreements if a.kind == POOLED), agreements[0])
        tokens = pooled.tokens_per_step("block" if rule == "block" else "token")
        chances = [b - a for a, b in zip((0.0, *tokens), tokens, strict=False)]
    share = _COUPLED if rule == "coupled" else 1.0
    return tuple(min(1.0, max(0.0, chance)) * share**i for i, chance in enumerate(chances))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What was chosen.

    Attributes:
        parallel: B, the most sequences that run together.
        num_draft_tokens: γ with all of them running; fewer sequences may draft more.
        tokens_per_s: predicted throughput, prompts not counted; None where nothing was predicted.
    """

    parallel: int
    num_draft_tokens: int | None
    tokens_per_s: float | None = None


def choose_batch(
    costs: BatchCosts,
    accepted: Sequence[float],
    *,
    max_parallel: int = MAX_PARALLEL,
    parallel: int | None = None,
    num_draft_tokens: int | None = None,
) -> BatchPlan:
    """Return the B and γ of the largest throughput; the least B among those that come within 2% of it.

    Args:
        costs: measured.
        accepted: S_0, S_1, … as ``accepted_prefix`` returns them.
        max_parallel: the most sequences there is memory for.
        parallel: B, if it is given.
        num_draft_tokens: γ, if it is given.
    """
    sizes = [parallel] if parallel is not None else range(1, max_parallel + 1)
    plans = []
    for size in sizes:
        gamma = best_length(costs, accepted, size) if num_draft_tokens is None else num_draft_tokens
        plans.append(BatchPlan(size, gamma, throughput(costs, accepted, size, gamma)))
    best = max(plan.tokens_per_s or 0.0 for plan in plans)
    return next(plan for plan in plans if (plan.tokens_per_s or 0.0) >= _ENOUGH * best)


def throughput(costs: BatchCosts, accepted: Sequence[float], parallel: int, num_draft_tokens: int) -> float:
    """Return predicted tokens per second of ``parallel`` sequences that draft ``num_draft_tokens`` each."""
    tail = accepted[-1] / accepted[-2] if len(accepted) > 1 and accepted[-2] > 0 else 0.0
    chances = [*accepted, *(accepted[-1] * tail**i for i in range(1, num_draft_tokens + 1))][: num_draft_tokens + 1]
    expected = list(accumulate(chances))
    return parallel * expected[-1] / costs.step_s(parallel, expected)


def best_length(costs: BatchCosts, accepted: Sequence[float], parallel: int, *, pace: float = 1.0) -> int:
    """Return the γ of the largest throughput, and 0 where speculation does not clearly gain.

    ``pace`` is what steps that draft take, relative to their predicted cost.
    """
    if costs.draft is None:
        return 0
    limit = min(len(accepted) - 1, _MAX_DRAFT_TOKENS, max(1, _MAX_PASS // parallel) - 1)
    rates = [throughput(costs, accepted, parallel, gamma) / (pace if gamma else 1.0) for gamma in range(limit + 1)]
    best = max(range(limit + 1), key=rates.__getitem__)
    return best if rates[best] >= WORTHWHILE * rates[0] else 0


class BatchPolicy:
    """Drafts for all sequences of a batch as many tokens as pay with so many of them running.

    It learns how much more or less is accepted than expected, and stops speculating where the clock shows a loss.

    Args:
        costs: measured.
        accepted: S_0, S_1, … as expected beforehand.
        plan: what was chosen; if its γ is 0, nothing is ever drafted.
        learns: False keeps to expectations and ignores the clock.
    """

    def __init__(self, costs: BatchCosts, accepted: Sequence[float], plan: BatchPlan, *, learns: bool = True) -> None:
        self._costs = costs
        self._accepted = tuple(accepted)
        # Without drafts from the beginning the draft has read nothing, and reading it all for a last few tokens
        # would take longer than they do.
        self._drafts = bool(plan.num_draft_tokens)
        self._learns = learns
        self.guard = Guard()  # in tokens of one sequence
        self._ratio = ForgettingRatio(50.0, 50.0, keep=0.998)
        self._pace = ForgettingRatio(4.0, 4.0, keep=0.95)  # of steps that draft by the clock, relative to plain ones
        self._length = FixedPolicy(0)
        self._outcomes: list[StepOutcome] = []
        self._best = lru_cache(maxsize=256)(self._best_length)

    @property
    def num_draft_tokens(self) -> int:
        """What the current step drafts for each sequence."""
        return self._length.limit

    def plan(self, depth: int) -> FixedPolicy:
        """Return the length that ``begin`` decided on."""
        return self._length

    def observe(self, outcome: StepOutcome) -> None:
        """Take note of what one sequence did in the step."""
        self._outcomes.append(outcome)

    def begin(self, num_sequences: int) -> None:
        """Decide on the length for a step of so many sequences."""
        allowed = self._drafts and (not self._learns or self.guard.allows)
        ratio, pace = round(self._ratio.value, 2), round(self._pace.value, 1)
        self._length = FixedPolicy(self._best(num_sequences, ratio, pace) if allowed else 0)

    def end(self, num_sequences: int, *, reading: bool) -> None:
        """Learn from the step that ``begin`` began; one that read a prompt says nothing of time."""
        outcomes, self._outcomes = self._outcomes, []
        if not self._learns or not outcomes:
            return
        for outcome in outcomes:
            judged = min(outcome.num_accepted + 1, outcome.num_drafted)
            if judged:
                self._ratio.add(outcome.num_accepted, sum(self._conditional(i) for i in range(judged)))
        if not reading:
            together = StepOutcome(
                num_drafted=sum(o.num_drafted for o in outcomes),
                num_accepted=sum(o.num_accepted for o in outcomes),
                num_emitted=sum(o.num_emitted for o in outcomes) / len(outcomes),
                depth=max(o.depth for o in outcomes),
                draft_s=min(o.draft_s for o in outcomes),  # without what the draft read of someone's prompt
                verify_s=outcomes[0].verify_s,
                sampling_s=sum(o.sampling_s for o in outcomes),
            )
            plain_s = self._costs.step_s(num_sequences, (1.0,))
            expected = list(accumulate(self._accepted[: self._length.limit + 1]))
            usual_s = self._costs.step_s(num_sequences, expected) * self.guard.pace
            if together.num_drafted:
                self._pace.add_ratio((together.draft_s + together.verify_s + together.sampling_s) / usual_s)
                usual_s *= self._pace.value
            self.guard.observe(together, plain_s, usual_s, speculated=together.num_drafted > 0)

    def _conditional(self, position: int) -> float:
        """Return the expected acceptance of a position all before which were accepted."""
        before, after = self._accepted[min(position, len(self._accepted) - 2) :][:2]
        return after / before if before > 0 else 0.0

    def _best_length(self, num_sequences: int, ratio: float, pace: float) -> int:
        chances = [1.0]
        for i in range(len(self._accepted) - 1):
            chances.append(chances[-1] * min(1.0, ratio * self._conditional(i)))
        return best_length(self._costs, chances, num_sequences, pace=pace)
