"""Draft lengths: what is a usable one, and that a fixed policy is fixed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from localspec.errors import InvalidOptionError
from localspec.policy import MAX_DRAFT_TOKENS, FixedPolicy, StepOutcome, check_num_draft_tokens


@pytest.mark.parametrize("value", [0, 1, 4, MAX_DRAFT_TOKENS])
def test_usable_draft_lengths(value: int) -> None:
    assert check_num_draft_tokens(value) == value
    assert FixedPolicy(value).limit == value


@pytest.mark.parametrize("value", [-1, MAX_DRAFT_TOKENS + 1, 1.0, 2.5, math.nan, True, None, "4", [4]])
def test_other_draft_lengths(value: Any) -> None:
    for make in (check_num_draft_tokens, FixedPolicy):
        with pytest.raises(InvalidOptionError) as caught:
            make(value)
        message = str(caught.value)
        assert repr(value) in message
        assert f"0 (do not speculate) to {MAX_DRAFT_TOKENS}" in message


def test_a_fixed_policy_never_changes() -> None:
    policy = FixedPolicy(3)
    for depth in (1, 1000):
        plan = policy.plan(depth)
        assert plan.limit == 3
        assert all(plan.runs() for _ in range(10))
        assert all(plan.draws(lambda: 0.5) for _ in range(10))
        policy.observe(
            StepOutcome(
                num_drafted=3, num_accepted=0, num_emitted=1, depth=depth, draft_s=9.0, verify_s=0.1, sampling_s=0.0
            )
        )
