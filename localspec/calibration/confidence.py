"""From the draft's confidence in its next token to the chance that the target will accept one.

Monotone regression by pooling adjacent violators: the least-squares fit among all non-decreasing ones, with no
shape to choose (Ayer et al. 1955).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localspec.errors import InvalidOptionError

__all__ = ["ConfidenceModel", "fit_confidence", "isotonic_fit"]

Floats = NDArray[np.float64]

_NUM_TYPICAL = 64
_MIN_WEIGHT = 20  # positions behind every step of the fit: a standard error of at most 0.11


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
                raise InvalidOptionError(f"{name} is {values}; it must ascend within 0 to 1")

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


def isotonic_fit(values: ArrayLike, weights: ArrayLike) -> Floats:
    """Return the non-decreasing sequence nearest to ``values`` [n] in weighted squares, float64 [n].

    >>> isotonic_fit([1, 3, 2, 4], [1, 1, 1, 1])
    array([1. , 2.5, 2.5, 4. ])
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(np.asarray(values, float).tolist(), np.asarray(weights, float).tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            left, left_total, left_length = blocks.pop()
            mean = (left * left_total + mean * total) / (left_total + total)
            total, length = left_total + total, left_length + length
        blocks.append((mean, total, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def fit_confidence(
    confidence: Sequence[float] | Floats, acceptance: Sequence[float] | Floats, *, min_weight: int = _MIN_WEIGHT
) -> ConfidenceModel:
    """Fit acceptance, Σ min(p, q), [n], to confidence, max q, [n]; n ≥ 1.

    Positions are first averaged in groups of neighbours, ``min_weight`` or more in each, so that a few lucky
    positions at an end of the range do not make a step of their own.
    """
    x, y = np.asarray(confidence, float), np.asarray(acceptance, float)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise InvalidOptionError(
            f"confidence has shape {x.shape} and acceptance {y.shape}; both hold one number per position"
        )
    if min_weight < 1:
        raise InvalidOptionError(f"min_weight is {min_weight}; use 1 or more")
    # Equal confidences share a group, or interpolation would have to jump.
    levels, level_of, counts = np.unique(x, return_inverse=True, return_counts=True)
    sums = np.bincount(level_of, weights=y)
    group_of = _groups(counts, min_weight)
    weights = np.bincount(group_of, weights=counts)
    centres = np.bincount(group_of, weights=levels * counts) / weights
    fitted = isotonic_fit(np.bincount(group_of, weights=sums) / weights, weights)
    keep = _corners(fitted)
    thresholds, predictions = centres[keep], np.clip(fitted[keep], 0.0, 1.0)
    ranks = (np.arange(_NUM_TYPICAL) + 0.5) / _NUM_TYPICAL
    typical = np.interp(np.quantile(x, ranks), thresholds, predictions)
    return ConfidenceModel(tuple(thresholds.tolist()), tuple(predictions.tolist()), tuple(typical.tolist()))


def _groups(counts: NDArray[np.int64], min_weight: int) -> NDArray[np.int64]:
    """Number the levels so that neighbours share a group until it has ``min_weight``; what remains joins the last."""
    groups, number, weight = [], 0, 0
    left = int(counts.sum())
    for count in counts.tolist():
        groups.append(number)
        weight, left = weight + count, left - count
        if weight >= min_weight and left >= min_weight:
            number, weight = number + 1, 0
    return np.array(groups)


def _corners(fitted: Floats) -> NDArray[np.bool_]:
    """Mark the first and last of every run of equal values: the rest is on the line between them."""
    rises = np.diff(fitted) > 0
    marks: NDArray[np.bool_] = np.r_[True, rises] | np.r_[rises, True]
    return marks
