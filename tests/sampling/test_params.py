"""What may be chosen about sampling, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
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
        *(("typical_p", value) for value in [0, -0.5, 1.5, *NOT_NUMBERS]),
        *(("repetition_penalty", value) for value in [0, 1e-38, -1, 101, *NOT_NUMBERS]),
        *(("frequency_penalty", value) for value in [-101, 101, *NOT_NUMBERS]),
        *(("presence_penalty", value) for value in [-101, 101, *NOT_NUMBERS]),
        *(("penalty_last_n", value) for value in [-1, 1.5, True, "64", math.nan]),
        *(("sampler_order", value) for value in ["LlamaCpp", "", None]),
        *(("logit_bias", value) for value in [5, None, "12", [5], [(1, 2, 3)]]),
        *(("banned", value) for value in [5, None, "12"]),
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
    assert check_rule("coupled") == "coupled"
    for name in ("", "Token", "greedy"):
        with pytest.raises(InvalidOptionError, match=f"{name!r}.*token, block"):
            check_rule(name)


def test_numbers() -> None:
    assert all(is_number(value) for value in (0, -1, 0.5, 10**400 // 10**399))
    assert not any(is_number(value) for value in NOT_NUMBERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"banned": (-1,)}, "banned holds -1"),
        ({"banned": (1.5,)}, "banned holds 1.5"),
        ({"banned": (3, 2, 3)}, "names token 3 twice"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias holds -1"),
        ({"logit_bias": [(1, 0.5), (1, 0.5)]}, "names token 1 twice"),
        ({"logit_bias": {1: math.inf}}, "token 1 is inf; .* ban the token"),
        ({"logit_bias": {1: -math.inf}}, "token 1 is -inf; .* ban the token"),
        ({"logit_bias": {1: 2e6}}, "token 1 is 2000000.0"),
        ({"logit_bias": {1: "2"}}, "token 1 is '2'"),
        ({"logit_bias": {1: 1.0}, "banned": (0, 1)}, "token 1 is banned and has a logit_bias; give one of them"),
        ({"presence_penalty": 0.1, "penalty_last_n": 0}, "last 0 tokens do nothing; set penalty_last_n"),
    ],
)
def test_what_makes_no_sense_or_contradicts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)


def test_biases_and_bans_are_kept_in_order() -> None:
    params = SamplingParams(logit_bias={9: 1, 3: -2.5}, banned=[8, 5])  # type: ignore[arg-type]
    assert params.logit_bias == params.biases == ((3, -2.5), (9, 1.0))
    assert params.banned == (5, 8)
    assert params == SamplingParams(logit_bias=((9, 1.0), (3, -2.5)), banned=(5, 8))
    assert hash(params) == hash(SamplingParams(logit_bias=[(3, -2.5), (9, 1.0)], banned=(8, 5)))  # type: ignore[arg-type]


def test_ids_a_model_does_not_have() -> None:
    SamplingParams(logit_bias={9: 1.0}, banned=(4,)).check_ids(10)
    SamplingParams().check_ids(1)
    for options in ({"logit_bias": {10: 1.0}}, {"banned": (2, 10)}):
        with pytest.raises(InvalidOptionError, match=r"token 10 .* end at 9"):
            SamplingParams(**options).check_ids(10)  # type: ignore[arg-type]


def test_which_cuts_are_on_and_in_which_order() -> None:
    everything: dict[str, Any] = {"min_p": 0.1, "top_p": 0.9, "typical_p": 0.8, "top_k": 3}
    assert SamplingParams().stages == SamplingParams(sampler_order="huggingface").stages == ()
    assert SamplingParams(**everything).stages == ("top_k", "typical_p", "top_p", "min_p")
    first = SamplingParams(**everything, sampler_order="huggingface")
    assert first.stages == ("top_k", "top_p", "min_p", "typical_p")
    assert all(
        bool(params.stages) == params.truncates for params in (SamplingParams(), SamplingParams(typical_p=0.5), first)
    )


def test_numbers_of_numpy() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(40))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=40)
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    with pytest.raises(InvalidOptionError, match=r"top_k is 2\.5"):
        SamplingParams(top_k=np.float64(2.5))  # type: ignore[arg-type]
