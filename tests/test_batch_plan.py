"""How many sequences and how long a draft: one choice, from costs whose best cell is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from localspec.batch_plan import (
    BatchCosts,
    BatchPlan,
    BatchPolicy,
    accepted_prefix,
    best_length,
    choose_batch,
    measure_batch,
    throughput,
)
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.plans import EvaluationPlan
from localspec.policy import StepOutcome
from localspec.profile import SamplerCost
from tests.fakes import FakeContext, MarkovModel
from tests.test_profile import flat, profile
from tests.test_tuning import agreeing

ACCEPTED = tuple(0.8**i for i in range(9))

# A machine that computes: every token of a pass costs the same. Speculation never pays beside free sequences.
BUSY = {n: 1.0 * n for n in (1, 2, 4, 8, 16, 32)}
# A machine that waits for memory: 32 tokens cost hardly more than one.
IDLE = {n: 1.0 + 0.002 * n for n in (1, 2, 4, 8, 16, 32)}
# Free up to 8 tokens in a pass, dear beyond.
STEP = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 2.2, 32: 4.6}
DRAFT = {1: 0.05, 2: 0.05, 4: 0.06, 8: 0.08, 16: 0.12}


def costs(target: dict[int, float], draft: dict[int, float] | None = DRAFT, **options: object) -> BatchCosts:
    return BatchCosts(flat(target), None if draft is None else flat(draft), **options)  # type: ignore[arg-type]


def test_throughput_is_tokens_over_seconds() -> None:
    sampler = SamplerCost(plain_s=0.01, step_s=0.02, draft_s=0.005)
    model = costs(STEP, sampler=sampler)
    assert throughput(model, ACCEPTED, 4, 0) == pytest.approx(4 / (1.0 + 4 * 0.01))
    # E(1) = 1.8; after 0.8 of the steps the draft reads two tokens, so 7.2 in its first pass instead of 4.
    first = 0.06 + (0.08 - 0.06) * 3.2 / 4
    assert throughput(model, ACCEPTED, 4, 1) == pytest.approx(4 * 1.8 / (1.0 + first + 4 * 0.025))
    second = 0.06 + (0.08 - 0.06) * 4 * 0.64 / 4
    expected = 4 * 2.44 / (1.6 + second + 0.06 + 4 * 0.03)  # 12 tokens, between 8 and 16
    assert throughput(model, ACCEPTED, 4, 2) == pytest.approx(expected)


def test_a_computing_machine_does_not_speculate() -> None:
    plan = choose_batch(costs(BUSY), ACCEPTED)
    assert (plan.parallel, plan.num_draft_tokens) == (1, 0)  # and sequences gain nothing either
    assert plan.tokens_per_s == pytest.approx(1.0)


def test_a_waiting_machine_does_both() -> None:
    plan = choose_batch(costs(IDLE), ACCEPTED)
    assert plan.parallel == 16
    assert plan.num_draft_tokens
    alone = choose_batch(costs(IDLE), ACCEPTED, parallel=1)
    assert alone.num_draft_tokens
    assert alone.num_draft_tokens >= plan.num_draft_tokens
    assert (plan.tokens_per_s or 0) > 5 * (alone.tokens_per_s or 0)


def test_the_choice_is_the_best_cell_within_two_percent() -> None:
    for target in (BUSY, IDLE, STEP):
        for accepted in (ACCEPTED, tuple(0.3**i for i in range(9)), (1.0,) * 9):
            model = costs(target)
            plan = choose_batch(model, accepted)
            cells = [throughput(model, accepted, b, g) for b in range(1, 17) for g in range(64 // b) if g <= 8]
            # Two margins: fewer sequences within 2%, and no speculation for less than 2%.
            assert (plan.tokens_per_s or 0) >= 0.98 / 1.02 * max(cells)


def test_lengths_fall_as_sequences_grow() -> None:
    lengths = [best_length(costs(STEP), ACCEPTED, parallel) for parallel in range(1, 17)]
    assert lengths[0] >= 3
    assert lengths[7] == 0
    assert all(b <= a for a, b in pairwise(lengths[:8]))


def test_what_is_given_is_kept() -> None:
    assert choose_batch(costs(STEP), ACCEPTED, parallel=3).parallel == 3
    assert choose_batch(costs(STEP), ACCEPTED, num_draft_tokens=3).num_draft_tokens == 3
    assert choose_batch(costs(STEP), ACCEPTED, max_parallel=2).parallel <= 2
    assert choose_batch(costs(STEP, draft=None), ACCEPTED).num_draft_tokens == 0
    assert best_length(costs(STEP), (1.0,), 1) == 0


def test_a_hardly_measurable_gain_is_no_reason_to_speculate() -> None:
    accepted = (1.0, 0.5)
    for share, length in ((1.48, 0), (1.40, 1)):
        model = costs({1: 1.0, 2: share, 4: 9.0}, {1: 1e-9, 2: 1e-9})
        assert best_length(model, accepted, 1) == length


def test_a_single_sequence_is_evaluated_as_planned() -> None:
    plan = EvaluationPlan(((1,), (1, 1)))
    model = costs({1: 1.0, 2: 5.0, 4: 9.0}, target_plan=plan)
    assert throughput(model, ACCEPTED, 1, 1) > throughput(costs({1: 1.0, 2: 5.0, 4: 9.0}), ACCEPTED, 1, 1)
    # Several sequences share one pass, whatever the plan says.
    assert throughput(model, ACCEPTED, 2, 0) == pytest.approx(2 / 5.0)


def test_past_the_largest_measured_pass_tokens_cost_what_they_did_on_average() -> None:
    """The last line alone is flat."""
    model = costs({1: 1.0, 8: 7.9, 9: 8.0, 10: 8.0})
    assert model.step_s(12, (1.0,)) == pytest.approx(8.0 + 2 * 7.0 / 9)
    falling = costs({1: 2.0, 4: 1.0})
    assert falling.step_s(8, (1.0,)) == pytest.approx(1.0)


def test_sequences_look_through_a_common_cache() -> None:
    shallow, deep = (
        CostCurve(d, (PassCost(1, 1, s, 0, 5), PassCost(8, 8, 2 * s, 0, 5))) for d, s in ((0, 1), (1000, 2))
    )
    model = BatchCosts(CostCurves((shallow, deep)), None)
    assert model.step_s(1, (1.0,), depth=100) == pytest.approx(1.1)
    assert model.step_s(8, (1.0,), depth=100) == pytest.approx(2 * 1.8)


# --- where numbers come from ------------------------------------------------------------------------------------


def test_agreement_comes_from_the_profile() -> None:
    known = replace(
        profile(),
        agreement=(
            agreeing([1.0, 1.2, 1.3], "prose"),
            agreeing([1.0, 1.8, 2.4], "all"),
            agreeing([1.0, 1.1, 1.15], "all", temperature=0.0),
        ),
    )
    assert accepted_prefix(known, 0.8, "block") == pytest.approx((1.0, 0.8, 0.6))
    assert accepted_prefix(known, 0.1, "block") == pytest.approx((1.0, 0.1, 0.05))
    coupled = accepted_prefix(known, 0.8, "coupled")
    assert coupled[0] == 1.0
    assert all(c < t for c, t in zip(coupled[1:], accepted_prefix(known, 0.8, "token")[1:], strict=True))
    guessed = accepted_prefix(None, 0.8, "block")
    assert len(guessed) == 9
    assert 0.5 < guessed[1] < 0.95


def test_a_profile_is_not_measured_again() -> None:
    target, draft = (FakeContext(MarkovModel([[0.5, 0.5], [0.5, 0.5]]), capacity=64) for _ in range(2))
    known = replace(profile(), draft_batch=flat(DRAFT))
    found = measure_batch(target, draft, known)
    assert (target.passes, draft.passes) == (0, 0)
    assert (found.target, found.draft, found.sampler) == (known.target, known.draft_batch, known.sampler)
    # One from before batches lacks the draft's curve, and only that is measured.
    found = measure_batch(target, draft, replace(known, draft_batch=None))
    assert target.passes == 0
    assert found.draft is not None
    assert found.draft.sizes == (1, 2, 4, 8, 16)


def test_without_a_profile_everything_is_measured() -> None:
    target, draft = (FakeContext(MarkovModel([[0.5, 0.5], [0.5, 0.5]]), capacity=20) for _ in range(2))
    found = measure_batch(target, draft, None)
    assert found.target.sizes == (1, 2, 4, 8, 16)  # 32 do not fit
    assert found.draft is not None
    assert target.length(0) == draft.length(0) == 0
    assert measure_batch(target, None, None).draft is None


# --- the policy that sequences share ----------------------------------------------------------------------------


def outcome(num_drafted: int, num_accepted: int, seconds: float, *, depth: int = 50) -> StepOutcome:
    return StepOutcome(
        num_drafted, num_accepted, num_accepted + 1, depth, 0.1 * seconds * (num_drafted > 0), seconds, 0.0
    )


def policy(target: dict[int, float] = STEP, *, learns: bool = True) -> BatchPolicy:
    model = costs(target)
    return BatchPolicy(model, ACCEPTED, choose_batch(model, ACCEPTED, parallel=2), learns=learns)


def steps(shared: BatchPolicy, count: int, accepted: float, seconds: float) -> None:
    """Take steps of two sequences; ``accepted`` is the share of drafts that stand."""
    for _ in range(count):
        shared.begin(2)
        drafted = shared.plan(50).limit
        for _sequence in range(2):
            shared.observe(outcome(drafted, round(accepted * drafted), seconds))
        shared.end(2, reading=False)


def test_two_plain_steps_show_what_the_clock_says() -> None:
    shared = policy()
    shared.begin(2)
    assert shared.plan(0).limit == 0
    steps(shared, 2, 0.0, 1.0)
    shared.begin(2)
    assert shared.plan(0).limit == best_length(costs(STEP), ACCEPTED, 2) > 0


def test_fewer_sequences_draft_more() -> None:
    shared = policy(learns=False)
    shared.begin(8)
    assert shared.num_draft_tokens == 0
    shared.begin(1)
    assert shared.num_draft_tokens >= 3


def test_a_plan_without_drafts_stays_without() -> None:
    """The draft has read nothing when the last few sequences are left."""
    model = costs(STEP)
    shared = BatchPolicy(model, ACCEPTED, choose_batch(model, ACCEPTED, parallel=8), learns=False)
    for num_sequences in (8, 2, 1):
        shared.begin(num_sequences)
        assert shared.num_draft_tokens == 0


def test_it_learns_what_is_accepted() -> None:
    shared = policy()
    steps(shared, 2, 0.0, 1.0)
    shared.begin(2)
    before = shared.num_draft_tokens
    steps(shared, 60, 0.0, 0.3)  # quick enough for the guard, and nothing accepted
    shared.begin(2)
    assert shared.num_draft_tokens < before
    stubborn = policy(learns=False)
    steps(stubborn, 60, 0.0, 0.3)
    stubborn.begin(2)
    assert stubborn.num_draft_tokens == before


def test_the_clock_stops_what_loses() -> None:
    """Everything is accepted, and steps that draft still take many times what the curves say."""
    shared = policy()
    steps(shared, 2, 0.0, 1.0)
    tried = 0
    for _ in range(40):
        shared.begin(2)
        tried += shared.num_draft_tokens > 0
        steps(shared, 1, 1.0, 9.0 if shared.num_draft_tokens else 1.0)
    assert 0 < tried <= 12
    shared.begin(2)
    assert shared.num_draft_tokens == 0


def test_what_drafting_costs_by_the_clock_shortens_it() -> None:
    """Steps that draft take four times what the curves say: with that known, nothing pays, guard or no guard."""
    for pace, drafts in ((1.0, True), (3.0, False)):
        assert (best_length(costs(STEP), ACCEPTED, 2, pace=pace) > 0) == drafts
    shared = policy()
    shared.guard.credit = 1e9
    steps(shared, 2, 0.0, 1.0)
    for _ in range(60):
        shared.begin(2)
        steps(shared, 1, 1.0, 4.5 if shared.num_draft_tokens else 1.0)
    shared.begin(2)
    assert shared.num_draft_tokens == 0


def test_one_slow_step_is_no_loss_and_many_are() -> None:
    """What is usual follows the clock, so that a step that was held up counts once, and a dear one fully."""
    debts = []
    for seconds in (4.0, 40.0):
        shared = policy()
        shared._best = lambda num_sequences, ratio, pace: 3
        steps(shared, 2, 0.0, 1.0)
        steps(shared, 1, 1.0, seconds)
        debts.append(shared.guard._debt)
    assert debts[1] <= debts[0] + 1e-9 < 8
    shared = policy()
    shared._best = lambda num_sequences, ratio, pace: 3
    steps(shared, 2, 0.0, 1.0)
    steps(shared, 60, 1.0, 6.0)  # four tokens for six and a half: twice the curve's cost would still be a gain
    assert not shared.guard.allows


def test_what_the_guard_alone_sees() -> None:
    """Steps a fifth dearer than the curves say, with less accepted than pays for it."""
    shared = policy()
    shared._best = lambda num_sequences, ratio, pace: 3
    steps(shared, 2, 0.0, 1.0)
    for _ in range(30):
        steps(shared, 1, 0.0, 1.4)
    assert not shared.guard.allows


def test_a_step_that_reads_a_prompt_says_nothing_of_time() -> None:
    shared = policy()
    steps(shared, 2, 0.0, 1.0)
    for _ in range(20):
        shared.begin(2)
        for _sequence in range(2):
            shared.observe(outcome(3, 2, 50.0))
        shared.end(2, reading=True)
    assert shared.guard.allows


def test_a_plan_without_a_prediction() -> None:
    assert BatchPlan(1, None).tokens_per_s is None
