"""From options to sampling parameters."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from localspec.cli import main
from localspec.cli.options import sampling_options, sampling_params
from localspec.errors import InvalidOptionError
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams


def params_of(*arguments: str, defaults: SamplingParams | None = None) -> SamplingParams:
    @click.command()
    @sampling_options
    @click.option("--other", default=5)
    def command(**values: Any) -> None:
        found.append(sampling_params(values, defaults))
        assert values == {"other": 5}, "what belongs to others is left"

    found: list[SamplingParams] = []
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_without_options_all_is_as_in_llamacpp() -> None:
    assert params_of() == LLAMACPP_DEFAULTS


def test_explicit_options_stand_above_the_defaults() -> None:
    recommended = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.05)
    assert params_of(defaults=recommended) == recommended
    assert params_of("--top-k", "0", "-t", "1", defaults=recommended) == SamplingParams(repetition_penalty=1.05)


def test_every_option() -> None:
    got = params_of(
        *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.6", "--min-p", "0.01", "--typical-p", "0.9"),
        *("--repeat-penalty", "1.2", "--frequency-penalty", "-0.1", "--presence-penalty", "0.3"),
        *("--repeat-last-n", "32", "--logit-bias", "15043+1.5", "--logit-bias", "7-2", "--ban", "3", "--ban", "1"),
        *("--sampler-order", "huggingface"),
    )
    assert got == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.6,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=-0.1,
        presence_penalty=0.3,
        penalty_last_n=32,
        logit_bias={15043: 1.5, 7: -2.0},
        banned=(1, 3),
        sampler_order="huggingface",
    )
    assert params_of("--repeat-last-n", "-1").penalty_last_n is None


@pytest.mark.parametrize(
    "text", ["15043", "15043=1", "x+1", "-5+1", "15043+", "15043+1e5", "15043++1", "15043+inf", ""]
)
def test_a_bias_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="as in 15043"):
        params_of("--logit-bias", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--repeat-penalty", "0"], "repetition_penalty is 0.0"),
        (["--repeat-last-n", "-2"], "penalty_last_n is -2"),
        (["--repeat-penalty", "1.1", "--repeat-last-n", "0"], "last 0 tokens"),
        (["--ban", "5", "--logit-bias", "5+1"], "token 5 is banned and has a logit_bias"),
        (["--ban", "-5"], "banned holds -5"),
        (["--sampler-order", "alphabetical"], "use one of llamacpp, huggingface"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_cannot_be_is_said_before_anything_is_loaded(
    command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["hello"] if command == "generate" else []
    code = main([command, *prompt, "--target", "no-such-file.gguf", *arguments])
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
