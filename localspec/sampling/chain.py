"""The sampler chain: from one row of logits to the next-token law.

Semantics are llama.cpp's, and are tested against llama.cpp itself; ``docs/sampling.md`` says where equals at a cut
are treated differently. Nothing here sorts a whole vocabulary if it can help it: at 150,000 entries a sort costs
more than everything else together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from localspec.errors import InvalidLogitsError, InvalidOptionError
from localspec.sampling.laws import DenseLaw, Floats, Ids, Law, SparseLaw, starts
from localspec.sampling.params import SamplingParams, Stage

__all__ = ["RecentTokens", "law", "make_law"]

_MANY = 8192  # survivors: beyond, a dense law with zeros is cheaper to draw from
_IMPOSSIBLE = 1e4  # a surprise whose weight is 0, and which times 0 is 0
_BLOCK = 512  # entries summed at once where a cumulative sum over all of them would be slow


class RecentTokens:
    """The tokens before a position that penalties look at: emitted ones, then the drafted prefix of the step.

    Args:
        params: tell how many count; without penalties nothing is kept.
        history: all emitted tokens.
    """

    __slots__ = ("_kept",)

    def __init__(self, params: SamplingParams, history: Sequence[int]) -> None:
        first = 0 if params.penalty_last_n is None else max(0, len(history) - params.penalty_last_n)
        self._kept = np.array(history[first:], dtype=np.int64) if params.penalises else None

    def then(self, drafted: Sequence[int]) -> Ids:
        """Return what ``make_law`` needs of the history, ``drafted`` tokens being the last of it."""
        if self._kept is None:
            return np.empty(0, np.int64)
        return np.concatenate([self._kept, np.array(drafted, dtype=np.int64)])


def make_law(logits: Floats, params: SamplingParams, history: Sequence[int] | Ids = ()) -> Law:
    """Return the next-token law that ``params`` make of one row of logits.

    Args:
        logits: float32 or float64 [V]; not kept, so a view that is about to change is fine.
        params: the chain.
        history: tokens before this position, drafted ones included; penalties look at the last of them.

    Raises:
        InvalidLogitsError: the row holds NaN or +inf, or nothing above −inf is left.
    """
    # Some models mask with the lowest finite number; below it lies −inf, which is as good. +inf and a ban make NaN,
    # which is noticed like any other.
    with np.errstate(over="ignore", invalid="ignore"):
        row = _edited(logits, params, history)
        if params.greedy and not params.stages:
            # One pass over the row: where there is a NaN, it is what argmax finds.
            token = int(row.argmax())
            if not math.isfinite(row[token]):
                raise InvalidLogitsError(_complaint(logits, float(row[token])))
            return SparseLaw.point(token)
        top = float(row.max())
        if not math.isfinite(top):
            raise InvalidLogitsError(_complaint(logits, top))
        return _shaped(row, top, params)


def _shaped(row: Floats, top: float, params: SamplingParams) -> Law:
    """Return the law that temperature and cuts make of a row whose maximum is ``top``."""
    stages, temperature = params.stages, params.temperature
    heats_first = params.sampler_order == "huggingface"
    # Only typical-p may cut the likeliest token off, and only where temperature has not decided already.
    if params.greedy and (heats_first or "typical_p" not in stages):
        return SparseLaw.point(int(row.argmax()))
    if heats_first or not stages:
        row = row - row.dtype.type(top)
        np.multiply(row, row.dtype.type(1.0 / temperature), out=row)
        temperature = 1.0
    if not stages:
        return DenseLaw.of(np.exp(row, out=row))
    ids, values = _survivors(row, params)
    if params.greedy:
        return SparseLaw.point(int(ids[values.argmax()]))
    weights = np.exp((values - values.max()) / temperature)
    if len(ids) <= _MANY:
        return SparseLaw.of(ids, weights)
    dense: Floats = np.zeros_like(row)
    dense[ids] = weights
    return DenseLaw.of(dense)


def law(logits: Floats, params: SamplingParams, history: Sequence[int] = ()) -> NDArray[np.float64]:
    """Return the next-token law in dense form: what ``make_law`` holds, as float64 [V].

    >>> import numpy as np
    >>> law(np.array([2.0, 0.0, 1.0]), SamplingParams(temperature=0))
    array([1., 0., 0.])
    >>> law(np.array([2.0, 0.0, 1.0]), SamplingParams(top_k=2)).round(3)
    array([0.731, 0.   , 0.269])
    >>> law(np.array([2.0, 0.0, 1.0]), SamplingParams(presence_penalty=1), history=[0]).round(3)
    array([0.422, 0.155, 0.422])

    Raises:
        InvalidLogitsError: as ``make_law``.
        InvalidOptionError: ``logits`` is not one row of numbers, or ``history`` no list of token ids.
    """
    try:
        logits, seen = np.asarray(logits), np.asarray(history)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"logits or history is not an array of numbers: {error}") from None
    if logits.ndim != 1 or not logits.size or logits.dtype.kind not in "fiu":
        raise InvalidOptionError(f"logits have shape {logits.shape} and hold {logits.dtype}; give one row, [V]")
    if seen.ndim != 1 or (seen.size and not np.issubdtype(seen.dtype, np.integer)):
        raise InvalidOptionError(f"history has shape {seen.shape} and holds {seen.dtype}; give token ids, [N]")
    if logits.dtype not in (np.float32, np.float64):
        logits = logits.astype(np.float64)
    return make_law(logits, params, seen.astype(np.int64)).dense(len(logits))


def _complaint(logits: Floats, top: float) -> str:
    if top == -math.inf and float(logits.max()) > top:
        return "the banned tokens leave none that could be sampled; ban fewer"
    return (
        f"a row of logits has the maximum {top}, so no law can be made of it; the model file may be"
        " damaged (localspec models pull --verify), or the model overflows on this backend"
    )


# --- what changes single logits -----------------------------------------------------------------------------------


def _edited(logits: Floats, params: SamplingParams, history: Sequence[int] | Ids) -> Floats:
    """Return the row after bias, bans and penalties: itself if there are none, else a copy."""
    seen, counts = _recent(params, history, len(logits))
    if not (params.biases or params.banned or seen.size):
        return logits
    row = logits.copy()
    for ids, values in _biases(params.biases, params.banned):
        inside = ids < len(row)
        row[ids[inside]] += values[inside]
    if seen.size:
        # Dividing a negative logit would make its token likelier.
        found = row[seen]
        scaled = np.where(found <= 0, found * params.repetition_penalty, found / params.repetition_penalty)
        row[seen] = scaled - counts * params.frequency_penalty - params.presence_penalty
    return row


def _recent(params: SamplingParams, history: Sequence[int] | Ids, size: int) -> tuple[Ids, Ids]:
    """Return the tokens that penalties apply to, each once, and how often it occurs."""
    if not params.penalises:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    tokens = np.asarray(history[-params.penalty_last_n :] if params.penalty_last_n else history, dtype=np.int64)
    seen, counts = np.unique(tokens, return_counts=True)
    inside = slice(*np.searchsorted(seen, [0, size]))
    return seen[inside], counts[inside]


@lru_cache(maxsize=16)
def _biases(
    biases: tuple[tuple[int, float], ...], banned: tuple[int, ...]
) -> tuple[tuple[Ids, NDArray[np.float64]], ...]:
    """Return the ids that something is added to, and what."""
    pairs = [*biases, *((token, -math.inf) for token in banned)]
    return (
        ((np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float64)),) if pairs else ()
    )


# --- what cuts tokens off -----------------------------------------------------------------------------------------


def _survivors(row: Floats, params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """Return the ids that every stage lets through, ascending, and their values (float64)."""
    first, *rest = params.stages
    if first == "top_k" and "typical_p" not in rest:
        return _largest(row, params)
    ids = _CUTS[first](row, params)
    values = row[ids].astype(np.float64)
    for stage in rest:
        kept = _CUTS[stage](values, params)
        ids, values = ids[kept], values[kept]
    return ids, values


def _largest(row: Floats, params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """Do as ``_survivors`` for top-k with top-p and min-p behind it, which only shorten what top-k has sorted.

    The usual settings: a third of the calls, each of which costs more than its work on so few values.
    """
    ids = _top_ids(row, params.top_k)
    values = row[ids].astype(np.float64)
    count = len(ids)
    if params.top_p < 1:
        reached = np.exp(values - values[0]).cumsum()
        count = min(count, int(reached.searchsorted(params.top_p * reached[-1])) + 1)
    if params.min_p > 0:
        count = min(count, int(np.count_nonzero(values >= values[0] + math.log(params.min_p))))
    order = ids[:count].argsort()
    return ids[order], values[order]


# A cut takes values [n] with something finite in them, and returns which stay: ascending, nothing of −inf.


def _top_k(values: Floats, params: SamplingParams) -> Ids:
    return np.sort(_top_ids(values, params.top_k))


def _min_p(values: Floats, params: SamplingParams) -> Ids:
    # A Python float, so that float32 values are compared as such.
    return np.flatnonzero(values >= float(values.max()) + math.log(params.min_p))


def _top_p(values: Floats, params: SamplingParams) -> Ids:
    weights = values - values.max()
    np.exp(weights, out=weights)
    total = float(weights.sum())
    # Were all below this floor, they would not reach 1 − top_p together: the cut is above it. Half, for rounding.
    ids = np.flatnonzero(weights >= 0.5 * (1 - params.top_p) * total / len(weights))
    weights = weights[ids]
    ordered = np.sort(weights)[::-1]
    last = _reaching(ordered, params.top_p * total)
    return ids[_chosen(weights > ordered[last], weights == ordered[last], last + 1)]


def _typical_p(values: Floats, params: SamplingParams) -> Ids:
    surprise = values.max() - values  # −log p, up to the logarithm of the total
    weights = np.exp(-surprise)
    total = float(weights.sum())
    surprise += surprise.dtype.type(math.log(total))
    entropy = float(weights @ np.minimum(surprise, _IMPOSSIBLE)) / total
    # Tokens more surprising than this do not reach 1 − typical_p together. The others are no farther from the
    # entropy than it is, or than a certain token is, and suffice; what is farther is not among the kept.
    enough = math.log(len(values) / (1 - params.typical_p))
    ids = np.flatnonzero(surprise <= entropy + max(abs(enough - entropy), entropy) + 1.0)
    distance = np.abs(surprise[ids] - entropy)
    order = np.argsort(distance)
    reached = np.cumsum(weights[ids[order]], dtype=np.float64)
    last = min(int(np.searchsorted(reached, params.typical_p * total, side="right")), len(ids) - 1)
    limit = distance[order[last]]
    return ids[_chosen(distance < limit, distance == limit, last + 1)]


_CUTS: Mapping[Stage, Callable[[Floats, SamplingParams], Ids]] = {
    "top_k": _top_k,
    "typical_p": _typical_p,
    "top_p": _top_p,
    "min_p": _min_p,
}


def _top_ids(values: Floats, k: int) -> Ids:
    """Return the ids of the k largest values above −inf, largest first, lower id first among equals."""
    if k < len(values) // 64:
        # The k-th largest of the maxima of groups is a floor that at least k entries reach, and few more do. Large
        # groups are quicker to go through, as long as there are many more of them than k.
        maxima = np.maximum.reduceat(values, starts(len(values), 512 if k < len(values) // 2048 else 64))
        floor = float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    elif k < len(values):
        floor = float(np.partition(values, len(values) - k)[len(values) - k])
    else:
        floor = -math.inf
    ids = np.flatnonzero(values >= floor) if floor > -math.inf else np.flatnonzero(values > -np.inf)
    return ids[np.argsort(-values[ids], kind="stable")[:k]]


def _chosen(inside: NDArray[np.bool_], at_the_edge: NDArray[np.bool_], count: int) -> Ids:
    """Return where ``inside`` holds, and the first places at the edge that make it ``count``; ascending."""
    equals = np.flatnonzero(at_the_edge)
    inside[equals[: count - np.count_nonzero(inside)]] = True
    return np.flatnonzero(inside)


def _reaching(weights: Floats, wanted: float) -> int:
    """Return the first index at which the cumulative sum of ``weights`` reaches ``wanted``, or the last one."""
    blocks = np.cumsum(np.add.reduceat(weights, starts(len(weights), _BLOCK), dtype=np.float64))
    block = min(int(np.searchsorted(blocks, wanted)), len(blocks) - 1)
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    below = float(blocks[block - 1]) if block else 0.0
    return min(block * _BLOCK + int(np.searchsorted(inside, wanted - below)), len(weights) - 1)
