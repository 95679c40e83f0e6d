"""Next-token laws: from logits to something one can ask, draw from and subtract.

Dense laws keep unnormalised weights in the dtype of the logits (a float32 softmax is good enough for a row)
and their total in float64. Truncated laws keep only the surviving ids. Nothing here sorts a whole vocabulary:
at 150,000 entries a sort costs more than everything else in this module together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.errors import InvalidLogitsError
from localspec.sampling.params import SamplingParams

__all__ = ["DenseLaw", "Law", "SparseLaw", "law", "make_law", "residual"]

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
        starts = np.arange(0, len(weights), _CHUNK)
        totals = np.add.reduceat(weights, starts).astype(np.float64)
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

    def dense(self, size: int) -> NDArray[np.float64]:
        """Return the probabilities as float64 [size]."""
        out = np.zeros(size)
        out[self.ids] = self.probs
        return out


Law = DenseLaw | SparseLaw


def make_law(logits: Floats, params: SamplingParams, history: Sequence[int] = ()) -> Law:
    """Return the next-token law that ``params`` make of one row of logits.

    Args:
        logits: float32 or float64 [V]; not kept, so a view that is about to change is fine.
        params: temperature and truncation.
        history: tokens before this position, drafted ones included; what penalties will look at.

    Raises:
        InvalidLogitsError: the row holds NaN or +inf, or nothing above −inf.
    """
    top = float(logits.max())
    if not np.isfinite(top):
        raise InvalidLogitsError(
            f"a row of logits has the maximum {top}, so no law can be made of it; the model file may be"
            " damaged (localspec models pull --verify), or the model overflows on this backend"
        )
    if params.greedy:
        return SparseLaw.point(int(logits.argmax()))
    # Some models mask with the lowest finite number; below it lies −inf, which is as good.
    with np.errstate(over="ignore"):
        if not params.truncates:
            weights: Floats = logits - logits.dtype.type(top)
            np.multiply(weights, logits.dtype.type(1.0 / params.temperature), out=weights)
            return DenseLaw.of(np.exp(weights, out=weights))
        ids, values = _truncate(logits, top, params)
        return SparseLaw.of(ids, np.exp((values - top) / params.temperature))


def law(logits: Floats, params: SamplingParams, history: Sequence[int] = ()) -> NDArray[np.float64]:
    """Return the next-token law in dense form: what ``make_law`` holds, as float64 [V].

    >>> import numpy as np
    >>> law(np.array([2.0, 0.0, 1.0]), SamplingParams(temperature=0))
    array([1., 0., 0.])
    >>> law(np.array([2.0, 0.0, 1.0]), SamplingParams(top_k=2)).round(3)
    array([0.731, 0.   , 0.269])
    """
    logits = np.asarray(logits)
    if logits.dtype not in (np.float32, np.float64):
        logits = logits.astype(np.float64)
    return make_law(logits, params, history).dense(len(logits))


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


def _truncate(logits: Floats, top: float, params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """Return the ids that survive top-k, top-p and min-p, ascending, and their logits (float64)."""
    min_logit = top + np.log(params.min_p) if params.min_p > 0 else -np.inf
    if params.top_k == 0 and params.top_p >= 1:
        ids = np.flatnonzero(logits >= min_logit)
        return ids, logits[ids].astype(np.float64)
    ids = _top_ids(logits, params.top_k) if params.top_k > 0 else _top_mass_ids(logits, top, params.top_p)
    values = logits[ids].astype(np.float64)
    if params.top_p < 1:
        mass = np.cumsum(np.exp(values - top))
        # _top_mass_ids has already normalised by the whole row; after top-k the survivors are the whole.
        if params.top_k > 0:
            keep = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
            ids, values = ids[:keep], values[:keep]
    strong = values >= min_logit
    ids, values = ids[strong], values[strong]
    order = np.argsort(ids)
    return ids[order], values[order]


def _top_ids(logits: Floats, k: int) -> Ids:
    """Return the ids of the k largest logits above −inf, largest first, lower id first among equals."""
    if k < len(logits) // 64:
        # The k-th largest chunk maximum is a floor that at least k entries reach, and few more do.
        maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), 64))
        floor = float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    elif k < len(logits):
        floor = float(np.partition(logits, len(logits) - k)[len(logits) - k])
    else:
        floor = -np.inf
    ids = np.flatnonzero((logits >= floor) & (logits > -np.inf))
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]


def _top_mass_ids(logits: Floats, top: float, top_p: float) -> Ids:
    """Return the fewest largest-first ids whose probabilities reach ``top_p`` of the whole row."""
    wanted = top_p * DenseLaw.of(np.exp(logits - logits.dtype.type(top))).total
    k = 64
    while True:
        ids = _top_ids(logits, k)
        mass = np.cumsum(np.exp(logits[ids].astype(np.float64) - top))
        if mass[-1] >= wanted or len(ids) < k:
            return ids[: int(np.searchsorted(mass, wanted)) + 1]
        k *= 8


def _first_above(edges: NDArray[np.float64], target: float, weights: Floats) -> int:
    """Return the first index whose cumulative edge exceeds ``target``; never one of weight 0."""
    at = int(np.searchsorted(edges, target, side="right"))
    if at < len(edges) and weights[at] > 0:
        return at
    return int(np.flatnonzero(weights)[-1])  # rounding at the far end
