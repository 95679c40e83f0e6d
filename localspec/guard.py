"""Stops speculation that loses by the clock, whatever the curves say (docs/how-it-works.md)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from localspec.policy import StepOutcome

__all__ = ["Guard"]


@dataclass(slots=True)
class Guard:
    """Stops speculation that the clock shows to lose, and lets it try again later.

    Two plain steps at the beginning, and one now and then, tell what plain decoding takes by the clock, relative to
    its curve. From then on every speculative step adds to a debt what it took beyond the plain cost of its tokens,
    and pays back what it saved; a debt of more than ``credit`` plain tokens stops it (a one-sided CUSUM test: luck
    with single steps cancels out, a steady loss does not).

    Attributes:
        credit: plain tokens that may be lost before speculation stops.
        pause_tokens: plain tokens after that; doubled after each further stop, up to a limit.
        renewal_steps: steps after which a plain one renews what plain decoding takes.
        waits: whether it also waits for ``renew`` then: a draft model would have to read all that was written
            meanwhile, which by itself may cost a tenth of plain decoding; a new text has to be read anyway.
    """

    credit: float = 8.0
    pause_tokens: int = 256
    renewal_steps: int = 128
    waits: bool = False
    _stopped: bool = False
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _steps_since_plain: int = 0
    _plain_steps: int = 0
    _debt: float = 0.0
    _resting: float = 0

    @property
    def allows(self) -> bool:
        """Whether the next step may speculate."""
        return self._plain_steps >= 2 and not self.rests and self._steps_since_plain < self.renewal_steps

    @property
    def rests(self) -> bool:
        """Whether speculation was stopped because it lost."""
        return self._resting > 0 or (self._stopped and self.waits)

    @property
    def pace(self) -> float:
        """Seconds of a plain step by the clock / by its curve."""
        return median_low(self._plain) if self._plain else 1.0

    def renew(self) -> None:
        """Allow another try, if the pause is over: a new text begins."""
        self._stopped = self._resting > 0

    def observe(self, outcome: StepOutcome, plain_cost_s: float, usual_s: float, *, speculated: bool) -> None:
        """Take note of a step.

        Args:
            outcome: of the step.
            plain_cost_s: what a plain step takes by the curve.
            usual_s: what such a step usually takes by the clock; one that was held up counts as twice that.
            speculated: whether it was more than a plain step.
        """
        spent_s = outcome.draft_s + outcome.verify_s + outcome.sampling_s
        self._steps_since_plain += 1
        if outcome.num_drafted == 0:
            self._plain.append((spent_s - outcome.draft_s) / plain_cost_s)
            self._steps_since_plain = 0
        if not speculated:
            self._plain_steps += 1
            self._resting -= outcome.num_emitted
            return
        plain_s = plain_cost_s * self.pace
        self._debt = max(0.0, self._debt + min(spent_s, 2 * usual_s) / plain_s - outcome.num_emitted)
        if self._debt > self.credit:
            self._resting, self._stopped = self.pause_tokens, True
            self.pause_tokens = min(4096, 2 * self.pause_tokens)
            self._debt = self.credit / 2  # a second loss is believed sooner
