"""The plan against brute force, and a planned context against the context within."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.backend import Span
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.errors import EvaluationError, InvalidOptionError, RollbackError
from localspec.plans import EvaluationPlan, PlannedContext, cheapest_passes, evaluation_plan
from tests.fakes import Failure, FakeContext, MarkovModel

MODEL = MarkovModel.random(7, 6)
PLAN = EvaluationPlan(((1,), (1, 1), (4,), (4,), (1, 4), (3, 4), (3, 4)))


def curves(*tables: dict[int, float], spread_s: float = 0.0) -> CostCurves:
    return CostCurves(
        tuple(
            CostCurve(100 * i, tuple(PassCost(n, n, s, spread_s, 9) for n, s in sorted(table.items())))
            for i, table in enumerate(tables)
        )
    )


# The plan


TABLES = st.dictionaries(st.integers(1, 6), st.floats(0.1, 10), min_size=1)


@settings(deadline=None)
@given(TABLES, TABLES.filter(lambda table: 1 in table), st.integers(1, 6))
def test_no_combination_of_passes_is_cheaper(last: dict[int, float], earlier: dict[int, float], limit: int) -> None:
    plan = cheapest_passes(sorted(last.items()), sorted(earlier.items()), limit)
    for n, sizes in enumerate(plan, 1):
        cost = last[sizes[-1]] + sum(earlier[size] for size in sizes[:-1])
        complete = (
            last[final] + sum(earlier[size] for size in before)
            for final in last
            for count in range(n)
            for before in combinations_with_replacement(sorted(earlier), count)
            if sum(before) < n <= sum(before) + final
        )
        assert cost == pytest.approx(min(complete, default=inf))
        if cost < inf:
            assert 0 <= sum(sizes) - n < sizes[-1]


def test_among_equals_the_fewest_passes_are_taken() -> None:
    costs = [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert cheapest_passes(costs, costs, 3) == [(1,), (2,), (3,)]


def test_a_measured_curve_is_padded_and_split_where_that_gains() -> None:
    # Milliseconds of a Q4_0 model, and of a draft whose pass of two costs more than two passes.
    padded = evaluation_plan(curves({1: 26.0, 2: 47.5, 3: 64.8, 4: 52.9, 5: 70.3}))
    assert padded.passes == ((1,), (2,), (4,), (4,), (5,))
    assert padded.rearranged == (3,)
    assert (padded.padding(3), padded.padding(4)) == (1, 0)
    split = evaluation_plan(curves({1: 16.2, 2: 40.0, 3: 47.4, 4: 51.0, 5: 66.7}))
    assert split.passes == ((1,), (1, 1), (3,), (4,), (5,))


def test_a_flat_curve_is_left_alone() -> None:
    assert evaluation_plan(curves({n: 10.0 + n for n in range(1, 9)})).rearranged == ()


def test_a_gain_within_the_margin_is_left_alone() -> None:
    table = {1: 1.0, 2: 2.1}
    assert evaluation_plan(curves(table)).rearranged == ()
    assert evaluation_plan(curves(table), margin=0.04).rearranged == (2,)


def test_a_gain_within_the_noise_is_left_alone() -> None:
    table = {1: 1.0, 2: 2.5}
    assert evaluation_plan(curves(table, spread_s=0.01)).rearranged == (2,)
    assert evaluation_plan(curves(table, spread_s=0.2)).rearranged == ()


def test_what_loses_at_one_depth_is_not_done_at_another() -> None:
    assert evaluation_plan(curves({1: 1.0, 2: 2.5}, {1: 1.0, 2: 2.4})).rearranged == (2,)
    assert evaluation_plan(curves({1: 1.0, 2: 2.5}, {1: 1.0, 2: 1.9})).rearranged == ()


def test_of_different_best_choices_the_one_good_everywhere_is_taken() -> None:
    shallow = {1: 1.0, 2: 1.9, 3: 9.0, 4: 1.8, 5: 1.2}
    deep = {1: 1.0, 2: 1.9, 3: 9.0, 4: 1.8, 5: 9.5}
    assert evaluation_plan(curves(shallow)).sizes(3) == (5,)
    assert evaluation_plan(curves(shallow, deep)).sizes(3) == (4,)


def test_the_plan_ends_where_a_size_was_not_measured() -> None:
    table = {1: 1.0, 2: 5.0, 3: 9.0, 8: 1.5}
    plan = evaluation_plan(curves(table))
    assert plan.limit == 3
    assert plan.sizes(3) == (8,)
    assert plan.sizes(4) == (4,)
    assert evaluation_plan(curves(table), limit=1).passes == ((1,),)
    assert evaluation_plan(curves({2: 1.0})).limit == 0


def test_a_split_of_passes_that_need_one_row_is_charged_one_row() -> None:
    points = (PassCost(1, 1, 11.2, 0.0, 9), PassCost(2, 1, 20.0, 0.0, 9))
    silent = (PassCost(1, 0, 6.6, 0.0, 9), PassCost(2, 0, 15.0, 0.0, 9))
    plan = evaluation_plan(CostCurves((CostCurve(0, points, silent),)))
    assert plan.passes == ((1,), (1, 1))
    assert evaluation_plan(CostCurves((CostCurve(0, points),))).passes == ((1,), (2,))
    assert plan.seconds(CostCurves((CostCurve(0, points, silent),)), 2, 0) == pytest.approx(17.8)


def test_planned_seconds_are_those_of_the_passes() -> None:
    table = curves({1: 1.0, 2: 2.5, 3: 4.0}, {1: 2.0, 2: 5.0, 3: 6.0})
    plan = EvaluationPlan(((1,), (1, 1), (3,)))
    assert plan.seconds(table, 2, 50) == pytest.approx(3.0)
    assert plan.seconds(table, 3, 0) == 4.0


@pytest.mark.parametrize("passes", [((),), ((2, 1),), ((0, 1),), ((1,), (1,))])
def test_plans_that_do_not_hold_their_tokens_are_refused(passes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be evaluated in passes"):
        EvaluationPlan(passes)


# The planned context


class Recording(FakeContext):
    """Notes the spans it is given."""

    def __init__(self, **options: object) -> None:
        super().__init__(MODEL, **options)  # type: ignore[arg-type]
        self.spans: list[Span] = []

    def decode(self, batch: Sequence[Span]) -> np.ndarray:
        self.spans += batch
        return super().decode(batch)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 4))),
    st.integers(8, 20),
)
def test_logits_and_lengths_are_those_without_a_plan(steps: list[tuple[list[int], int, int]], capacity: int) -> None:
    plain, planned = (
        FakeContext(MODEL, capacity=capacity),
        PlannedContext(FakeContext(MODEL, capacity=capacity), PLAN),
    )
    for tokens, rows, forgotten in steps:
        span = Span(0, tokens, min(rows, len(tokens)))
        if plain.length(0) + len(tokens) > capacity:
            with pytest.raises(EvaluationError):
                planned.decode([span])
        else:
            np.testing.assert_array_equal(planned.decode([span]), plain.decode([span]))
        assert planned.length(0) == plain.length(0)
        length = max(0, plain.length(0) - forgotten)
        plain.truncate(0, length)
        planned.truncate(0, length)
        assert planned.length(0) == plain.length(0)


def test_passes_have_the_planned_sizes_and_only_the_rows_asked_for() -> None:
    context = Recording()
    planned = PlannedContext(context, PLAN)
    planned.decode([Span(0, [1, 2, 3], 2)])
    planned.decode([Span(0, [4, 5, 0, 1, 2, 3], 4)])
    planned.decode([Span(0, [1, 2], 1)])
    assert context.spans == [
        Span(0, [1, 2, 3, 3], 2, 1),
        Span(0, [4, 5, 0], 1, 0),
        Span(0, [1, 2, 3, 3], 3, 1),
        Span(0, [1], 0, 0),
        Span(0, [2], 1, 0),
    ]
    assert context.held[0] == [1, 2, 3, 4, 5, 0, 1, 2, 3, 1, 2]


def test_what_is_not_planned_goes_through_as_it_is() -> None:
    context = Recording(num_sequences=2)
    planned = PlannedContext(context, PLAN)
    batches = [
        [Span(0, [1, 2, 3], 1), Span(1, [1, 2], 2)],
        [Span(0, [1] * 8, 1)],
        [Span(1, [1, 2, 3], 1, 1)],
        [Span(1, [1], 1)],
    ]
    for batch in batches:
        planned.decode(batch)
    assert context.spans == [span for batch in batches for span in batch]


def test_padding_is_left_out_where_the_cache_has_no_room_for_it() -> None:
    context = Recording(capacity=3)
    PlannedContext(context, PLAN).decode([Span(0, [1, 2, 3], 3)])
    assert context.spans == [Span(0, [1, 2, 3], 3)]


@pytest.mark.parametrize("length", [0, 2, 3, 4, 99])
def test_forgetting_takes_the_padding_along(length: int) -> None:
    context = FakeContext(MODEL)
    planned = PlannedContext(context, PLAN)
    planned.decode([Span(0, [1, 2, 3], 1)])
    planned.truncate(0, length)
    assert context.held[0] == [1, 2, 3][:length]
    assert planned.length(0) == min(length, 3)


def test_padding_of_one_sequence_is_gone_before_a_pass_over_several() -> None:
    context = FakeContext(MODEL, num_sequences=2)
    planned = PlannedContext(context, PLAN)
    planned.decode([Span(0, [1, 2, 3], 1)])
    planned.decode([Span(1, [5], 0), Span(0, [4], 1)])
    assert context.held == [[1, 2, 3, 4], [5]]


@pytest.mark.parametrize("kept", ["none", "half", "all"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("error", [EvaluationError("broken"), KeyboardInterrupt()])
def test_lengths_are_true_after_a_failure(kept: str, at: int, error: BaseException) -> None:
    context = FakeContext(MODEL, failure=Failure(at + 1, error, kept))  # type: ignore[arg-type]
    planned = PlannedContext(context, PLAN)
    planned.decode([Span(0, [5], 0)])
    with pytest.raises(type(error)):
        planned.decode([Span(0, [1, 2, 3, 4, 5, 0], 6)])
    length = planned.length(0)
    assert context.held[0][:length] == [5, 1, 2, 3, 4, 5, 0][:length]
    planned.truncate(0, 2)
    reference = FakeContext(MODEL)
    reference.decode([Span(0, [5, 1], 0)])
    planned.truncate(0, 1)
    reference.truncate(0, 1)
    span = Span(0, [3, 3, 1], 3)
    np.testing.assert_array_equal(planned.decode([span]), reference.decode([span]))


def test_a_context_that_cannot_forget_says_so() -> None:
    planned = PlannedContext(FakeContext(MODEL, rollback="refused"), PLAN)
    planned.decode([Span(0, [1, 2, 3], 1)])
    with pytest.raises(RollbackError):
        planned.decode([Span(0, [1], 1)])


LIGHTHOUSE = "The keeper of the lighthouse counted the ships that passed at night, and wrote them down, one by one."


@pytest.mark.model
@pytest.mark.parametrize("padding", [1, 7, 130])
def test_padding_of_any_length_leaves_a_real_models_rows_alone(smollm2_path: Path, padding: int) -> None:
    from localspec.backend.native import NativeContext
    from tests.backends import open_model

    model = open_model(smollm2_path)
    context = NativeContext(model, capacity=512)
    tokens = (model.vocabulary.tokenize(LIGHTHOUSE) * 9)[: context.chunk + 3]
    expected = context.decode([Span(0, tokens, 5)]).copy()
    context.truncate(0, 0)
    found = context.decode([Span(0, tokens + tokens[:padding], 5, padding)])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.3 * expected.std()
    assert context.length(0) == len(tokens) + padding


@pytest.mark.model
def test_logits_of_a_real_model_are_the_same_up_to_kernel_noise(smollm2_path: Path) -> None:
    from localspec.backend.native import NativeContext
    from tests.backends import open_model

    model = open_model(smollm2_path)
    plain, within = NativeContext(model, capacity=64), NativeContext(model, capacity=64)
    planned = PlannedContext(within, PLAN)
    tokens = model.vocabulary.tokenize(LIGHTHOUSE)
    at = 0
    for count, rows in [(5, 0), (3, 3), (2, 1), (6, 6), (1, 1)]:
        span = Span(0, tokens[at : at + count], rows)
        at += count
        expected, found = plain.decode([span]).copy(), planned.decode([span])
        assert found.shape == expected.shape == (rows, model.vocabulary.size)
        if rows:
            # Another token's row would differ by more than its standard deviation.
            assert np.abs(found - expected).max() < 0.3 * expected.std()
        assert planned.length(0) == plain.length(0) == at
