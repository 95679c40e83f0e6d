"""How long to draft, decided token by token from measured cost and learned agreement (docs/how-it-works.md).

Everything a decision rests on is known before the token in question is drawn: past tokens, the draft's laws up to
its position, past acceptances and timings. No drawn token is ever thrown away, so the output's law is untouched.

Costs are the measured curves, not the clock: a busy machine slows all passes alike and should not change a
decision. Only the guard looks at the clock, because only the clock can show that the curves are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from localspec.averages import ForgettingRatio
from localspec.confidence import ConfidenceModel
from localspec.policy import DraftPlan, FixedPolicy, StepOutcome

__all__ = ["UNCALIBRATED", "AdaptivePolicy", "Costs", "Guard"]

_PLAIN = FixedPolicy(0)
_LEAST_GAIN = 0.05  # tokens a copy must be expected to gain: what it gains less is noise


class Costs(Protocol):
    """Seconds of one pass, as measured."""

    @property
    def max_draft_tokens(self) -> int:
        """The longest draft to make with a model."""

    @property
    def max_lookup_tokens(self) -> int:
        """The most tokens to copy."""

    def verify_s(self, num_tokens: int, depth: int) -> float:
        """Return seconds of a target pass over ``num_tokens`` with a row each, after ``depth`` tokens."""

    def draft_s(self, num_tokens: int, depth: int) -> float:
        """Return seconds of a draft pass over ``num_tokens`` with one row."""

    def observe(self, num_tokens: int, seconds: float) -> bool:
        """Take note of what a verification took on a machine that is not busy; return whether that changes much."""


UNCALIBRATED = ConfidenceModel(
    thresholds=(0.0, 1.0), acceptance=(0.35, 0.97), typical=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96)
)
"""A draft of the target's own family, roughly; corrected by what is seen."""


@dataclass(slots=True)
class Guard:
    """Stops speculation that the clock shows to lose, and lets it try again later.

    Two plain steps at the beginning tell what plain decoding takes by the clock, relative to its curve. From then on
    every speculative step adds to a debt what it took beyond the plain cost of its tokens, and pays back what it
    saved; a debt of more than ``credit`` plain tokens stops it (a one-sided CUSUM test: luck with single steps
    cancels out, a steady loss does not).

    Attributes:
        credit: plain tokens that may be lost before speculation stops.
        pause_tokens: plain tokens after that; doubled after each further stop, up to a limit.
    """

    credit: float = 8.0
    pause_tokens: int = 256
    _plain: ForgettingRatio = field(default_factory=lambda: ForgettingRatio(keep=0.9))
    _plain_steps: int = 0
    _debt: float = 0.0
    _resting: int = 0

    @property
    def allows(self) -> bool:
        """Whether the next step may speculate."""
        return self._plain_steps >= 2 and self._resting <= 0

    @property
    def slowness(self) -> float:
        """What plain decoding takes by the clock, relative to its curve; 1 before that is known."""
        return self._plain.value if self._plain_steps else 1.0

    def observe(self, outcome: StepOutcome, plain_cost_s: float, *, speculated: bool) -> None:
        """Take note of a step; a token of it would have cost ``plain_cost_s`` by the plain curve."""
        spent_s = outcome.draft_s + outcome.verify_s + outcome.sampling_s
        if not speculated:
            self._plain_steps += 1
            self._resting -= outcome.num_emitted
            self._plain.add(spent_s, plain_cost_s)
            return
        plain_s = plain_cost_s * self.slowness
        self._debt = max(0.0, self._debt + spent_s / plain_s - outcome.num_emitted)
        if self._debt > self.credit:
            self._resting = self.pause_tokens
            self.pause_tokens = min(4096, 2 * self.pause_tokens)
            self._debt = self.credit / 2  # a second loss is believed sooner


