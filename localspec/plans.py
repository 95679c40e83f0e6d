"""The cheapest way to evaluate n tokens: one pass over them, one filled up with others, or several passes.

A pass over three tokens can cost more than one over four, because kernels work on blocks; and two passes of one
token less than one of two, because they use another kernel. What is cheapest follows from the measured costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.errors import InvalidOptionError

__all__ = ["DEFAULT_MARGIN", "EvaluationPlan", "PlannedContext", "cheapest_passes", "evaluation_plan"]

DEFAULT_MARGIN = 0.05
"""What a rearrangement must gain, as a share of the cost of the single pass it replaces."""

_STANDARD_ERRORS = 3.0  # by which a gain must stand out: the best of many noisy candidates looks better than it is


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How to evaluate up to ``limit`` tokens.

    Attributes:
        passes: entry n - 1 has the sizes of the passes that evaluate n tokens, in order; what they have beyond n
            is padding at the end of the last one.

    Raises:
        InvalidOptionError: passes that do not hold their tokens, or one that would hold padding only.
    """

    passes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for n, sizes in enumerate(self.passes, 1):
            if not sizes or min(sizes) < 1 or not 0 <= sum(sizes) - n < sizes[-1]:
                raise InvalidOptionError(f"{n} tokens cannot be evaluated in passes of {list(sizes)}")

    @property
    def limit(self) -> int:
        """The most tokens that are planned for."""
        return len(self.passes)

    def sizes(self, num_tokens: int) -> tuple[int, ...]:
        """Return the sizes of the passes over ``num_tokens``: a single one where nothing is planned."""
        return self.passes[num_tokens - 1] if 0 < num_tokens <= self.limit else (num_tokens,)

    def padding(self, num_tokens: int) -> int:
        """Return how many throw-away tokens the last pass takes along."""
        return sum(self.sizes(num_tokens)) - num_tokens

    def seconds(self, curves: CostCurves, num_tokens: int, depth: int) -> float:
        """Return what evaluating ``num_tokens`` costs under the plan.

        Padding is counted as if it had rows: what that overstates is small, and never the cost of a single pass.
        """
        *earlier, last = self.sizes(num_tokens)
        return sum(curves.earlier_seconds(size, depth) for size in earlier) + curves.seconds(last, depth)

    @property
    def rearranged(self) -> tuple[int, ...]:
        """The numbers of tokens that are not evaluated in one pass of their own."""
        return tuple(n for n, sizes in enumerate(self.passes, 1) if sizes != (n,))


Costs = Sequence[tuple[int, float]]
"""Sizes of passes, with their seconds."""


def cheapest_passes(last: Costs, earlier: Costs, limit: int) -> list[tuple[int, ...]]:
    """For 1..limit tokens, the sizes of the passes that together cost least, in order.

    Only the last pass may be larger than the tokens t that are left for it. With C(m) its cost and D(m) that of a
    pass before it, T(n) = min over t ≤ m of C(m) + U(n - t), U(n) = min over m ≤ n of D(m) + U(n - m), and U(0) = 0.

    Args:
        last: sizes that the last pass may have, with their costs, all above 0.
        earlier: the same of the passes before it.
        limit: the most tokens.

    >>> costs = [(1, 1.0), (2, 2.5), (3, 3.6), (4, 2.4)]
    >>> cheapest_passes(costs, costs, 4)
    [(1,), (1, 1), (4,), (4,)]
    """
    exact: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]  # cost, number of passes, sizes
    best = []
    for n in range(1, limit + 1):
        # Among equals the fewest passes: each one more has its share of noise.
        best.append(min(_with(m, cost, exact[n - t]) for m, cost in last for t in range(1, min(m, n) + 1))[2])
        options = [_with(size, cost, exact[n - size]) for size, cost in earlier if size <= n]
        exact.append(min(options, default=(inf, 0, ())))
    return best


def _with(size: int, cost: float, before: tuple[float, int, tuple[int, ...]]) -> tuple[float, int, tuple[int, ...]]:
    return before[0] + cost, before[1] + 1, (*before[2], size)


def evaluation_plan(
    curves: CostCurves, *, limit: int | None = None, margin: float = DEFAULT_MARGIN
) -> EvaluationPlan:
    """Return how to evaluate up to ``limit`` tokens, rearranging only where that surely gains.

    A rearrangement is taken if it is no slower at any measured depth and gains, over all of them, more than
    ``margin`` of the single pass's cost and more than noise: so it also never is slower by more than noise.

    Args:
        curves: measured costs.
        limit: the most tokens to plan for; default, and at most, as far as every size from 1 was measured.
        margin: the least gain, as a share.
    """
    sizes = set(curves.sizes)
    measured = next(n for n in range(len(sizes) + 1) if n + 1 not in sizes)
    limit = measured if limit is None else min(limit, measured)
    earlier = set.intersection(*({point.num_tokens for point in curve.earlier} for curve in curves.curves))
    proposals = [cheapest_passes(_costs(c.points, sizes), _costs(c.earlier, earlier), limit) for c in curves.curves]
    passes = []
    for n in range(1, limit + 1):
        candidates = {proposal[n - 1] for proposal in proposals}
        gains = {candidate: _sure_gain(curves.curves, n, candidate, margin) for candidate in candidates}
        best = max(sorted(candidates), key=gains.__getitem__)
        passes.append(best if gains[best] > 0 else (n,))
    return EvaluationPlan(tuple(passes))


