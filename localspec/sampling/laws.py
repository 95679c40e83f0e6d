"""Next-token laws: something one can ask, draw from and subtract.

Dense laws keep unnormalised weights in the dtype of the logits (a float32 softmax is good enough for a row)
and their total in float64. Truncated laws keep only the surviving ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.sampling.noise import GROUP, PositionNoise

__all__ = ["DenseLaw", "Floats", "Ids", "Law", "SparseLaw", "residual", "starts"]

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

_CHUNK = 512  # entries summed at once: about √V, so that both levels of a draw cost the same


@dataclass(frozen=True, slots=True, eq=False)
class DenseLaw:
    """A law over the whole vocabulary.

    Attributes:
        weights: unnormalised probabilities, float32 or float64 [V].
        chunk_totals: sums of ``_CHUNK`` consecutive weights each, float64.
        total: sum of all weights.
    """

    weights: Floats
    chunk_totals: NDArray[np.float64]
    total: float

    @classmethod
    def of(cls, weights: Floats) -> DenseLaw:
        """Return the law proportional to ``weights`` [V]."""
        totals = np.add.reduceat(weights, starts(len(weights), _CHUNK)).astype(np.float64)
        return cls(weights, totals, float(totals.sum()))

    @property
    def confidence(self) -> float:
        """The largest probability."""
        return float(self.weights.max()) / self.total

    def prob(self, token: int) -> float:
        """Return the probability of ``token``; 0 outside the vocabulary."""
        return float(self.weights[token]) / self.total if 0 <= token < len(self.weights) else 0.0

    def probs_at(self, ids: Ids) -> NDArray[np.float64]:
        """Return the probabilities of ``ids`` [n]; 0 outside the vocabulary."""
        inside = (ids >= 0) & (ids < len(self.weights))
        return np.where(inside, self.weights[np.where(inside, ids, 0)], 0.0) / self.total

    def draw(self, uniform: float) -> int:
        """Return the token at which the cumulative law passes ``uniform`` in [0, 1)."""
        edges = np.cumsum(self.chunk_totals)
        target = uniform * edges[-1]
        chunk = _first_above(edges, target, self.chunk_totals)
        inside = self.weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        below = edges[chunk - 1] if chunk else 0.0
        return chunk * _CHUNK + _first_above(np.cumsum(inside, dtype=np.float64), target - below, inside)

    def race(self, noise: PositionNoise) -> int:
        """Return the token x with the least E(x)/p(x), the lowest id among equals: a draw by shared noise."""
        size = len(self.weights)
        heaviest = np.maximum.reduceat(self.weights, starts(size, GROUP)).astype(np.float64)
        least, owners = noise.least(np.arange(len(heaviest)))
        with np.errstate(divide="ignore", over="ignore"):
            # The winner is no later than any token tried: those with the least noise, and those around the heaviest.
            ids, weights = self._members(np.array([heaviest.argmax()]))
            soonest = (noise.at(ids) / weights).min()
            owners[-1] = min(owners[-1], size - 1)
            soonest = min(soonest, (noise.at(owners) / self.weights[owners]).min())
            # No token of a group arrives before the group's least noise over the largest weight in it.
            ids, weights = self._members(np.flatnonzero(least / heaviest <= soonest))
            able = np.flatnonzero(least[ids // GROUP] / weights <= soonest)
            ids, weights = ids[able], weights[able]
            return int(ids[(noise.at(ids) / weights).argmin()])

    def _members(self, groups: Ids) -> tuple[Ids, NDArray[np.float64]]:
        ids = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
        ids = ids[ids < len(self.weights)]
        return ids, self.weights[ids].astype(np.float64)

    def dense(self, size: int) -> NDArray[np.float64]:
        """Return the probabilities as float64 [size]."""
        out = np.zeros(size)
        out[: len(self.weights)] = self.weights
        return out / self.total


@dataclass(frozen=True, slots=True, eq=False)
class SparseLaw:
    """A law over few tokens.

    Attributes:
        ids: the support, int64 [n], ascending.
        probs: their probabilities, float64 [n], summing to 1.
    """

    ids: Ids
    probs: NDArray[np.float64]

    @classmethod
    def of(cls, ids: Ids, weights: NDArray[np.float64]) -> SparseLaw:
        """Return the law proportional to ``weights`` [n] on the ascending ``ids`` [n]."""
        return cls(ids, weights / weights.sum())

    @classmethod
    def point(cls, token: int) -> SparseLaw:
        """Return the law that always gives ``token``."""
        return cls(np.array([token], dtype=np.int64), np.ones(1))

    @property
    def confidence(self) -> float:
        """The largest probability."""
        return float(self.probs.max())

    def prob(self, token: int) -> float:
        """Return the probability of ``token``."""
        at = int(np.searchsorted(self.ids, token))
        return float(self.probs[at]) if at < len(self.ids) and self.ids[at] == token else 0.0

    def probs_at(self, ids: Ids) -> NDArray[np.float64]:
        """Return the probabilities of ``ids`` [n]."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probs[at], 0.0)

    def draw(self, uniform: float) -> int:
        """Return the token at which the cumulative law passes ``uniform`` in [0, 1)."""
        edges = np.cumsum(self.probs)
        return int(self.ids[_first_above(edges, uniform * edges[-1], self.probs)])

    def race(self, noise: PositionNoise) -> int:
        """Return the token x with the least E(x)/p(x), the lowest id among equals: a draw by shared noise."""
        with np.errstate(divide="ignore", over="ignore"):
            return int(self.ids[(noise.at(self.ids) / self.probs).argmin()])

    def dense(self, size: int) -> NDArray[np.float64]:
        """Return the probabilities as float64 [size]."""
        out = np.zeros(size)
        out[self.ids] = self.probs
        return out


Law = DenseLaw | SparseLaw


def residual(p: Law, q: Law, scale: float = 1.0) -> tuple[Law, float] | None:
    """Return the law proportional to max(scale·p − q, 0) and the sum of that; None where it is 0 everywhere.

    Its support lies within p's, so a sparse p makes it cheap whatever q is.
    """
    if isinstance(p, SparseLaw):
        rest = np.maximum(scale * p.probs - q.probs_at(p.ids), 0.0)
        total = float(rest.sum())
        return (SparseLaw.of(p.ids, rest), total) if total > 0 else None
    weights = p.weights * p.weights.dtype.type(scale / p.total)
    if isinstance(q, SparseLaw):
        shared = (q.ids >= 0) & (q.ids < len(weights))
        weights[q.ids[shared]] -= q.probs[shared]
    else:
        shared_size = min(len(weights), len(q.weights))
        weights[:shared_size] -= q.weights[:shared_size] * q.weights.dtype.type(1.0 / q.total)
    np.maximum(weights, 0, out=weights)
    rest_law = DenseLaw.of(weights)
    return (rest_law, rest_law.total) if rest_law.total > 0 else None


@lru_cache(maxsize=16)
def starts(size: int, step: int) -> Ids:
    """Return 0, step, 2·step, … below ``size``: where ``reduceat`` begins its sums."""
    return np.arange(0, size, step)


def _first_above(edges: NDArray[np.float64], target: float, weights: Floats) -> int:
    """Return the first index whose cumulative edge exceeds ``target``; never one of weight 0."""
    at = int(np.searchsorted(edges, target, side="right"))
    if at < len(edges) and weights[at] > 0:
        return at
    return int(np.flatnonzero(weights)[-1])  # rounding at the far end
