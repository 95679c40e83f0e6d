"""``localspec predict``: what the theory says about drafting, from acceptance and cost."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from localspec.errors import InvalidOptionError, ProfileError
from localspec.reading import read_whole
from localspec.theory import (
    ceiling,
    continuous_optimum,
    expected_tokens,
    near_best,
    speedup_from_tokens,
)
from localspec.wording import counted

__all__ = ["predict"]

_DEFAULT_MAX_GAMMA = 12
_LARGEST_GAMMA = 1000
_BAR_WIDTH = 36


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a prediction is made from; ``tokens_per_step`` is None where the formula shall say."""

    acceptance_rate: float
    cost_ratio: float
    verify_cost: tuple[float, ...] | None
    tokens_per_step: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Prediction:
    acceptance_rate: float
    cost_ratio: float
    verify_cost: tuple[float, ...] | None
    tokens_per_step: tuple[float, ...]
    speedups: tuple[float, ...]
    best: int


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Read numbers separated by commas."""
    try:
        return None if value is None else tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,1.4,1.9") from None


@click.command(name="predict")
@click.option("--alpha", "acceptance_rate", type=float, help="Chance that a drafted token is accepted, 0 to 1.")
@click.option(
    "--cost",
    "cost_ratio",
    type=float,
    help="Time of one draft pass / time of one target pass, 0 to 1 (a draft ten times faster: 0.1).",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="Take the numbers from what `localspec calibrate --json` printed, or from a saved profile, in place of "
    "--alpha and --cost; an option that is also given counts instead of the one in the file.",
)
@click.option(
    "--verify-cost",
    callback=_numbers,
    metavar="NUMBERS",
    help="Time of a target pass over 1, 2, 3 and so on tokens, in passes over one token: 1,1.4,1.9. "
    "Without it checking is taken to be free, which is rarely true on a CPU.",
)
@click.option("--max-gamma", type=int, help="Longest draft to consider.  [default: 12, or all of --verify-cost]")
@click.option(
    "--sampler-cost",
    type=float,
    default=0.0,
    show_default=True,
    help="Extra sampling time of a speculative step, in target passes over one token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Also draw the curve (.png, .svg, .pdf).")
def predict(
    acceptance_rate: float | None,
    cost_ratio: float | None,
    profile: Path | None,
    verify_cost: tuple[float, ...] | None,
    max_gamma: int | None,
    sampler_cost: float,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Predict the speedup of every draft length, from how often drafts are accepted and what they cost."""
    numbers = _numbers_from(profile, acceptance_rate, cost_ratio, verify_cost)
    try:
        prediction = _predict(numbers, max_gamma, sampler_cost)
    except InvalidOptionError as error:
        raise InvalidOptionError(_in_option_names(str(error))) from None
    if picture is not None:
        from localspec.plots import save_speedups

        save_speedups(
            picture,
            prediction.speedups,
            title=f"acceptance {prediction.acceptance_rate:.3g}, cost ratio {prediction.cost_ratio:.3g}",
        )
    if as_json:
        click.echo(json.dumps(_as_json(prediction), allow_nan=False))
    else:
        click.echo(_report(prediction, _bar_character()))


def _in_option_names(message: str) -> str:
    """Say what the theory says about its arguments in the words the user typed."""
    for name, option in (
        ("acceptance_rate", "--alpha"),
        ("a cost ratio of", "--cost"),
        ("cost_ratio", "--cost"),
        ("verify_cost", "--verify-cost"),
        ("sampler_cost", "--sampler-cost"),
    ):
        message = message.replace(name, option)
    return message


