from __future__ import annotations

import pytest

from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.errors import InvalidOptionError


def curve(depth: int, seconds: dict[int, float], spread_s: float = 0.0) -> CostCurve:
    return CostCurve(depth, tuple(PassCost(n, n, s, spread_s, 5) for n, s in seconds.items()))


CURVES = CostCurves((curve(64, {1: 1.0, 2: 1.5, 4: 3.5}), curve(1024, {1: 1.1, 2: 1.7, 4: 4.5, 8: 9.0})))


def test_measured_points_are_returned_as_they_are() -> None:
    assert CURVES.seconds(2, 64) == 1.5
    assert CURVES.seconds(4, 1024) == 4.5
    assert CURVES.sizes == (1, 2, 4)
    assert CURVES.depths == (64, 1024)


def test_between_points_costs_lie_on_lines() -> None:
    assert CURVES.seconds(3, 64) == pytest.approx(2.5)
    assert CURVES.seconds(2, 544) == pytest.approx(1.6)
    assert CURVES.seconds(3, 544) == pytest.approx((2.5 + 3.1) / 2)


def test_past_the_points_the_last_line_goes_on() -> None:
    assert CURVES.curves[0].seconds(6) == pytest.approx(5.5)
    assert CURVES.seconds(1, 1984) == pytest.approx(1.2)
    assert CURVES.seconds(1, 0) == 1.0


def test_noise_that_makes_a_line_fall_is_not_followed_past_its_end() -> None:
    falling = CostCurves((curve(64, {1: 1.0, 2: 0.9}), curve(128, {1: 0.8, 2: 0.9})))
    assert falling.seconds(1, 10_000) == 0.8
    assert falling.curves[0].seconds(50) == 0.9


def test_a_single_point_holds_everywhere() -> None:
    single = CostCurves((curve(64, {3: 2.0}),))
    assert single.seconds(1, 0) == single.seconds(9, 5000) == 2.0


def test_earlier_passes_are_silent_where_that_was_measured() -> None:
    assert CURVES.earlier_seconds(2, 64) == 1.5
    points, silent = CURVES.curves[0].points, (PassCost(1, 0, 0.5, 0.0, 5), PassCost(3, 0, 1.5, 0.0, 5))
    curves = CostCurves((CostCurve(64, points, silent),))
    assert curves.earlier_seconds(1, 64) == 0.5
    assert curves.earlier_seconds(2, 64) == pytest.approx(1.0)
    assert curves.seconds(2, 64) == 1.5


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_sizes_that_do_not_grow_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="must grow"):
        CostCurve(0, tuple(PassCost(n, 1, 1.0, 0.0, 1) for n in sizes))


@pytest.mark.parametrize(("seconds", "spread"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_impossible_times_are_refused(seconds: float, spread: float) -> None:
    with pytest.raises(InvalidOptionError, match="finite"):
        CostCurve(0, (PassCost(1, 1, seconds, spread, 1),))


def test_silent_passes_are_checked_like_the_others() -> None:
    points = (PassCost(1, 1, 1.0, 0.0, 1),)
    with pytest.raises(InvalidOptionError, match="must grow"):
        CostCurve(0, points, (PassCost(2, 0, 1.0, 0.0, 1), PassCost(1, 0, 1.0, 0.0, 1)))
    with pytest.raises(InvalidOptionError, match="finite"):
        CostCurve(0, points, (PassCost(1, 0, 0.0, 0.0, 1),))


@pytest.mark.parametrize("depths", [(), (-1,), (64, 64), (64, 1)])
def test_depths_that_do_not_grow_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="depths must grow"):
        CostCurves(tuple(curve(depth, {1: 1.0}) for depth in depths))
