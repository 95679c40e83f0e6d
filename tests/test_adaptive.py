"""The adaptive policy against a simulated pair whose costs and acceptance are known.

The simulation has no clock noise: seconds are the curve's, times a factor that stands for a busy machine.
Acceptance is drawn with fixed seeds. Bounds are several standard errors away from what the runs give.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from localspec.adaptive import UNCALIBRATED, AdaptivePolicy
from localspec.confidence import ConfidenceModel
from localspec.policy import FixedPolicy, Policy, StepOutcome
from localspec.tuning import GuessedCosts

FLAT = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4]
STEEP = [1.0, 1.56, 2.08, 2.5, 3.19, 3.6, 4.0, 4.27, 4.6]  # Q4_K_M on two cores
STEPPED = [1.0, 1.83, 2.49, 2.03, 2.7, 2.9, 3.1, 3.34, 3.5]  # Q4_0 on two cores: three cost more than four
MEASURED_F16 = [1.0, 1.24, 1.38, 1.42, 1.6, 1.7, 1.85, 2.05, 2.15]


@dataclass(frozen=True)
class Costs:
    verify: Sequence[float]
    draft: float

    @property
    def max_draft_tokens(self) -> int:
        return len(self.verify) - 1

    @property
    def max_lookup_tokens(self) -> int:
        return len(self.verify) - 1

    def verify_s(self, num_tokens: int, depth: int) -> float:
        return self.verify[num_tokens - 1]

    def draft_s(self, num_tokens: int, depth: int) -> float:
        return self.draft * num_tokens


def confidence_model(values: Sequence[float]) -> ConfidenceModel:
    """Acceptance equals confidence, and these values are usual."""
    return ConfidenceModel((0.0, 1.0), (0.0, 1.0), tuple(sorted(values)))


Text = Callable[[random.Random], float]
"""Draws the confidence, which is the chance of acceptance, of the next position."""


def code(rng: random.Random) -> float:
    return rng.choice([0.98, 0.97, 0.95, 0.9, 0.85, 0.6, 0.4])


def prose(rng: random.Random) -> float:
    return rng.choice([0.95, 0.8, 0.6, 0.5, 0.3, 0.3])


def hopeless(rng: random.Random) -> float:
    return 0.0


def perfect(rng: random.Random) -> float:
    return 1.0


def speed(
    policy: Policy,
    costs: Costs,
    text: Text,
    *,
    busy: float = 1.0,
    tokens: int = 6000,
    seed: int = 1,
    stalls: Sequence[int] = (),
) -> float:
    """Run steps as the engine does and return tokens per second, 1 being plain decoding.

    In the steps numbered in ``stalls`` the clock shows 30 passes more, which the returned speed leaves out.
    """
    number, lacking = 0, 1
    rng, emitted, spent = random.Random(seed), 0, 0.0
    while emitted < tokens:
        plan = policy.plan(emitted)
        chances: list[float] = []
        passes = 0
        while len(chances) < plan.limit and plan.runs(lacking if not chances else 1):
            passes += 1
            chance = text(rng)
            if not plan.draws(lambda chance=chance: chance):  # type: ignore[misc]
                break
            chances.append(chance)
        accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))
        draft_s, verify_s = busy * passes * costs.draft, busy * costs.verify[len(chances)]
        if passes and lacking > 2:
            draft_s += busy * (costs.draft_s(lacking, emitted) - costs.draft)
        lacking = accepted + 1 - len(chances) if passes else lacking + accepted + 1
        lacking = max(1, lacking)
        policy.observe(
            StepOutcome(
                num_drafted=len(chances),
                num_accepted=accepted,
                num_emitted=accepted + 1,
                depth=emitted,
                draft_s=draft_s,
                verify_s=verify_s + 30.0 * (number in stalls),
                sampling_s=0.0,
            )
        )
        emitted += accepted + 1
        spent += draft_s + verify_s
        number += 1
    return emitted / spent * busy


def best_fixed(costs: Costs, text: Text) -> float:
    return max(speed(FixedPolicy(gamma), costs, text) for gamma in range(costs.max_draft_tokens + 1))


def adaptive(costs: Costs, usual: Text) -> AdaptivePolicy:
    rng = random.Random(0)
    return AdaptivePolicy(costs, confidence_model([usual(rng) for _ in range(32)]))


@pytest.mark.parametrize("text", [code, prose])
@pytest.mark.parametrize(
    "costs", [Costs(FLAT, 0.1), Costs(MEASURED_F16, 0.16), Costs(STEPPED, 0.46), Costs(STEEP, 0.55)]
)
def test_as_fast_as_the_best_fixed_length_in_hindsight(costs: Costs, text: Text) -> None:
    reached = speed(adaptive(costs, text), costs, text)
    assert reached >= 0.97 * best_fixed(costs, text)
    assert reached >= 0.98


def test_knowing_the_confidence_beats_every_fixed_length() -> None:
    costs = Costs(MEASURED_F16, 0.16)
    assert speed(adaptive(costs, prose), costs, prose) >= 1.03 * best_fixed(costs, prose)


@pytest.mark.parametrize("costs", [Costs(FLAT, 0.1), Costs(STEEP, 0.55)])
def test_a_draft_that_is_always_wrong_is_left_alone(costs: Costs) -> None:
    policy = adaptive(costs, code)  # calibrated on text where it was right
    assert speed(policy, costs, hopeless, tokens=4000) >= 0.97


def test_a_free_and_perfect_draft_is_used_to_the_full() -> None:
    costs = Costs(FLAT, 0.0)
    policy = adaptive(costs, perfect)
    assert speed(policy, costs, perfect) >= 0.98 * 9 / 1.4


def test_nothing_is_drafted_where_calibration_says_so() -> None:
    policy = AdaptivePolicy(Costs(FLAT, 0.1), confidence_model([0.9]), worthwhile=False)
    assert all(policy.plan(depth).limit == 0 for depth in range(100))


def test_a_busy_machine_changes_no_decision() -> None:
    costs = Costs(MEASURED_F16, 0.16)
    calm, busy = (speed(adaptive(costs, code), costs, code, busy=busy) for busy in (1.0, 7.0))
    assert busy == pytest.approx(calm, rel=1e-9)


def test_the_guard_stops_what_the_clock_shows_to_lose() -> None:
    """Curves that promise flat verification, on a machine where it is steep."""
    believed, true = Costs(FLAT, 0.1), Costs(STEEP, 0.55)
    policy = AdaptivePolicy(believed, confidence_model([0.9, 0.7, 0.5]))
    assert speed(policy, true, code, tokens=4000) >= 0.97


@pytest.mark.parametrize("text", [code, prose])
@pytest.mark.parametrize(
    ("believed", "true"),
    [
        (Costs([1.0, 1.65, 1.85, 1.95, 2.2, 2.25, 2.4, 2.8, 2.7], 0.19), Costs(MEASURED_F16, 0.16)),
        (Costs(MEASURED_F16, 0.16), Costs([1.0, 1.65, 1.85, 1.95, 2.2, 2.25, 2.4, 2.8, 2.7], 0.19)),
        (Costs(MEASURED_F16, 0.1), Costs(MEASURED_F16, 0.3)),
        (Costs(FLAT, 0.1), Costs(STEEP, 0.55)),
    ],
)
def test_curves_that_have_aged(believed: Costs, true: Costs, text: Text) -> None:
    """Plain decoding has become slower or faster since the curves were measured, and other passes have not."""
    policy = adaptive(believed, text)
    reached = speed(policy, true, text)
    assert reached >= 0.97 * best_fixed(true, text)
    assert reached >= 0.97


@pytest.mark.parametrize("stalls", [(0,), (1,), (20,), (20, 60, 100, 300), range(50, 2000, 50)])
def test_a_machine_that_stalls_now_and_then_changes_little(stalls: Sequence[int]) -> None:
    costs = Costs(MEASURED_F16, 0.16)
    calm = speed(adaptive(costs, code), costs, code)
    assert speed(adaptive(costs, code), costs, code, stalls=stalls) >= 0.98 * calm


@pytest.mark.parametrize(
    ("costs", "unread", "expected", "drafts"),
    [
        (Costs(FLAT, 0.1), 0, 128, True),
        (Costs(FLAT, 0.1), 300, 128, True),
        (Costs(FLAT, 0.1), 300, 16, False),
        (Costs(FLAT, 0.1), 3000, 128, False),
        (Costs(FLAT, 0.1), 3000, 2000, True),
        (Costs(STEEP, 0.5), 0, 128, True),  # a trial
        (Costs(STEEP, 0.5), 4, 128, True),
        (Costs(STEEP, 0.7), 0, 128, False),  # 0.88 of plain decoding at best
        (Costs(STEEP, 0.5), 20, 128, False),
        (Costs(STEEP, 0.5), 20, 2000, True),
    ],
)
def test_a_prompt_is_read_by_the_draft_only_if_that_is_won_back(
    costs: Costs, unread: int, expected: int, drafts: bool
) -> None:
    """Gains of about one token a step against what reading takes; and no trial dearer than 2% of a text."""
    plan = ready(adaptive(costs, code)).plan(0)
    assert plan.runs(1, unread, expected) == drafts


@pytest.mark.parametrize(("plain", "drafts"), [(1.0, True), (0.7, False), (3.0, True), (0.01, True)])
def test_plain_steps_faster_than_their_curve_tell_that_drafting_gains_less(plain: float, drafts: bool) -> None:
    """Of passes over several tokens nothing is known yet; curves off by more than twice are not this machine's."""
    policy = adaptive(Costs([1.0, 1.1, 1.35, 1.53], 0.3), prose)
    for _ in range(2):
        policy.plan(0)
        policy.observe(outcome(1, plain))
    assert policy.plan(0).runs(1, 40, 400) == drafts