def _costs(points: Sequence[PassCost], sizes: set[int]) -> Costs:
    return [(point.num_tokens, point.seconds) for point in points if point.num_tokens in sizes]


def _sure_gain(curves: Sequence[CostCurve], num_tokens: int, sizes: Sequence[int], margin: float) -> float:
    """Seconds gained beyond the margin and beyond noise, summed over the depths; 0 if lost at any of them."""
    gains, spreads, naive_s = [], [], 0.0
    for curve in curves:
        last = {point.num_tokens: point for point in curve.points}
        earlier = {point.num_tokens: point for point in curve.earlier}
        passes = [*(earlier[size] for size in sizes[:-1]), last[sizes[-1]]]
        naive = last[num_tokens]
        naive_s += naive.seconds
        gains.append(naive.seconds - sum(one.seconds for one in passes))
        # A point that occurs twice errs twice in the same direction.
        spreads += [count * one.spread_s for one, count in Counter((naive, *passes)).items()]
    if min(gains) < 0:
        return 0.0
    return sum(gains) - max(margin * naive_s, _STANDARD_ERRORS * hypot(*spreads))


class PlannedContext:
    """A ``Context`` that evaluates the tokens of a single sequence as an ``EvaluationPlan`` says.

    Several sequences at once, more tokens than planned for, and padding that the cache has no room for go
    to the context within as they are. The logits are those of the same tokens: kernels for other sizes round
    differently, as they do whenever a pass has another size.

    Args:
        context: what evaluates.
        plan: how.
    """

    def __init__(self, context: Context, plan: EvaluationPlan) -> None:
        self.context = context
        self.plan = plan
        self.vocabulary_size = context.vocabulary_size
        self.kept_ids = context.kept_ids
        self.capacity = context.capacity
        self.num_sequences = context.num_sequences
        self.chunk = context.chunk
        # By sequence: where its own tokens end, while padding may lie behind them. Noted before a pass and settled
        # before the next, so that an interrupt at any moment leaves lengths true.
        self._ends: dict[int, int] = {}
        self._rows = np.empty((0, context.vocabulary_size), np.float32)

    def length(self, sequence: int) -> int:
        """Return how many tokens the cache holds for ``sequence``, padding not counted."""
        held = self.context.length(sequence)
        return min(held, self._ends.get(sequence, held))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of ``sequence``."""
        self.context.truncate(sequence, min(length, self._ends.get(sequence, length)))
        self._ends.pop(sequence, None)

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let ``sequence`` hold the first ``length`` tokens of ``source``; see ``Context.copy``."""
        self._ends.pop(sequence, None)
        self.context.copy(source, sequence, length)

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        """Append every span's tokens; see ``Context.decode``."""
        for span in batch:
            if span.sequence in self._ends:
                self.truncate(span.sequence, self._ends[span.sequence])
        if len(batch) == 1 and not batch[0].padding:
            sizes = self.plan.sizes(len(batch[0].tokens))
            room = self.capacity - self.context.length(batch[0].sequence)
            if sizes != (len(batch[0].tokens),) and sum(sizes) <= room:
                return self._execute(batch[0], sizes)
        return self.context.decode(batch)

    def _execute(self, span: Span, sizes: Sequence[int]) -> NDArray[np.float32]:
        num_tokens = len(span.tokens)
        first_row = num_tokens - span.rows
        if sum(sizes) > num_tokens:
            self._ends[span.sequence] = self.context.length(span.sequence) + num_tokens
        if span.rows > len(self._rows):
            self._rows = np.empty((span.rows, self.vocabulary_size), np.float32)
        at = 0
        for size in sizes:
            tokens = span.tokens[at : at + size]
            at += len(tokens)
            padding = size - len(tokens)
            rows = min(len(tokens), max(0, at - first_row))
            filled = [*tokens, *[tokens[-1]] * padding]
            logits = self.context.decode([Span(span.sequence, filled, rows, padding)])
            if rows == span.rows and at == num_tokens:
                return logits
            if rows:
                end = at - first_row
                self._rows[end - rows : end] = logits
        return self._rows[: span.rows]
