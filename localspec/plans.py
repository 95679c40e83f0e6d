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
from localspec.curves import CostCurve, CostCurves
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

        The rows are counted as the curve has them, which a rearrangement never exceeds.
        """
        return sum(curves.seconds(size, depth) for size in self.sizes(num_tokens))

    @property
    def rearranged(self) -> tuple[int, ...]:
        """The numbers of tokens that are not evaluated in one pass of their own."""
        return tuple(n for n, sizes in enumerate(self.passes, 1) if sizes != (n,))


def cheapest_passes(seconds: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, ...]]:
    """For 1..limit tokens, the sizes of the passes that together cost least; sums may exceed the tokens.

    Args:
        seconds: sizes of passes that may be used, with their costs, all above 0.
        limit: the most tokens.

    With C(m) the cost of a pass over m tokens, T(n) = min over m of C(m) + T(n - m), and T is 0 for n ≤ 0.

    >>> cheapest_passes([(1, 1.0), (2, 2.5), (3, 3.6), (4, 2.4)], 4)
    [(1,), (1, 1), (4,), (4,)]
    """
    totals: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for n in range(1, limit + 1):
        best: tuple[float, tuple[int, ...]] = (inf, ())
        for size, cost in seconds:
            before, sizes = totals[max(0, n - size)]
            # Among equals the fewest passes: each one more has its share of overhead and of noise.
            if (before + cost, len(sizes) + 1) < (best[0], len(best[1])):
                best = before + cost, (*sizes, size)
        totals.append(best)
    return [tuple(sorted(sizes)) for _, sizes in totals[1:]]


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
    proposals = [
        cheapest_passes(
            [(point.num_tokens, point.seconds) for point in curve.points if point.num_tokens in sizes], limit
        )
        for curve in curves.curves
    ]
    passes = []
    for n in range(1, limit + 1):
        candidates = {proposal[n - 1] for proposal in proposals}
        gains = {candidate: _sure_gain(curves.curves, n, candidate, margin) for candidate in candidates}
        best = max(sorted(candidates), key=gains.__getitem__)
        passes.append(best if gains[best] > 0 else (n,))
    return EvaluationPlan(tuple(passes))


def _sure_gain(curves: Sequence[CostCurve], num_tokens: int, sizes: Sequence[int], margin: float) -> float:
    """Seconds gained beyond the margin and beyond noise, summed over the depths; 0 if lost at any of them."""
    naive = [curve.seconds(num_tokens) for curve in curves]
    gains = [whole - sum(map(curve.seconds, sizes)) for whole, curve in zip(naive, curves, strict=True)]
    spreads = [
        count * curve.spread_s(size) for curve in curves for size, count in Counter((num_tokens, *sizes)).items()
    ]
    if min(gains) < 0:
        return 0.0
    return sum(gains) - max(margin * sum(naive), _STANDARD_ERRORS * hypot(*spreads))


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
