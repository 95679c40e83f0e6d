from __future__ import annotations

from pathlib import Path

import pytest

from localspec.calibration.costs import PassLoad, Setting, choose_setting, measure_costs, thread_candidates
from localspec.errors import EvaluationError, InvalidOptionError
from localspec.tuning import rough_curve
from tests.calibration.fakes import FakeClock, TimedContext
from tests.fakes import Failure


def linear(num_tokens: int, depth: int, threads: int) -> float:
    return (10 + 3 * num_tokens + depth * num_tokens / 1000) / 1000


def every(num_tokens: int) -> int:
    return num_tokens


def test_a_steady_machine_is_measured_exactly_and_quickly() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    result = measure_costs([PassLoad(context, (1, 2, 5), every)], depths=(64, 1024), budget_s=1e6, clock=clock)
    (curves,) = result.curves
    assert not result.interrupted
    assert curves.depths == (64, 1024)
    for curve in curves.curves:
        assert curve.sizes == (1, 2, 5)
        for point in curve.points:
            assert point.seconds == pytest.approx(linear(point.num_tokens, curve.depth, 1))
            assert point.spread_s == pytest.approx(0, abs=1e-12)
            assert point.rows == point.num_tokens
    assert context.length(0) == 0
    assert clock.now < 60  # far less than the budget: nothing is left to learn


def test_the_median_stands_a_disturbed_machine() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear, noise=0.05)
    (curves,) = measure_costs([PassLoad(context, (1, 4), every)], depths=(10,), budget_s=30, clock=clock).curves
    for point in curves.curves[0].points:
        truth = linear(point.num_tokens, 10, 1)
        assert truth < point.seconds < 1.04 * truth
        assert 0 < point.spread_s < 0.02 * truth


def test_a_cut_draft_is_measured_on_ids_that_it_drafts() -> None:
    """Others it reads by their embeddings, which may take longer: with ik, and one token, twice as long."""
    clock = FakeClock()
    context = TimedContext(clock, linear, kept=[1, 3])
    measure_costs([PassLoad(context, (1, 5), every)], depths=(64,), budget_s=0, clock=clock)
    assert context.ids == {1, 3}
    context.ids.clear()
    rough_curve(context, (1, 2))
    assert context.ids <= {1, 3}


def test_rows_are_those_asked_for() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    (curves,) = measure_costs([PassLoad(context, (2, 3), every)], depths=(0,), budget_s=0, clock=clock).curves
    assert context.rows == 2.5 * context.passes
    assert not curves.curves[0].silent


def test_passes_without_rows_are_measured_where_fewer_rows_than_tokens_are_asked_for() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    (curves,) = measure_costs([PassLoad(context, (1, 3), lambda n: 1)], depths=(0,), budget_s=0, clock=clock).curves
    (curve,) = curves.curves
    assert [(point.num_tokens, point.rows) for point in (*curve.points, *curve.silent)] == [
        (1, 1),
        (3, 1),
        (1, 0),
        (3, 0),
    ]
    assert context.rows == context.passes / 2


def test_two_models_are_measured_in_turn() -> None:
    clock = FakeClock()
    order: list[str] = []

    def noted(name: str) -> TimedContext:
        def seconds(num_tokens: int, depth: int, threads: int) -> float:
            order.append(name)
            return 0.01

        return TimedContext(clock, seconds)

    loads = [PassLoad(noted(name), (1, 2, 3), every) for name in "td"]
    result = measure_costs(loads, depths=(0,), budget_s=0, clock=clock)
    assert len(result.curves) == 2
    rounds = [order[i : i + 18] for i in range(0, len(order), 18)]
    assert len(rounds) == 3
    assert all(sorted(visited) == ["d"] * 9 + ["t"] * 9 for visited in rounds)
    assert len({tuple(visited) for visited in rounds}) > 1, "the order is the same in every round"


def test_the_budget_ends_the_measurement() -> None:
    clock = FakeClock()
    # Passes that never settle: a drift.
    context = TimedContext(clock, lambda n, depth, threads: 0.01 * (1 + clock.now % 7))
    measure_costs([PassLoad(context, (1, 2), every)], depths=(0,), budget_s=20, clock=clock)
    assert 20 <= clock.now < 20.5


def test_the_first_depth_is_measured_whatever_the_budget_and_later_ones_left_out() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    (curves,) = measure_costs([PassLoad(context, (1, 2), every)], depths=(8, 64), budget_s=0, clock=clock).curves
    assert curves.depths == (8,)
    assert all(point.trials >= 6 for point in curves.curves[0].points)


def test_progress_tells_the_share_of_the_budget() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear, noise=0.3)
    shares: list[float] = []
    load = PassLoad(context, (1, 2), every)
    measure_costs([load], depths=(0,), budget_s=5, progress=shares.append, clock=clock)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1


def test_depths_are_clipped_to_the_capacity() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear, capacity=100)
    (curves,) = measure_costs(
        [PassLoad(context, (1, 8), every)], depths=(64, 512, 900), budget_s=60, clock=clock
    ).curves
    assert curves.depths == (64, 92)


