"""How long to draft, decided token by token from measured cost and learned agreement (docs/how-it-works.md).

Everything a decision rests on is known before the token in question is drawn: past tokens, the draft's laws up to
its position, past acceptances and timings. No drawn token is ever thrown away, so the output's law is untouched.

Costs are the measured curves: a busy machine slows all passes alike and should not change a decision. The clock is
used for two things. Passes over several tokens, and the draft's, may have become dearer or cheaper *relative to plain
decoding* since the curves were measured (other programs take memory bandwidth, which plain decoding lives on, or
cores): slow averages of both, over the pace of plain steps, scale the curves. And the guard stops speculation that
loses all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localspec.averages import ForgettingRatio
from localspec.confidence import ConfidenceModel
from localspec.guard import Guard
from localspec.policy import EXPECTED_TOKENS, DraftPlan, FixedPolicy, StepOutcome

__all__ = ["UNCALIBRATED", "AdaptivePolicy", "Costs"]

_PLAIN = FixedPolicy(0)
_EXPLORED = 6  # steps with the draft model, before its costs are believed not to pay
_OTHER_MACHINE = 0.5  # of what a plain step takes by the curve
_CAUTION = 2.0  # times what has to be read is to be won back: its price is certain, and the gain is not
_HOPELESS = 0.9  # of plain decoding, if all drafted tokens are accepted
_TRIAL_SHARE = 0.02  # of what a text takes: what the draft may have to read for a mere trial
_LONGEST_PATIENCE = 4  # texts without a try
_PROBE_AFTER = 128  # steps that copied nothing
_PROBE_CHANCE = 0.5  # of a copied token that is worth trying for that reason
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


UNCALIBRATED = ConfidenceModel(
    thresholds=(0.0, 1.0), acceptance=(0.35, 0.97), typical=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96)
)
"""A draft of the target's own family, roughly; corrected by what is seen."""


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
        self.guard = guard or Guard(waits=True)
        # Of its own: neither way to draft shall stop because the other one loses. Copies are long and come in runs
        # that hit or miss together, so that luck swings wider: a credit of 8 would end them in texts where they win.
        self.lookup_guard = Guard(credit=32.0)
        # How much more is accepted than the confidence model says, worth 20 tokens of prior.
        self._correction = ForgettingRatio(20.0, 20.0, keep=0.98)
        # Seconds of passes over several tokens, and of the draft's, by the clock / by their curves; like Guard.pace.
        self._verify_clock = ForgettingRatio(2.0, 2.0, keep=0.95)
        self._draft_clock = ForgettingRatio(2.0, 2.0, keep=0.95)
        self._explored = 0
        self._idle_steps = 0
        self._idle_texts = 0
        self._patience = 1
        self._throughput: ForgettingRatio | None = None
        self._plan: _Plan | None = None
        self._table: _CostTable | None = None

    def renew(self) -> None:
        """Take note that a new text begins, in which the draft model gets another try where it did not pay before.

        It has to read the prompt for that, which may be some hundredths of a short answer: the longer it has not
        paid, the fewer texts try it.
        """
        self.guard.renew()
        self._idle_texts += 1
        if self._idle_texts >= self._patience:
            self._explored = min(self._explored, _EXPLORED - 1)
            self._idle_texts, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)

    def plan(self, depth: int) -> DraftPlan:
        """Return the plan of the next step."""
        drafts = self.worthwhile and self.guard.allows
        copies = self.lookup and self.lookup_guard.allows
        if not (drafts or copies):
            return _PLAIN
        if self._table is None:
            # Who finds plain decoding slower expects the same of everything: other programs take time. Who finds it
            # faster does not: memory bandwidth has come back, which passes over several tokens do not live on. Twice
            # as fast is no such thing: these curves are of another machine.
            pace = self.guard.pace
            expected = pace if pace < _OTHER_MACHINE else max(1.0, pace)
            for clock in (self._verify_clock, self._draft_clock):
                clock.numerator *= expected
        if self._table is None or abs(self._table.depth - depth) > 32:
            self._table = _CostTable.at(depth, self.costs)
        plan: type[_Plan] = _Plan
        if drafts and self._explored < _EXPLORED:
            plan = _Trial
        elif copies and self._idle_steps >= _PROBE_AFTER:
            plan = _CopyProbe
        table = self._table.scaled(self._verify_pace, self._draft_pace)
        self._plan = plan(self, table, drafts=drafts, copies=copies)
        return self._plan

    def acceptance(self, confidence: float) -> float:
        """Return the expected acceptance at this confidence, corrected by what was seen."""
        return min(1.0, self.confidence.predict(confidence) * self.correction)

    @property
    def why_idle(self) -> str:
        """Why the draft model is hardly used at present, in few words."""
        if not self.worthwhile:
            return "it does not pay here, says the profile"
        return "it lost time and rests" if self.guard.rests else "it would not pay now, by measured costs"

    @property
    def correction(self) -> float:
        """How much more is accepted than the model says."""
        return self._correction.value

    @property
    def _verify_pace(self) -> float:
        return self._verify_clock.value / self.guard.pace

    @property
    def _draft_pace(self) -> float:
        return self._draft_clock.value / self.guard.pace

    def catch_up_s(self, num_lacking: int, depth: int) -> float:
        """Return what reading so many tokens costs the draft, beyond the one or two that every step has to read."""
        if num_lacking <= 2:
            return 0.0
        return self.costs.draft_s(num_lacking, depth) - self.costs.draft_s(1, depth)

    def throughput(self, depth: int) -> float:
        """Return tokens per second by the curves, as recent steps reached it; at least plain decoding's."""
        plain = 1.0 / self.costs.verify_s(1, depth)
        return plain if self._throughput is None else max(plain, self._throughput.value)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step."""
        plan, self._plan = self._plan, None
        plain_s = self.costs.verify_s(1, outcome.depth)
        cost_s = plain_s if plan is None else self._learn_costs(outcome, plan)
        self._watch(outcome, plain_s, cost_s * self.guard.pace, plan)
        if plan is None:
            return
        if plan.passes and outcome.num_drafted:
            self._explored += 1
            if not isinstance(plan, _Trial):
                self._idle_texts, self._patience = 0, 1
        self._idle_steps = 0 if outcome.num_drafted else self._idle_steps + 1
        if self._throughput is None:
            self._throughput = ForgettingRatio(10.0, 10.0 * plain_s, keep=0.95)
        self._throughput.add(outcome.num_emitted, cost_s)
        # Positions up to the first rejection were judged; those after it were not.
        judged = plan.predicted[: min(outcome.num_accepted + 1, outcome.num_drafted)]
        if judged:
            self._correction.add(outcome.num_accepted, sum(judged))

    def _learn_costs(self, outcome: StepOutcome, plan: _Plan) -> float:
        """Compare a step with its curves; return what it costs by the curves as they are scaled then."""
        verify_s = self.costs.verify_s(outcome.num_drafted + 1, outcome.depth)
        if outcome.num_drafted:
            self._verify_clock.add_ratio((outcome.verify_s + outcome.sampling_s) / verify_s)
            verify_s *= self._verify_pace
        draft_s = 0.0  # without a draft model a pass costs infinitely much
        if plan.passes:
            one_s = self.costs.draft_s(1, outcome.depth)
            draft_s = plan.passes * one_s + plan.catch_up_s
        if draft_s:
            self._draft_clock.add_ratio(outcome.draft_s / draft_s)
        return verify_s + draft_s * self._draft_pace

    def _watch(self, outcome: StepOutcome, plain_s: float, usual_s: float, plan: _Plan | None) -> None:
        """Tell the guards: a plain step to both, any other to the one it concerns."""
        copied = plan is not None and plan.copied > 0
        ran = plan is not None and plan.passes > 0
        if not copied:
            self.guard.observe(outcome, plain_s, usual_s, speculated=ran)
        if not ran:
            self.lookup_guard.observe(outcome, plain_s, usual_s, speculated=copied)


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

    def best_speedup(self, limit: int) -> float:
        """Return the speedup over plain decoding if up to ``limit`` drafted tokens were all accepted."""
        steps = [self.verify_s[n] + n * self.draft_s for n in range(1, limit + 1)]
        return max(((n + 1) * self.verify_s[0] / step for n, step in enumerate(steps, 1)), default=0.0)

    def scaled(self, verify_pace: float, draft_pace: float) -> _CostTable:
        """Return the table with passes over several tokens, and the draft's, scaled; a plain one is the unit."""
        plain, *several = self.verify_s
        return _CostTable(self.depth, [plain, *(verify_pace * s for s in several)], draft_pace * self.draft_s)


