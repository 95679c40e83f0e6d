"""``localspec bench``: what speculation really gains on this machine, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import model_options, sampling_options, sampling_params, seconds
from localspec.cli.running import MODEL_OPTIONS, open_session, progress_bar, say, what_runs
from localspec.errors import InvalidOptionError
from localspec.policy import check_num_draft_tokens

if TYPE_CHECKING:
    from localspec.benchmark import BenchmarkSettings, Cell, Side, Timings

__all__ = ["bench"]

_KINDS = ("code", "editing", "prose")


@click.command()
@model_options
@sampling_options
@click.option(
    "--gamma",
    "-g",
    "lengths",
    default="auto,2,4",
    show_default=True,
    metavar="auto|N,...",
    help="Draft lengths to time beside plain decoding.",
)
@click.option("--temperatures", metavar="T,...", help="Temperatures.  [default: 0 and --temperature]")
@click.option(
    "--kinds", metavar="KIND,...", help="Kinds of text.  [default: code,editing,prose, or all of --prompts]"
)
@click.option("--prompts", metavar="FILE", help="Time your own prompts: text or JSONL.")
@click.option("--max-tokens", "-n", type=int, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--trials", type=int, default=5, show_default=True, help="Rounds over all cells, if time allows.")
@click.option("--budget", metavar="TIME", default="3m", show_default=True, help="Begin no round beyond it.")
@click.option(
    "--rule",
    type=click.Choice(["block", "token", "coupled"]),
    default="block",
    show_default=True,
    help="Verification rule.",
)
@click.option("--plot", metavar="FILE", help="Write a picture (PNG or SVG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    lengths: str,
    temperatures: str | None,
    kinds: str | None,
    prompts: str | None,
    max_tokens: int,
    trials: int,
    budget: str,
    rule: Any,
    plot: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Time plain and speculative decoding in turn, over kinds of text and temperatures.

    Every trial runs all sides on the same prompt; the table shows medians with the lowest and highest trial, and
    beside each measured speedup what the pair's profile (localspec calibrate) predicts. Both are of the tokens after
    the first; the last column is of whole answers, for which the draft has to read the prompt as well.
    """
    if values.pop("no_draft"):
        raise InvalidOptionError("timing speculation needs a draft; leave out --no-draft")
    from dataclasses import replace

    from localspec.benchmark import BenchmarkSettings, benchmark

    model = {name: values.pop(name) for name in MODEL_OPTIONS}
    params = sampling_params(dict(values))
    settings = BenchmarkSettings(
        params=params,
        temperatures=(0.0,) if temperatures is None else _numbers(temperatures),
        lengths=_lengths(lengths),
        prompts=_prompts(prompts, kinds),
        max_tokens=max_tokens,
        trials=trials,
        budget_s=seconds(budget),
        rule=rule,
    )
    if plot is not None:
        from localspec.plots import check_picture_path

        check_picture_path(Path(plot))  # before minutes of measuring
    with open_session(dict(model, no_draft=False)) as session:
        chosen = sampling_params(values, session.default_params)
        if temperatures is None:
            settings = replace(settings, temperatures=tuple(dict.fromkeys((0.0, chosen.temperature))))
        try:
            with progress_bar() as progress:
                timings = benchmark(session, replace(settings, params=chosen), progress=progress)
        except KeyboardInterrupt:
            say("interrupted before everything was tried once, so there is nothing to show")
            ctx.exit(130)
        subject = what_runs(session)
    for kind, temperature in timings.untimed:
        say(f"every answer of kind {kind!r} at temperature {temperature:g} ended at once: not timed")
    if as_json:
        click.echo(json.dumps(_as_json(timings, settings, subject)))
    else:
        for line in table(timings.cells):
            click.echo(line)
    if plot is not None:
        _save_picture(Path(plot), timings.cells, f"{subject['target']}\ndraft {subject['draft']}")
    if timings.interrupted:
        say("interrupted: these are the trials so far")
        ctx.exit(130)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidOptionError(f"--temperatures is {text!r}; write numbers, as in 0,0.8") from None


