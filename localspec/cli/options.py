"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from localspec.errors import InvalidOptionError
from localspec.policy import check_num_draft_tokens

__all__ = [
    "AutoOrNumber",
    "candidate_options",
    "generation_options",
    "model_options",
    "read_bias",
    "read_draft_temperature",
    "sampling_options",
    "sampling_params",
    "seconds",
]

Command = TypeVar("Command", bound=Callable[..., Any])


class AutoOrNumber(click.ParamType[int | None]):
    """A whole number; "auto" is None.

    Args:
        check: returns the number if it can be used, else raises InvalidOptionError.
    """

    name = "auto or a number"

    def __init__(self, check: Callable[[int], int]) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number, or None for "auto"."""
        if value in ("auto", None):
            return None
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a whole number", param, ctx)
        return self._check(number)


# What no generation can use is said before models are fetched and loaded for it.


def _check_max_tokens(_ctx: click.Context, _param: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InvalidOptionError(f"max_tokens is {value}; use 1 or more")
    return value


def read_draft_temperature(value: float) -> float:
    """Return a usable draft temperature, or raise InvalidOptionError."""
    from localspec.sampling import SamplingParams

    try:
        return SamplingParams(temperature=value).temperature
    except InvalidOptionError as error:
        raise InvalidOptionError(f"draft_{error}") from None


def _check_draft_temperature(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    return None if value is None else read_draft_temperature(value)


def _check_stop(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise InvalidOptionError("stop string '' is not a text of at least one character")
    return value


def _apply(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_PAIR_OPTION = click.option(
    "--pair", metavar="NAME", help="A pair from `localspec models list`; default the default pair."
)
_LOADING_OPTIONS = (
    click.option(
        "--ctx",
        "context",
        type=int,
        default=4096,
        show_default=True,
        help="Tokens of prompt and answer together.",
    ),
    click.option("--threads", type=int, help="Threads per pass; default the physical cores at hand."),
    click.option(
        "--backend",
        type=click.Choice(["auto", "llamacpp", "ik"]),
        default="auto",
        show_default=True,
        metavar="auto|llamacpp|ik",
        help="What evaluates: llama.cpp, ik_llama.cpp, or the one that `calibrate --backends` found fastest.",
    ),
    click.option("--template", metavar="NAME|FILE", help="A chat template, in place of the model's own."),
)


def model_options(command: Command) -> Command:
    """Add the options that choose and load models; their values make the arguments of ``load_pair``."""
    return _apply(
        _PAIR_OPTION,
        click.option("--target", metavar="NAME|FILE", help="The model to run, in place of a pair."),
        click.option("--draft", metavar="NAME|FILE", help="The draft model to go with it."),
        click.option("--no-draft", is_flag=True, help="Load no draft: plain decoding, unless --drafter lookup."),
        *_LOADING_OPTIONS,
    )(command)


def candidate_options(command: Command) -> Command:
    """Add the options that load models, with any number of targets and drafts to choose between."""
    return _apply(
        _PAIR_OPTION,
        click.option(
            "--target",
            "targets",
            multiple=True,
            metavar="NAME|FILE",
            help="The model to run, in place of a pair; with --frontier several are compared.",
        ),
        click.option(
            "--draft",
            "drafts",
            multiple=True,
            metavar="NAME|FILE",
            help="A draft model to go with it; several are compared.",
        ),
        *_LOADING_OPTIONS,
    )(command)


def sampling_options(command: Command) -> Command:
    """Add the options that ``sampling_params`` reads."""
    return _apply(
        click.option("--temperature", "-t", type=float, help="0 is greedy.  [default: 0.8]"),
        click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all.  [default: 40]"),
        click.option(
            "--top-p", type=float, help="Keep the likeliest tokens up to this mass; 1 is off.  [default: 0.95]"
        ),
        click.option(
            "--min-p",
            type=float,
            help="Keep tokens this likely relative to the likeliest; 0 is off.  [default: 0.05]",
        ),
        click.option("--typical-p", type=float, help="Keep the most typical tokens up to this mass; 1 is off."),
        click.option(
            "--repeat-penalty",
            "repetition_penalty",
            type=float,
            help="Divide the logits of recent tokens; 1 is off.  [default: 1]",
        ),
        click.option("--frequency-penalty", type=float, help="Lower them once per occurrence; 0 is off."),
        click.option("--presence-penalty", type=float, help="Lower them once; 0 is off."),
        click.option(
            "--repeat-last-n",
            "penalty_last_n",
            type=int,
            help="How many tokens are recent; -1 counts all, the prompt included.  [default: 64]",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID(+|-)VALUE",
            help="Add to a token's logit, as in 15043+1 or 15043-1.5; may be repeated.",
        ),
        click.option(
            "--ban", "banned", multiple=True, type=int, metavar="ID", help="Never sample a token; may be repeated."
        ),
        click.option(
            "--sampler-order",
            metavar="llamacpp|huggingface",
            help="Temperature last, or right after the penalties.  [default: llamacpp]",
        ),
    )(command)


def generation_options(command: Command) -> Command:
    """Add the options of one generation."""
    return _apply(
        click.option(
            "--gamma",
            "-g",
            "num_draft_tokens",
            type=AutoOrNumber(check_num_draft_tokens),
            metavar="auto|N",
            help="Tokens drafted per step; 0 does not speculate, auto drafts as far as it pays.  [default: auto]",
        ),
        click.option(
            "--policy",
            type=click.Choice(["adaptive", "calibrated"]),
            default="adaptive",
            show_default=True,
            metavar="adaptive|calibrated",
            help="How auto decides: token by token, or the best length on average.",
        ),
        click.option(
            "--drafter",
            type=click.Choice(["auto", "model", "lookup"]),
            default="auto",
            show_default=True,
            metavar="auto|model|lookup",
            help="Draft with a model, by looking up what followed the same words before, or as should gain more.",
        ),
        click.option(
            "--rule",
            type=click.Choice(["block", "token", "coupled"]),
            default="block",
            show_default=True,
            metavar="block|token|coupled",
            help="Verification rule; all are exact. With coupled the text depends on the seed and on no draft.",
        ),
        click.option(
            "--draft-temperature",
            type=float,
            callback=_check_draft_temperature,
            help="The draft's own; default what calibrate found, or the target's.",
        ),
        click.option("--seed", type=int, help="Repeat a run; default a fresh one."),
        click.option(
            "--max-tokens",
            "-n",
            type=int,
            callback=_check_max_tokens,
            help="Emit no more; default as many as the context holds.",
        ),
        click.option(
            "--stop",
            multiple=True,
            callback=_check_stop,
            metavar="TEXT",
            help="End the answer here; may be repeated.",
        ),
    )(command)


def sampling_params(values: dict[str, Any], defaults: Any = None) -> Any:
    """Take the sampling options out of ``values``; return ``defaults``, or llama.cpp's, with them put in."""
    from dataclasses import replace

    from localspec.sampling import LLAMACPP_DEFAULTS

    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "penalty_last_n",
        "logit_bias",
        "banned",
        "sampler_order",
    )
    given = {name: value for name in names if (value := values.pop(name)) not in (None, ())}
    if given.get("penalty_last_n") == -1:
        given["penalty_last_n"] = None
    if "logit_bias" in given:
        given["logit_bias"] = [read_bias(text) for text in given["logit_bias"]]
    return replace(LLAMACPP_DEFAULTS if defaults is None else defaults, **given)


def read_bias(text: str) -> tuple[int, float]:
    """Read ``15043+1`` as (15043, 1.0): the way llama.cpp's tools write it."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+))", text)
    if found is None:
        raise InvalidOptionError(f"a logit bias is {text!r}; write a token id, a sign and a number, as in 15043+1")
    return int(found[1]), float(found[2])


def seconds(text: str, option: str = "--budget") -> float:
    """Return the seconds of "90", "90s" or "3m"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min)?", text.strip())
    if not match or float(match[1]) <= 0:
        raise InvalidOptionError(f"{option} is {text!r}; write it as 90s or 3m")
    return float(match[1]) * (60 if match[2] and match[2].startswith("m") else 1)
