"""How much faster an answer was than plain decoding, by the clock of the very same answer."""

from __future__ import annotations

from collections import deque
from statistics import median

from localspec.policy import DraftPlan, FixedPolicy, Policy, StepOutcome

__all__ = ["MeasuredPolicy", "PlainSteps"]

_PROBES = 2  # plain steps at the beginning of an answer; each still emits a token, so they cost next to nothing
_PLAIN = FixedPolicy(0)


class PlainSteps:
    """Seconds of the last plain steps of a session."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=16)

    def add(self, seconds: float) -> None:
        """Take note of one."""
        self._seconds.append(seconds)

    @property
    def usual_s(self) -> float | None:
        """Their median; None before there are two."""
        return median(self._seconds) if len(self._seconds) >= 2 else None


class MeasuredPolicy:
    """Another policy, with a few plain steps in front, and a stopwatch.

    The number of plain steps does not depend on what is drawn, so the output stays exact.

    Attributes:
        policy: decides otherwise.

    Args:
        policy: as above.
        plain: where plain steps of the session are noted.
    """

    def __init__(self, policy: Policy, plain: PlainSteps) -> None:
        self.policy = policy
        self._plain = plain
        self._planned = 0
        self._emitted = 0.0
        self._drafted = 0
        self._spent_s = 0.0

    def plan(self, depth: int) -> DraftPlan:
        """Plan the next step."""
        self._planned += 1
        return _PLAIN if self._planned <= _PROBES else self.policy.plan(depth)

    def observe(self, outcome: StepOutcome) -> None:
        """Take note of a step."""
        self.policy.observe(outcome)
        seconds = outcome.draft_s + outcome.verify_s + outcome.sampling_s
        if outcome.num_drafted == 0 and outcome.draft_s < 0.1 * outcome.verify_s:
            self._plain.add(seconds)
        self._emitted += outcome.num_emitted
        self._drafted += outcome.num_drafted
        self._spent_s += seconds + outcome.prefill_s

    @property
    def speedup(self) -> float | None:
        """Speed over plain decoding so far; None where nothing was drafted or plain steps were not seen."""
        usual_s = self._plain.usual_s
        if usual_s is None or not self._drafted or self._spent_s <= 0:
            return None
        return self._emitted * usual_s / self._spent_s
