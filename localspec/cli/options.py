"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["generation_options", "model_options", "sampling_options", "sampling_params"]

Command = TypeVar("Command", bound=Callable[..., Any])


class GammaType(click.ParamType[int | None]):
    """A draft length; "auto" is None."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number, or None for "auto"."""
        if value in ("auto", None):
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a whole number", param, ctx)


def _apply(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_options(command: Command) -> Command:
    """Add the options that choose and load models; their values make the arguments of ``load_pair``."""
    return _apply(
        click.option("--pair", metavar="NAME", help="A pair from `localspec models list`; default the default pair."),
        click.option("--target", metavar="NAME|FILE", help="The model to run, in place of a pair."),
        click.option("--draft", metavar="NAME|FILE", help="The draft model to go with it."),
        click.option("--no-draft", is_flag=True, help="Load no draft: plain decoding."),
        click.option(
            "--ctx",
            "context",
            type=int,
            default=4096,
            show_default=True,
            help="Tokens of prompt and answer together.",
        ),
        click.option("--threads", type=int, help="Threads per pass; default the physical cores at hand."),
        click.option("--template", metavar="NAME|FILE", help="A chat template, in place of the model's own."),
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
    )(command)


def generation_options(command: Command) -> Command:
    """Add the options of one generation."""
    return _apply(
        click.option(
            "--gamma",
            "-g",
            "num_draft_tokens",
            type=GammaType(),
            metavar="auto|N",
            help="Tokens drafted per step; 0 does not speculate, auto drafts as far as it pays.  [default: auto]",
        ),
        click.option(
            "--policy",
            default="adaptive",
            show_default=True,
            metavar="adaptive|calibrated",
            help="How auto decides: token by token, or the best length on average.",
        ),
        click.option(
            "--rule",
            default="block",
            show_default=True,
            metavar="block|token",
            help="Verification rule; both are exact.",
        ),
        click.option("--seed", type=int, help="Repeat a run; default a fresh one."),
        click.option("--max-tokens", "-n", type=int, help="Emit no more; default as many as the context holds."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer here; may be repeated."),
    )(command)


def sampling_params(values: dict[str, Any]) -> Any:
    """Take the sampling options out of ``values`` and return llama.cpp's defaults with them put in."""
    from dataclasses import replace

    from localspec.sampling import LLAMACPP_DEFAULTS

    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: value for name in names if (value := values.pop(name)) is not None}
    return replace(LLAMACPP_DEFAULTS, **given)
