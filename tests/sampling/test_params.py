"""What may be chosen about sampling, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from localspec.errors import InvalidOptionError
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams, check_rule, is_number

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, False, None, "0.5", [0.5], 1j]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in [-0.1, -1, 1e-6, 5e-324, 1e7, *NOT_NUMBERS]),
        *(("top_p", value) for value in [0, 0.0, -0.5, 1.5, 1.0000001, *NOT_NUMBERS]),
        *(("min_p", value) for value in [-0.01, 1.01, *NOT_NUMBERS]),
        *(("top_k", value) for value in [-1, 1.5, 2.0, *NOT_NUMBERS]),
    ],
)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "use" in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in [0, 0.0, 1e-5, 0.8, 2, 1e6]),
        *(("top_p", value) for value in [1e-9, 0.5, 1, 1.0]),
        *(("min_p", value) for value in [0, 0.05, 1]),
        *(("top_k", value) for value in [0, 1, 10**9]),
    ],
)
def test_in_range(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_what_the_values_imply() -> None:
    assert not SamplingParams().truncates
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).truncates
    assert SamplingParams(top_p=0.99).truncates
    assert SamplingParams(min_p=0.01).truncates
    assert LLAMACPP_DEFAULTS.truncates


def test_rules_by_name() -> None:
    assert check_rule("token") == "token"
    assert check_rule("block") == "block"
    for name in ("", "Token", "greedy"):
        with pytest.raises(InvalidOptionError, match=f"{name!r}.*token, block"):
            check_rule(name)


def test_numbers() -> None:
    assert all(is_number(value) for value in (0, -1, 0.5, 10**400 // 10**399))
    assert not any(is_number(value) for value in NOT_NUMBERS)