def test_it_speculates_again_once_it_pays() -> None:
    """A text where the draft is always wrong, then others where it is right."""
    costs = Costs(FLAT, 0.1)
    policy = adaptive(costs, code)
    speed(policy, costs, hopeless, tokens=1000)
    policy.renew()
    speed(policy, costs, code, tokens=3000)
    assert speed(policy, costs, code, tokens=3000) >= 0.9 * best_fixed(costs, code)


def test_the_longer_drafting_does_not_pay_the_fewer_texts_try_it() -> None:
    """One in four in the end; and it is back within four texts where it pays."""
    costs = Costs(STEEP, 0.3)
    policy = adaptive(costs, prose)
    speed(policy, costs, prose, tokens=1000)
    tries = []
    for _ in range(24):
        policy.renew()
        tries.append(policy._explored < 6)
        speed(policy, costs, prose, tokens=40)
    assert tries[0]
    assert sum(tries[4:]) == 5
    flat = Costs(FLAT, 0.1)
    policy.costs = flat
    for _ in range(4):
        policy.renew()
        speed(policy, flat, code, tokens=2000)
    assert speed(policy, flat, code, tokens=3000) >= 0.9 * best_fixed(flat, code)


def test_decisions_never_see_a_drawn_token() -> None:
    """The plan is told confidences and chances only, before the draw: nothing in its interface carries a token."""
    plan = adaptive(Costs(FLAT, 0.1), code)
    plan.guard._plain_steps = 2
    step = plan.plan(0)
    assert {name for name in dir(step) if not name.startswith("_")} == {
        "catch_up_s",
        "copied",
        "copies",
        "draws",
        "limit",
        "lookup_limit",
        "passes",
        "predicted",
        "runs",
    }


