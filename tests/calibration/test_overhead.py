from __future__ import annotations

import pytest

from localspec.calibration.overhead import measure_sampler
from localspec.errors import InvalidOptionError
from localspec.sampling import SamplingParams
from tests.calibration.fakes import FakeClock, TimedContext

PARAMS = SamplingParams(temperature=1.0)


class SlowToAsk(TimedContext):
    """Takes time beside its passes: for every truncation, and for telling its length."""

    truncate_s = 0.0
    length_s = 0.0

    def truncate(self, sequence: int, length: int) -> None:
        self.clock.now += self.truncate_s
        super().truncate(sequence, length)

    def length(self, sequence: int) -> int:
        self.clock.now += self.length_s
        return super().length(sequence)


def pair() -> tuple[FakeClock, SlowToAsk, SlowToAsk]:
    clock = FakeClock()
    return clock, *(SlowToAsk(clock, lambda n, depth, threads: 0.1 * n, noise=0.1) for _ in range(2))


def test_time_inside_passes_is_not_counted() -> None:
    clock, target, draft = pair()
    cost = measure_sampler(target, draft, prompt=[1, 2, 3], params=PARAMS, clock=clock)
    assert (cost.plain_s, cost.step_s, cost.draft_s) == pytest.approx((0, 0, 0), abs=1e-9)
    assert target.length(0) == draft.length(0) == 0


@pytest.mark.parametrize("num_steps", [1, 12])
def test_a_step_and_each_drafted_token_have_their_own_cost(num_steps: int) -> None:
    clock, target, draft = pair()
    target.truncate_s = 2.0  # once a step
    draft.truncate_s = 1.0  # once a step
    options = {"prompt": [1, 2, 3], "params": PARAMS, "num_steps": num_steps, "clock": clock}
    cost = measure_sampler(target, draft, **options)
    assert (cost.plain_s, cost.step_s, cost.draft_s) == pytest.approx((3, 3, 0), abs=1e-9)
    draft.length_s = 0.5  # once for every drafted token, once before drafting, and once in every truncation
    cost = measure_sampler(target, draft, **options)
    assert (cost.plain_s, cost.step_s, cost.draft_s) == pytest.approx((3.5, 4, 0.5), abs=1e-9)


def test_a_context_without_room_is_refused() -> None:
    clock, target, draft = pair()
    target.capacity = 60
    with pytest.raises(InvalidOptionError, match="do not fit a context of 60"):
        measure_sampler(target, draft, prompt=[1, 2, 3], params=PARAMS, clock=clock)
