"""What a check says: one finding for each thing it looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

__all__ = ["Allowance", "Finding", "Part", "Report"]

Part = Literal["noise", "greedy", "rollback", "rule", "replay", "generations", "endings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one part.

    Attributes:
        part: which.
        passed: whether nothing is wrong.
        summary: what was looked at, and the numbers.
        false_alarm: the most likely that a sound build fails here, over the choice of the seed; 0 where nothing
            is left to chance.
        problems: what is wrong, the first few of each kind.
        elapsed_s: seconds it took.
    """

    part: Part
    passed: bool
    summary: str
    false_alarm: float
    problems: tuple[str, ...] = ()
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order in which they came.

    Attributes:
        findings: one for each part.
        interrupted: whether the user ended it early.
    """

    findings: tuple[Finding, ...]
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether every part was looked at and nothing is wrong."""
        return not self.interrupted and all(finding.passed for finding in self.findings)

    @property
    def false_alarm(self) -> float:
        """The most likely that a sound build fails, over the choice of the seed."""
        return sum(finding.false_alarm for finding in self.findings)


class Allowance:
    """The time a part may take; it always does its first piece of work.

    Args:
        seconds: from now on.
        clock: tells the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds = seconds
        self._last = self._started
        self._longest_s = 0.0

    @property
    def spent(self) -> float:
        """The share used up, 1 at the end and more after it."""
        return (self._clock() - self._started) / self._seconds

    def goes_on(self) -> bool:
        """Whether there is time for another piece of work as long as the longest so far."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        return now + self._longest_s <= self._started + self._seconds