# --- copies -------------------------------------------------------------------------------------------------------


def lookup_policy(costs: Costs, *, model: bool = False, usual: Text = code) -> AdaptivePolicy:
    rng = random.Random(0)
    confidence = confidence_model([usual(rng) for _ in range(32)])
    return AdaptivePolicy(costs, confidence, worthwhile=model, lookup=True)


def outcome(emitted: int, spent: float, *, drafted: int = 0) -> StepOutcome:
    return StepOutcome(
        num_drafted=drafted,
        num_accepted=emitted - 1,
        num_emitted=emitted,
        depth=0,
        draft_s=0.0,
        verify_s=spent,
        sampling_s=0.0,
    )


def ready(policy: AdaptivePolicy) -> AdaptivePolicy:
    for _ in range(2):
        policy.plan(0)
        policy.observe(outcome(1, 1.0))
    return policy


@pytest.mark.parametrize(
    ("verify", "chance", "count"),
    [
        (FLAT, 0.95, 8),
        (FLAT, 0.02, 0),
        (STEEP, 0.2, 0),
        (STEEP, 0.5, 0),
        (STEEP, 0.98, 8),
        ([1.0, 1.5, 2.0, 9.0], 1.0, 2),
        ([1.0, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5], 0.99, 6),
    ],
)
def test_as_many_are_copied_as_pay(verify: list[float], chance: float, count: int) -> None:
    plan = ready(lookup_policy(Costs(verify, 0.1))).plan(0)
    assert plan.limit == 0
    assert plan.lookup_limit == len(verify) - 1
    assert plan.copies([chance] * plan.lookup_limit) == count