class AdaptivePolicy:
    """Drafts as long as the next token is worth its cost.

    Args:
        costs: measured seconds per pass.
        confidence: what the draft model's confidence says about acceptance.
        worthwhile: whether a draft model may be used; False where there is none, or where calibration found that it
            does not pay: then it does not even read the prompt.
        lookup: whether tokens may be copied from earlier text.
        guard: what stops a losing streak of the draft model.
    """

    def __init__(
        self,
        costs: Costs,
        confidence: ConfidenceModel,
        *,
        worthwhile: bool = True,
        lookup: bool = False,
        guard: Guard | None = None,
    ) -> None:
        self.costs = costs
        self.confidence = confidence
        self.worthwhile = worthwhile
        self.lookup = lookup
        self.guard = guard or Guard()
        # Of its own: neither way to draft shall stop because the other one loses. Copies are long and come in runs
        # that hit or miss together, so that luck swings wider: a credit of 8 would end them in texts where they win.
        self.lookup_guard = Guard(credit=32.0)
        # How much more is accepted than the confidence model says, which counts as 20 tokens seen.
        self._correction = ForgettingRatio(keep=0.98)
        self._correction.add(20.0, 20.0)
        self._throughput: ForgettingRatio | None = None
        self._plan: _Plan | None = None
        self._table: _CostTable | None = None

    def plan(self, depth: int) -> DraftPlan:
        """Return the plan of the next step."""
        drafts = self.worthwhile and self.guard.allows
        copies = self.lookup and self.lookup_guard.allows
        if not (drafts or copies):
            return _PLAIN
        if self._table is None or abs(self._table.depth - depth) > 32:
            self._table = _CostTable.at(depth, self.costs)
        self._plan = _Plan(self, self._table, drafts=drafts, copies=copies)
        return self._plan

    def acceptance(self, confidence: float) -> float:
        """Return the expected acceptance at this confidence, corrected by what was seen."""
        return min(1.0, self.confidence.predict(confidence) * self.correction)

    @property
    def correction(self) -> float:
        """How much more is accepted than the model says."""
        return self._correction.value

    def throughput(self, depth: int) -> float:
        """Return tokens per second by the curves, as recent steps reached it; at least plain decoding's."""
        plain = 1.0 / self.costs.verify_s(1, depth)
        return plain if self._throughput is None else max(plain, self._throughput.value)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step."""
        plan, self._plan = self._plan, None
        plain_s = self.costs.verify_s(1, outcome.depth)
        self._watch(outcome, plain_s, plan)
        clock_s = (outcome.verify_s + outcome.sampling_s) / self.lookup_guard.slowness
        if self.costs.observe(outcome.num_drafted + 1, clock_s):
            self._table = None
        if plan is None:
            return
        cost_s = self.costs.verify_s(outcome.num_drafted + 1, outcome.depth) + plan.spent_s
        if self._throughput is None:
            self._throughput = ForgettingRatio(keep=0.95)
            self._throughput.add(10.0, 10.0 * plain_s)
        self._throughput.add(outcome.num_emitted, cost_s)
        # Positions up to the first rejection were judged; those after it were not.
        judged = plan.predicted[: min(outcome.num_accepted + 1, outcome.num_drafted)]
        if judged:
            self._correction.add(outcome.num_accepted, sum(judged))

    def _watch(self, outcome: StepOutcome, plain_s: float, plan: _Plan | None) -> None:
        """Tell the guards: a plain step to both, any other to the one it concerns."""
        copied = plan is not None and plan.copied > 0
        ran = plan is not None and plan.spent_s > 0
        if not copied:
            self.guard.observe(outcome, plain_s, speculated=ran)
        if not ran:
            self.lookup_guard.observe(outcome, plain_s, speculated=copied)


@dataclass(frozen=True, slots=True)
class _CostTable:
    """The curves near one depth, seconds: ``verify_s[n]`` of a target pass over n + 1 tokens."""

    depth: int
    verify_s: Sequence[float]
    draft_s: float

    @classmethod
    def at(cls, depth: int, costs: Costs) -> _CostTable:
        longest = max(costs.max_draft_tokens, costs.max_lookup_tokens)
        verify_s = [costs.verify_s(n + 1, depth) for n in range(longest + 1)]
        return cls(depth, verify_s, costs.draft_s(1, depth))


class _Plan:
    """One step: decides with w, the chance that everything drafted so far stands."""

    def __init__(self, policy: AdaptivePolicy, table: _CostTable, *, drafts: bool, copies: bool) -> None:
        self.limit = policy.costs.max_draft_tokens if drafts else 0
        self.lookup_limit = policy.costs.max_lookup_tokens if copies else 0
        self.spent_s = 0.0
        self.copied = 0
        self.predicted: list[float] = []
        self._policy = policy
        self._table = table
        self._chance = 1.0
        self._price = policy.throughput(table.depth)
        self._usual = [min(1.0, b * policy.correction) for b in policy.confidence.typical]
        self._mean = sum(self._usual) / len(self._usual)

    def copies(self, chances: Sequence[float]) -> int:
        """Return the number of copied tokens that gains most, if that is more than the model may be expected to."""
        tokens, chance, best, count = 0.0, 1.0, _LEAST_GAIN, 0
        plain_s = self._table.verify_s[0]
        for n, acceptance in enumerate(chances, 1):
            chance *= acceptance
            tokens += chance
            gain = tokens - self._price * (self._table.verify_s[n] - plain_s)
            if gain > best:
                best, count = gain, n
        if count and self.limit and best < self._next_gain():
            return 0
        self.copied = count
        return count

    def runs(self) -> bool:
        """Whether the draft's next law is worth a pass, averaged over the confidences it usually shows."""
        if self._next_gain() <= 0:
            return False
        self.spent_s += self._table.draft_s
        return True

    def draws(self, confidence: Callable[[], float]) -> bool:
        """Whether a token from this law is worth verifying."""
        acceptance = self._policy.acceptance(confidence())
        if self._gain(acceptance) <= 0:
            return False
        self.predicted.append(acceptance)
        self._chance *= acceptance
        return True

    def _next_gain(self) -> float:
        """Return the tokens gained by running the draft once more and going on as far as it pays, net of cost."""
        gain = sum(max(0.0, self._gain(b)) for b in self._usual) / len(self._usual)
        return gain - self._price * self._table.draft_s

    def _gain(self, acceptance: float) -> float:
        """Return the tokens gained by drawing the next token, net of cost, and going on as far as it pays.

        Looking only one token ahead would stop before a step of the curve behind which verification is cheap.
        """
        drafted, price = len(self.predicted), self._price
        tokens, chance = 0.0, self._chance * acceptance
        cost = -price * self._table.verify_s[drafted]
        best = float("-inf")
        for verify_s in self._table.verify_s[drafted + 1 : self.limit + 1]:
            tokens += chance
            best = max(best, tokens - cost - price * verify_s)
            chance *= self._mean
            cost += price * self._table.draft_s
        return best