class _Plan:
    """One step: decides with w, the chance that everything drafted so far stands."""

    def __init__(self, policy: AdaptivePolicy, table: _CostTable, *, drafts: bool, copies: bool) -> None:
        self.limit = policy.costs.max_draft_tokens if drafts else 0
        self.lookup_limit = policy.costs.max_lookup_tokens if copies else 0
        self.passes = 0
        self.catch_up_s = 0.0
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

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = EXPECTED_TOKENS) -> bool:
        """Whether the draft's next law is worth a pass, averaged over the confidences it usually shows."""
        reading_s = self._policy.catch_up_s(num_lacking + num_unread, self._table.depth)
        steps = max(1, num_expected // 2)
        return self._next_gain() > _CAUTION * self._price * reading_s / steps and self._run(num_lacking)

    def _run(self, num_lacking: int) -> bool:
        self.catch_up_s += self._policy.catch_up_s(num_lacking, self._table.depth)
        self.passes += 1
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


class _Trial(_Plan):
    """A step that drafts one token at least, whatever it is worth, to see whether costs are what they were.

    Only where the draft has little to read for that, and would not lose far even if all it drafts were accepted:
    otherwise the costs that are known decide.
    """

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = EXPECTED_TOKENS) -> bool:
        reading_s = self._policy.catch_up_s(num_lacking + num_unread, self._table.depth)
        dear = reading_s > _TRIAL_SHARE * num_expected * self._table.verify_s[0]
        if self.passes or dear or self._table.best_speedup(self.limit) < _HOPELESS:
            return super().runs(num_lacking, num_unread, num_expected)
        return self._run(num_lacking)

    def draws(self, confidence: Callable[[], float]) -> bool:
        if self.predicted:
            return super().draws(confidence)
        acceptance = self._policy.acceptance(confidence())
        self.predicted.append(acceptance)
        self._chance = acceptance
        return True


class _CopyProbe(_Plan):
    """A step that copies one token whatever it is worth, for the same reason."""

    def copies(self, chances: Sequence[float]) -> int:
        self.copied = 1 if chances[0] >= _PROBE_CHANCE else 0
        return self.copied
