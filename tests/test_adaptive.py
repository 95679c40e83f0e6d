"""The adaptive policy against a simulated pair whose costs and acceptance are known.

The simulation has no clock noise: seconds are the curve's, times a factor that stands for a busy machine.
Acceptance is drawn with fixed seeds. Bounds are several standard errors away from what the runs give.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from localspec.adaptive import AdaptivePolicy
from localspec.confidence import ConfidenceModel
from localspec.policy import FixedPolicy, Policy, StepOutcome

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
    number = 0
    rng, emitted, spent = random.Random(seed), 0, 0.0
    while emitted < tokens:
        plan = policy.plan(emitted)
        chances: list[float] = []
        passes = 0
        while len(chances) < plan.limit and plan.runs():
            passes += 1
            chance = text(rng)
            if not plan.draws(lambda chance=chance: chance):  # type: ignore[misc]
                break
            chances.append(chance)
        accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))
        draft_s, verify_s = busy * passes * costs.draft, busy * costs.verify[len(chances)]
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


def test_it_speculates_again_once_it_pays() -> None:
    """Half a text where the draft is always wrong, then one where it is right."""
    costs = Costs(FLAT, 0.1)
    policy = adaptive(costs, code)
    speed(policy, costs, hopeless, tokens=1000)
    speed(policy, costs, code, tokens=3000)
    assert speed(policy, costs, code, tokens=3000) >= 0.9 * best_fixed(costs, code)


def test_decisions_never_see_a_drawn_token() -> None:
    """The plan is told confidences only, before the draw: nothing in its interface carries a token."""
    plan = adaptive(Costs(FLAT, 0.1), code)
    plan.guard._plain_steps = 2
    step = plan.plan(0)
    assert {name for name in dir(step) if not name.startswith("_")} == {
        "draws",
        "limit",
        "passes",
        "predicted",
        "runs",
    }
