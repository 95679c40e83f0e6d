"""Means that forget: what was seen last counts most."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ForgettingRatio"]


@dataclass(slots=True)
class ForgettingRatio:
    """Σ numerators / Σ denominators, where each addition shrinks what came before, but never the prior.

    Attributes:
        keep: what is left of the past at each addition; 0.95 remembers about the last 20.
        prior: the value before anything is known.
        weight: of the prior, in the unit of the denominators; 0 is none, and then something must have been added.

    >>> ratio = ForgettingRatio(keep=0.5, prior=1.0, weight=2.0)
    >>> ratio.add(0.0, 2.0)
    >>> ratio.value
    0.5
    >>> ratio.fade(0.5)
    >>> round(ratio.value, 3)
    0.667
    """

    keep: float
    prior: float = 0.0
    weight: float = 0.0
    _numerator: float = 0.0
    _denominator: float = 0.0

    def add(self, numerator: float, denominator: float) -> None:
        """Take note of one more."""
        self.fade(self.keep)
        self._numerator += numerator
        self._denominator += denominator

    def fade(self, keep: float) -> None:
        """Forget all but the share ``keep``, with nothing new to take note of."""
        self._numerator *= keep
        self._denominator *= keep

    @property
    def value(self) -> float:
        """The mean."""
        return (self.prior * self.weight + self._numerator) / (self.weight + self._denominator)
