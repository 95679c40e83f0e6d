"""What the draft's confidence says about acceptance: a fitted, monotone line."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from localspec.errors import InvalidOptionError

__all__ = ["ConfidenceModel"]


@dataclass(frozen=True, slots=True)
class ConfidenceModel:
    """Predicted acceptance as a function of the draft's largest probability.

    Attributes:
        thresholds: confidences, ascending; between two of them the prediction is interpolated, outside constant.
        acceptance: prediction at each, not descending.
        typical: predictions at evenly spaced quantiles of the confidences met: what to expect of a position whose
            draft law is not known yet.
    """

    thresholds: tuple[float, ...]
    acceptance: tuple[float, ...]
    typical: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.thresholds) != len(self.acceptance) or not self.thresholds or not self.typical:
            raise InvalidOptionError(
                f"{len(self.thresholds)} thresholds, {len(self.acceptance)} acceptances, {len(self.typical)} typical"
                " values; a confidence model has as many thresholds as acceptances, and one or more of each"
            )
        for name, values in (("thresholds", self.thresholds), ("acceptance", self.acceptance)):
            if not all(0 <= value <= 1 for value in values) or list(values) != sorted(values):
                raise InvalidOptionError(f"{name} of a confidence model is {values}; it must ascend within 0 to 1")

    def predict(self, confidence: float) -> float:
        """Return the chance that a token drawn from a law this confident will be accepted."""
        # In plain Python: numpy's overhead for one number is ten times this.
        at = bisect_right(self.thresholds, confidence)
        if at == 0:
            return self.acceptance[0]
        if at == len(self.thresholds):
            return self.acceptance[-1]
        left, right = self.thresholds[at - 1], self.thresholds[at]
        share = (confidence - left) / (right - left)
        return self.acceptance[at - 1] + share * (self.acceptance[at] - self.acceptance[at - 1])

    def expected_gain(self, weight: float, cost: float) -> float:
        """Return E[max(0, weight·b − cost)] over the predictions b that typical positions give."""
        return sum(max(0.0, weight * b - cost) for b in self.typical) / len(self.typical)