def _numbers_from(
    profile: Path | None,
    acceptance_rate: float | None,
    cost_ratio: float | None,
    verify_cost: tuple[float, ...] | None,
) -> _Numbers:
    """Return the options' numbers, and the profile's where they are silent."""
    if profile is None:
        if acceptance_rate is None or cost_ratio is None:
            raise InvalidOptionError("give --alpha and --cost, or a --profile from `localspec calibrate --json`")
        return _Numbers(acceptance_rate, cost_ratio, verify_cost)
    saved = _read_profile(profile)
    return _Numbers(
        saved.acceptance_rate if acceptance_rate is None else acceptance_rate,
        saved.cost_ratio if cost_ratio is None else cost_ratio,
        saved.verify_cost if verify_cost is None else verify_cost,
        # What was measured holds for the acceptance it was measured with.
        saved.tokens_per_step if acceptance_rate is None else None,
    )


def _read_profile(path: Path) -> _Numbers:
    try:
        data = read_whole(path)
        profile = json.loads(data)
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise ProfileError(f"the profile {path} is not JSON; write it with: localspec calibrate --json") from None
    if not isinstance(profile, dict):
        raise ProfileError(f"the profile {path} is no JSON object; write it with: localspec calibrate --json")
    if "version" in profile:
        return _read_saved(path, data)

    def number(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProfileError(f"the profile {path} has {name} {value!r} where a number belongs; calibrate again")
        return float(value)

    def numbers(name: str) -> tuple[float, ...]:
        values = profile.get(name)
        if not isinstance(values, list) or not values:
            raise ProfileError(f"the profile {path} has no list {name}; write it with: localspec calibrate --json")
        return tuple(number(name, value) for value in values)

    return _Numbers(
        number("acceptance_rate", profile.get("acceptance_rate")),
        number("cost_ratio", profile.get("cost_ratio")),
        numbers("verify_cost"),
        numbers("tokens_per_step"),
    )


def _read_saved(path: Path, data: bytes) -> _Numbers:
    """Take the numbers from a profile as calibrate keeps it: those of all text, near the usual temperature."""
    from localspec.profile import Profile
    from localspec.sampling import LLAMACPP_DEFAULTS
    from localspec.tuning import PROFILE_DEPTH

    try:
        profile = Profile.from_json(data.decode())
    except (ProfileError, UnicodeDecodeError) as error:
        raise ProfileError(f"the profile {path} cannot be used: {error}; calibrate again") from None
    usual = LLAMACPP_DEFAULTS.temperature
    if not profile.agreement:
        raise ProfileError(f"the profile {path} says nothing about agreement; calibrate again")
    pooled = min(reversed(profile.agreement), key=lambda a: (a.kind != "all", abs(a.temperature - usual)))
    click.echo(f"the profile's numbers for text of all kinds at temperature {pooled.temperature:g}", err=True)
    sizes = range(1, len(pooled.block) + 1)
    passes = [profile.target_plan.seconds(profile.target, n, PROFILE_DEPTH) for n in sizes]
    draft_s = profile.draft_plan.seconds(profile.draft, 1, PROFILE_DEPTH)
    return _Numbers(
        pooled.acceptance_rate.value,
        draft_s / passes[0],
        tuple(seconds / passes[0] for seconds in passes),
        pooled.tokens_per_step(),
    )


def _predict(numbers: _Numbers, max_gamma: int | None, sampler_cost: float) -> _Prediction:
    known = [len(values) - 1 for values in (numbers.verify_cost, numbers.tokens_per_step) if values is not None]
    if max_gamma is None:
        max_gamma = min(known, default=_DEFAULT_MAX_GAMMA)
    if not 0 <= max_gamma <= _LARGEST_GAMMA:
        raise InvalidOptionError(f"--max-gamma is {max_gamma}; it must be between 0 and {_LARGEST_GAMMA}")
    if numbers.tokens_per_step is None:
        tokens = tuple(expected_tokens(numbers.acceptance_rate, gamma) for gamma in range(max_gamma + 1))
    elif max_gamma < len(numbers.tokens_per_step):
        tokens = numbers.tokens_per_step[: max_gamma + 1]
    else:
        longest = len(numbers.tokens_per_step) - 1
        raise InvalidOptionError(f"--max-gamma is {max_gamma}, and the profile has tokens_per_step up to {longest}")
    speedups = speedup_from_tokens(tokens, numbers.cost_ratio, numbers.verify_cost, sampler_cost)
    return _Prediction(
        acceptance_rate=numbers.acceptance_rate,
        cost_ratio=numbers.cost_ratio,
        verify_cost=numbers.verify_cost,
        tokens_per_step=tokens,
        speedups=speedups,
        best=max(range(max_gamma + 1), key=lambda gamma: (speedups[gamma], -gamma)),
    )


def _verdict(prediction: _Prediction) -> str:
    best, speedups = prediction.best, prediction.speedups
    if best == 0:
        if len(speedups) == 1:
            return "Only plain decoding was considered."
        nearest = max(speedups[1:])
        return f"Do not speculate: the best draft would run at {nearest:.2f} times the speed of plain decoding."
    return f"Draft {counted(best, 'token')} a step: {speedups[best]:.2f} times the speed of plain decoding."


def _as_json(prediction: _Prediction) -> dict[str, object]:
    """Use the names ``calibrate --json`` has for the same things; what is infinite is null."""
    optimum = None
    if prediction.verify_cost is None:
        optimum = continuous_optimum(prediction.acceptance_rate, prediction.cost_ratio)
    return {
        "acceptance_rate": prediction.acceptance_rate,
        "cost_ratio": prediction.cost_ratio,
        "verify_cost": prediction.verify_cost,
        "tokens_per_step": prediction.tokens_per_step,
        "predicted_speedup": prediction.speedups,
        "best_num_draft_tokens": prediction.best,
        "near_best": near_best(prediction.speedups),
        "ceiling": _finite(ceiling(prediction.acceptance_rate)),
        "continuous_optimum": _finite(optimum),
        "verdict": _verdict(prediction),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _report(prediction: _Prediction, bar: str) -> str:
    alpha, cost = prediction.acceptance_rate, prediction.cost_ratio
    checking = (
        "Checking a draft is taken to cost one target pass; on a CPU it costs more: see --verify-cost."
        if prediction.verify_cost is None
        else "Checking a draft costs what --verify-cost or the profile says."
    )
    head = [
        f"Acceptance rate {alpha:g}: the chance that a drafted token is kept.",
        f"Cost ratio {cost:g}: one draft pass takes {cost:g} of the time of one target pass.",
        checking,
    ]
    return "\n".join([*head, "", *_table(prediction, bar), "", *_conclusions(prediction)])


def _table(prediction: _Prediction, bar: str) -> list[str]:
    unit = _BAR_WIDTH / max(prediction.speedups)
    lines = ["draft  tokens/step  passes/step  speedup"]
    for gamma, (tokens, value) in enumerate(zip(prediction.tokens_per_step, prediction.speedups, strict=True)):
        mark = "  best" if gamma == prediction.best else ""
        passes = tokens / value
        lines.append(f"{gamma:5}  {tokens:11.2f}  {passes:11.2f}  {value:7.2f}  {bar * round(value * unit)}{mark}")
    return lines


def _conclusions(prediction: _Prediction) -> list[str]:
    lines = [_verdict(prediction)]
    close = near_best(prediction.speedups)
    if len(close) > 1:
        lines.append(f"Within 3 % of that: {_ranges(close)} drafted tokens.")
    limit = ceiling(prediction.acceptance_rate)
    lines.append(
        "No limit at this acceptance rate: every draft is kept."
        if math.isinf(limit)
        else f"Ceiling at this acceptance rate, however cheap and long the draft: {limit:.2f} times."
    )
    if prediction.best == len(prediction.speedups) - 1 > 0:
        more = "--max-gamma" if prediction.verify_cost is None else "--max-gamma with a longer --verify-cost"
        lines.append(f"The best is the longest draft considered; a larger {more} may find a better one.")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers briefly: 4 to 6, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _bar_character() -> str:
    encoding: str = sys.stdout.encoding or "ascii"
    try:
        "█".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"