def _lengths(text: str) -> tuple[int | None, ...]:
    found: list[int | None] = []
    for part in text.split(","):
        word = part.strip()
        if word != "auto" and not word.isdecimal():
            raise InvalidOptionError(f"--gamma is {text!r}; write auto and whole numbers, as in auto,2,4")
        found.append(None if word == "auto" else check_num_draft_tokens(int(word)))
    return tuple(dict.fromkeys(found))


def _prompts(name: str | None, kinds: str | None) -> Any:
    from localspec.calibration.prompts import built_in_prompts, read_prompts

    prompts = read_prompts(Path(name)) if name is not None else built_in_prompts()
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    usual = list(_KINDS) if name is None else known
    wanted = usual if kinds is None else [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in wanted if kind not in known]:
        raise InvalidOptionError(f"there are no prompts of kind {unknown[0]!r}; use some of {', '.join(known)}")
    return tuple(prompt for prompt in prompts if prompt.kind in wanted)


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of the table, at most 80 columns wide."""
    yield (
        f"{'kind':9} {'T':4} {'plain tokens/s':15} {'draft':>5} {'per step':>8} {'speedup':16} {'predicted':>9}"
        f" {'in all':>6}"
    )
    for cell in cells:
        plain = cell.plain_tokens_per_s
        head = f"{cell.kind:9.9} {cell.temperature:<4g} {f'{plain.median:.1f} ({plain.low:.0f}-{plain.high:.0f})':15}"
        for side in cell.sides:
            speedup, predicted = side.speedup, "-" if side.predicted is None else f"{side.predicted:.2f}"
            yield (
                f"{head} {_name(side):>5} {side.tokens_per_step:8.2f}"
                f" {f'{speedup.median:.2f} ({speedup.low:.2f}-{speedup.high:.2f})':16} {predicted:>9}"
                f" {side.overall.median:6.2f}"
            )
            head = " " * len(head)
    count = min(cell.trials for cell in cells)
    yield f"Median of {count} or more trials in turn, lowest to highest." if count > 1 else "One trial each."
    yield "Speedup: after the first token. In all: with the prompt, read by both models."


def _name(side: Side) -> str:
    return "auto" if side.num_draft_tokens is None else str(side.num_draft_tokens)


def _as_json(timings: Timings, settings: BenchmarkSettings, subject: dict[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **subject,
        "max_tokens": settings.max_tokens,
        "rule": settings.rule,
        "interrupted": timings.interrupted,
        "cells": [asdict(cell) for cell in timings.cells],
    }


def _save_picture(path: Path, cells: Sequence[Cell], title: str) -> None:
    from localspec.plots import save_panels

    temperatures = dict.fromkeys(cell.temperature for cell in cells)
    save_panels(path, [_panel(cells, temperature) for temperature in temperatures], title=title)


def _panel(cells: Sequence[Cell], temperature: float) -> Any:
    """Return measured speedups over drafted tokens, each kind in its colour; predictions are dashed."""
    from localspec.acceptance import Interval
    from localspec.plots import Curve, Panel

    curves = []
    for colour, cell in enumerate(cell for cell in cells if cell.temperature == temperature):
        sides = sorted(cell.sides, key=lambda side: side.drafted_per_step)
        fixed = [side for side in sides if side.num_draft_tokens is not None]
        x = [side.num_draft_tokens or 0 for side in fixed]
        if fixed:
            y = [side.speedup.median for side in fixed]
            band = [Interval(side.speedup.low, side.speedup.high) for side in fixed]
            curves.append(Curve(cell.kind, x, y, band=band, colour=colour))
        if fixed and all(side.predicted is not None for side in fixed):
            y = [side.predicted or 0.0 for side in fixed]
            curves.append(Curve(f"{cell.kind}, predicted", x, y, style="dashed", colour=colour))
        for side in sides:
            if side.num_draft_tokens is None:
                label = f"{cell.kind}, auto"
                curves.append(
                    Curve(label, [side.drafted_per_step], [side.speedup.median], style="points", colour=colour)
                )
    title = f"Measured at temperature {temperature:g}"
    return Panel(title, "tokens drafted per step", "relative to plain decoding", curves, baseline=1.0)