def test_copies_and_a_model_are_weighed_by_the_same_rule() -> None:
    plan = ready(lookup_policy(Costs(FLAT, 0.05), model=True)).plan(0)
    assert plan.limit == 8
    assert plan.copies([0.99] * 8) == 8, "as good as the model's, and free"
    assert ready(lookup_policy(Costs(FLAT, 0.05), model=True)).plan(0).copies([0.3] * 8) == 0, "the model does better"
    assert ready(lookup_policy(Costs(FLAT, 0.05))).plan(0).copies([0.3] * 8) > 0, "where there is one"
    assert ready(lookup_policy(Costs(FLAT, 0.9), model=True)).plan(0).copies([0.3] * 8) > 0, "and it is not too dear"


def test_neither_way_to_draft_stops_because_the_other_loses() -> None:
    policy = ready(lookup_policy(Costs(FLAT, 0.05), model=True))
    for _ in range(30):
        plan = policy.plan(0)
        if plan.lookup_limit and plan.copies([0.99] * 8):
            policy.observe(outcome(1, 3.0, drafted=8))
    assert policy.plan(0).lookup_limit == 0
    assert policy.plan(0).limit == 8
    policy = ready(lookup_policy(Costs(FLAT, 0.05), model=True))
    for _ in range(30):
        if policy.plan(0).limit and policy.plan(0).runs():
            plan = policy.plan(0)
            plan.runs()
            policy.observe(outcome(1, 3.0, drafted=1))
    assert policy.plan(0).limit == 0
    assert policy.plan(0).lookup_limit == 8


def test_lookup_rests_only_while_plain_tokens_pass() -> None:
    policy = ready(lookup_policy(Costs(FLAT, 0.05)))
    while policy.plan(0).copies([0.99] * 8):
        policy.observe(outcome(1, 3.0, drafted=8))
        if not policy.lookup_guard.allows:
            break
    for _ in range(255):
        assert policy.plan(0).lookup_limit == 0
        policy.observe(outcome(1, 1.0))
    policy.observe(outcome(1, 1.0))
    assert policy.plan(0).lookup_limit == 8