@pytest.mark.parametrize(
    ("sizes", "depths"),
    [((), (64,)), ((1,), ()), ((101,), (0,)), ((0,), (0,)), ((1,), (-1,))],
)
def test_what_cannot_be_measured_is_refused(sizes: tuple[int, ...], depths: tuple[int, ...]) -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear, capacity=100)
    with pytest.raises(InvalidOptionError):
        measure_costs([PassLoad(context, sizes, every)], depths=depths, budget_s=1, clock=clock)


def test_an_interrupt_keeps_the_depths_that_are_complete() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    whole = measure_costs([PassLoad(context, (1, 2), every)], depths=(8, 64), budget_s=1e6, clock=clock)
    passes = context.passes
    context = TimedContext(clock, linear)
    context.failure = Failure(passes - 20, KeyboardInterrupt(), "all")
    cut = measure_costs([PassLoad(context, (1, 2), every)], depths=(8, 64), budget_s=1e6, clock=clock)
    assert not whole.interrupted
    assert cut.interrupted
    assert cut.curves[0].depths == (8,)
    assert context.length(0) == 0


def test_an_interrupt_before_anything_is_complete_goes_on() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    context.failure = Failure(5, KeyboardInterrupt(), "all")
    with pytest.raises(KeyboardInterrupt):
        measure_costs([PassLoad(context, (1, 2), every)], depths=(8,), budget_s=1, clock=clock)
    assert context.length(0) == 0


def test_a_failing_pass_leaves_the_context_empty() -> None:
    clock = FakeClock()
    context = TimedContext(clock, linear)
    context.failure = Failure(4, EvaluationError("broken"), "half")
    with pytest.raises(EvaluationError):
        measure_costs([PassLoad(context, (1, 2), every)], depths=(8,), budget_s=1, clock=clock)
    assert context.length(0) == 0


# Settings


def contexts(
    clock: FakeClock, *, on: float = 1.0, threads: dict[int, float] | None = None
) -> dict[str, list[TimedContext]]:
    by_threads = threads or {}

    def seconds(factor: float):  # type: ignore[no-untyped-def]
        return lambda n, depth, count: 0.01 * n * factor * by_threads.get(count, 1.0)

    return {"off": [TimedContext(clock, seconds(1.0))], "on": [TimedContext(clock, seconds(on))]}


def choose(given: dict[str, list[TimedContext]], clock: FakeClock, threads: tuple[int, ...]) -> Setting:
    costs = choose_setting(given, threads=threads, sizes=[(1, 5)], depth=512, budget_s=10, clock=clock)  # type: ignore[arg-type]
    assert all(context.length(0) == 0 for group in given.values() for context in group)
    return costs[0].setting


@pytest.mark.parametrize("fastest", [4, 2, 1])
def test_the_faster_kernel_and_number_of_threads_are_chosen(fastest: int) -> None:
    clock = FakeClock()
    given = contexts(clock, on=0.8, threads={fastest: 0.7})
    assert choose(given, clock, (4, 2, 1)) == Setting(fastest, "on")
    assert given["on"][0].threads == fastest


def test_settings_are_visited_in_changing_order() -> None:
    clock = FakeClock()
    visited: list[int] = []

    def seconds(num_tokens: int, depth: int, threads: int) -> float:
        if visited[-1:] != [threads]:
            visited.append(threads)
        return 0.01 * (1 + clock.now % 3)

    choose({"off": [TimedContext(clock, seconds)]}, clock, (3, 2, 1))
    assert visited[1:] != (visited[:3] * len(visited))[1 : len(visited)]


def test_the_default_stays_where_the_gain_is_small() -> None:
    clock = FakeClock()
    assert choose(contexts(clock, on=0.98, threads={4: 1.0, 2: 0.99}), clock, (4, 2)) == Setting(4, "off")


def test_every_setting_that_was_measured_is_reported() -> None:
    clock = FakeClock()
    given = contexts(clock, on=2.0, threads={2: 0.5})
    costs = choose_setting(given, threads=(4, 2), sizes=[(1, 5)], depth=0, budget_s=10, clock=clock)  # type: ignore[arg-type]
    assert [(cost.setting, round(cost.seconds, 4)) for cost in costs] == [
        (Setting(2, "off"), 0.03),
        (Setting(4, "off"), 0.06),
        (Setting(4, "on"), 0.12),
    ]


def test_thread_candidates_halve() -> None:
    assert thread_candidates(1) == (1,)
    assert thread_candidates(8) == (8, 4, 2, 1)


@pytest.mark.model
def test_a_real_model_is_measured(smollm2_path: Path) -> None:
    from localspec.backend.llamacpp import LlamaContext, LlamaModel

    model = LlamaModel(smollm2_path)
    kernels = {name: LlamaContext(model, capacity=96, flash_attention=name) for name in ("off", "on")}
    context = kernels["off"]
    result = measure_costs([PassLoad(context, (1, 2, 4), every)], depths=(16, 64), budget_s=30)
    (curves,) = result.curves
    assert curves.depths == (16, 64)
    assert curves.sizes == (1, 2, 4)
    costs = choose_setting({k: [c] for k, c in kernels.items()}, threads=(2, 1), sizes=[(1,)], depth=16, budget_s=0)
    assert {cost.setting.threads for cost in costs} == {1, 2}
    assert {cost.setting.flash_attention for cost in costs} == {"off", "on"}
    chosen = costs[0].setting
    assert kernels[chosen.flash_attention].threads == chosen.threads
    assert all(c.length(0) == 0 for c in kernels.values())
