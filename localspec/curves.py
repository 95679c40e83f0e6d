"""What a pass over n tokens costs, as measured: values, and the lines between them.

>>> shallow = CostCurve(depth=0, points=(PassCost(1, 1, 0.02, 0.0, 5), PassCost(3, 3, 0.04, 0.0, 5)))
>>> deep = CostCurve(depth=100, points=(PassCost(1, 1, 0.03, 0.0, 5), PassCost(3, 3, 0.06, 0.0, 5)))
>>> curves = CostCurves((shallow, deep))
>>> round(curves.seconds(2, 50), 4)
0.0375
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from localspec.errors import InvalidOptionError

__all__ = ["CostCurve", "CostCurves", "PassCost"]


@dataclass(frozen=True, slots=True)
class PassCost:
    """One measured point.

    Attributes:
        num_tokens: tokens in the pass.
        rows: rows of logits asked for.
        seconds: median of the trials.
        spread_s: standard error of that median, in seconds.
        trials: how many there were.
    """

    num_tokens: int
    rows: int
    seconds: float
    spread_s: float
    trials: int


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The points measured with ``depth`` tokens in the cache, by growing ``num_tokens``.

    Attributes:
        depth: tokens in the cache.
        points: passes with the rows of logits that an evaluation of so many tokens asks for.
        silent: passes without rows, where an evaluation asks for fewer rows than tokens: of several passes only the
            last one then has rows. A row is dear: a product with the whole output head.

    Raises:
        InvalidOptionError: no points, or not in order, or one that takes no time.
    """

    depth: int
    points: tuple[PassCost, ...]
    silent: tuple[PassCost, ...] = ()

    def __post_init__(self) -> None:
        for points in (self.points, self.silent or self.points):
            sizes = [point.num_tokens for point in points]
            if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
                raise InvalidOptionError(f"a curve over passes of {sizes} tokens; the sizes must grow from 1 or more")
        for point in (*self.points, *self.silent):
            if not 0 < point.seconds < float("inf") or not 0 <= point.spread_s < float("inf"):
                raise InvalidOptionError(
                    f"a pass over {point.num_tokens} tokens takes {point.seconds} ± {point.spread_s} s;"
                    " both must be finite, and the time above 0"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens measured."""
        return tuple(point.num_tokens for point in self.points)

    def seconds(self, num_tokens: int) -> float:
        """Seconds of one pass; on a line between measured sizes, on the last line's continuation past them."""
        return _on_lines(num_tokens, self.sizes, [point.seconds for point in self.points])

    @property
    def earlier(self) -> tuple[PassCost, ...]:
        """What passes before the last one of an evaluation cost."""
        return self.silent or self.points

    def earlier_seconds(self, num_tokens: int) -> float:
        """Seconds of a pass that is not the last one of its evaluation."""
        earlier = self.earlier
        return _on_lines(num_tokens, [p.num_tokens for p in earlier], [p.seconds for p in earlier])


@dataclass(frozen=True, slots=True)
class CostCurves:
    """One model's curves, by growing depth.

    Raises:
        InvalidOptionError: no curves, or not in order.
    """

    curves: tuple[CostCurve, ...]

    def __post_init__(self) -> None:
        depths = self.depths
        if not depths or depths[0] < 0 or any(b <= a for a, b in pairwise(depths)):
            raise InvalidOptionError(f"curves at depths {list(depths)}; there must be one, and the depths must grow")

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens in the cache, by curve."""
        return tuple(curve.depth for curve in self.curves)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens measured at every depth."""
        common = set.intersection(*(set(curve.sizes) for curve in self.curves))
        return tuple(sorted(common))

    def seconds(self, num_tokens: int, depth: int) -> float:
        """Seconds of one pass over ``num_tokens`` with ``depth`` tokens in the cache.

        Attention costs in proportion to the depth, so depths between and past the measured ones are on lines;
        before the first the cost is the first one's.
        """
        return _on_lines(depth, self.depths, [curve.seconds(num_tokens) for curve in self.curves])

    def earlier_seconds(self, num_tokens: int, depth: int) -> float:
        """Seconds of a pass that is not the last one of its evaluation, likewise."""
        return _on_lines(depth, self.depths, [curve.earlier_seconds(num_tokens) for curve in self.curves])


def _on_lines(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Interpolate linearly; constant before the first point, and past the last one on the last line if it rises."""
    right = min(bisect_left(xs, x), len(xs) - 1)
    if right == 0:
        return ys[0]
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    if x > xs[right]:
        return ys[right] + max(0.0, slope) * (x - xs[right])
    return ys[left] + slope * (x - xs[left])