def test_reading_a_prompt_is_no_loss() -> None:
    """What the draft's first reading takes says nothing about the steps that follow."""
    policy = ready(adaptive(Costs(FLAT, 0.05), code))
    plan = policy.plan(0)
    plan.runs()
    policy.observe(replace(outcome(2, 1.1, drafted=1), prefill_s=100.0))
    assert policy.plan(0).limit == 8


@dataclass(frozen=True)
class Copying:
    """A text whose matches have lengths that tell how sure they are; the record knows them already."""

    chances: Sequence[float]
    share: float

    def speed(self, policy: AdaptivePolicy, verify: Sequence[float], *, busy: float = 1.0, seed: int = 1) -> float:
        """Run steps as the engine does and return tokens per plain pass, by true costs ``verify``."""
        rng, emitted, spent = random.Random(seed), 0, 0.0
        while emitted < 6000:
            plan = policy.plan(emitted)
            count, chance = 0, 0.0
            if plan.lookup_limit and rng.random() < self.share:
                chance = rng.choice(self.chances)
                count = plan.copies([chance] * plan.lookup_limit)
            accepted = next((i for i in range(count) if rng.random() >= chance), count)
            took = busy * verify[count]
            policy.observe(replace(outcome(accepted + 1, took, drafted=count), depth=emitted))
            emitted += accepted + 1
            spent += took
        return emitted / spent * busy


LONG_STEEP = [1.0, 1.56, 2.08, 2.5, 3.19, 3.6, 4.0, 4.27, 4.4, 4.5, 4.6, 4.7, 4.8, 4.9, 5.0, 5.1, 5.2]
LONG_FLAT = [1.0 + 0.04 * n for n in range(17)]


@pytest.mark.parametrize("verify", [LONG_STEEP, LONG_FLAT])
@pytest.mark.parametrize("busy", [1.0, 7.0, 0.02])
def test_costs_that_are_learned_serve_as_well_as_measured_ones(verify: list[float], busy: float) -> None:
    text = Copying([0.97, 0.9, 0.6], share=0.5)
    measured = text.speed(lookup_policy(Costs(verify, 0.0)), verify)
    learned = text.speed(
        AdaptivePolicy(GuessedCosts(), UNCALIBRATED, worthwhile=False, lookup=True), verify, busy=busy
    )
    assert measured > 1.3
    assert learned > 0.95 * measured


@pytest.mark.parametrize("chances", [[0.0], [0.3], [0.5, 0.1]])
def test_hopeless_copies_are_left_alone_whatever_is_guessed(chances: list[float]) -> None:
    """The record may even be right about them, and wrong costs stop them all the same."""
    policy = AdaptivePolicy(GuessedCosts(), UNCALIBRATED, worthwhile=False, lookup=True)
    assert Copying(chances, share=0.5).speed(policy, LONG_STEEP) > 0.985
    policy = AdaptivePolicy(GuessedCosts(), UNCALIBRATED, worthwhile=False, lookup=True)
    assert Copying([0.95], share=0.3).speed(policy, [1.0 + n for n in range(17)]) > 0.97


def test_copies_are_tried_again_in_case_costs_have_changed() -> None:
    """After 128 idle steps one token that is likely enough is copied, whatever it is worth; not one that is not."""
    policy = ready(lookup_policy(Costs(STEEP, 0.1)))
    policy.plan(0)
    policy._verify_clock.add(1000.0, 1.0)
    for _ in range(127):
        assert policy.plan(0).copies([0.99] * 8) == 0
        policy.observe(outcome(1, 1.0))
    policy.plan(0)
    policy.observe(outcome(1, 1.0))
    assert policy.plan(0).copies([0.4] * 8) == 0
    policy.observe(outcome(1, 1.0))
    assert policy.plan(0).copies([0.6] * 8) == 1
    assert policy.plan(0).limit == 0, "there is no model to probe"


def test_without_a_draft_model_its_passes_are_priceless() -> None:
    assert GuessedCosts().draft_s(1, 0) == math.inf
    assert GuessedCosts().verify_s(1, 0) == 1.0
