"""From the draft's confidence in its next token to the chance that the target will accept one.

Monotone regression by pooling adjacent violators: the least-squares fit among all non-decreasing ones, with no
shape to choose (Ayer et al. 1955).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localspec.confidence import ConfidenceModel
from localspec.errors import InvalidOptionError

__all__ = ["fit_confidence", "isotonic_fit"]

Floats = NDArray[np.float64]

_NUM_TYPICAL = 64
_MIN_WEIGHT = 20  # positions behind every step of the fit: a standard error of at most 0.11


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
