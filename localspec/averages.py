"""Means that forget: what was seen last counts most."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ForgettingRatio"]


@dataclass(slots=True)
class ForgettingRatio:
    """An exponentially forgetting mean of ratios: Σ numerators / Σ denominators, starting from a prior.

    Attributes:
        numerator: of the prior, then what is left of all.
        denominator: likewise.
        keep: what is left of the past at each addition; 0.95 remembers about the last 20.

    >>> ratio = ForgettingRatio(2.0, 2.0, keep=0.5)
    >>> ratio.add(0.0, 1.0)
    >>> ratio.value
    0.5
    """

    numerator: float
    denominator: float
    keep: float

    def add(self, numerator: float, denominator: float) -> None:
        """Take note of one more."""
        self.numerator = self.keep * self.numerator + numerator
        self.denominator = self.keep * self.denominator + denominator

    def add_ratio(self, ratio: float) -> None:
        """Add one ratio; a pass that was held up counts as twice as slow as usual at most."""
        self.add(min(max(ratio, 0.5 * self.value), 2.0 * self.value), 1.0)

    @property
    def value(self) -> float:
        """The mean."""
        return self.numerator / self.denominator
