"""``localspec calibrate``: measure a pair on this machine, and say whether and how far to speculate."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.backends import compare_backends
from localspec.cli.options import candidate_options, sampling_options, sampling_params
from localspec.cli.running import open_session, profile_options
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.calibration.report import Findings, MeasuredSpeed
    from localspec.calibration.runner import Calibration, CalibrationSettings
    from localspec.profile import Profile, Verdict
    from localspec.session import Session

__all__ = ["calibrate"]

_QUICK_BUDGET_S = 40.0
_FULL_BUDGET_S = 180.0
_VALIDATION_ROUNDS = 5
_VALIDATION_TOKENS = 64


@click.command()
@candidate_options
@sampling_options
@click.option("--backends", metavar="NAME,...", help="Measure with each, as llamacpp,ik, and keep the faster one.")
@click.option("--derive", metavar="TYPE,...", help="Also try these quantisations of the draft, made on the spot.")
@click.option("--prompts", metavar="FILE", help="Measure on your own prompts: text or JSONL.")
@click.option("--max-gamma", type=int, default=8, show_default=True, help="The longest draft to consider.")
@click.option("--budget", metavar="TIME", help="For measuring, as 90s or 3m.  [default: 3m; with --quick 40s]")
@click.option("--quick", is_flag=True, help="Only what usually decides: one depth, two temperatures.")
@click.option("--show", is_flag=True, help="Show the profile there is; measure nothing.")
@click.option("--validate", is_flag=True, help="Afterwards run plain and speculative in turn, and compare.")
@click.option("--plot", metavar="FILE", help="Write a picture (PNG or SVG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
def calibrate(
    backends: str | None,
    derive: str | None,
    prompts: str | None,
    max_gamma: int,
    budget: str | None,
    quick: bool,
    show: bool,
    validate: bool,
    plot: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure what passes cost and how often drafts are accepted, and keep what follows as this pair's profile.

    generate and chat then draft as far as it pays on this machine, or not at all. Several drafts
    (--draft A --draft B, or --derive Q4_0,Q8_0) are ranked by predicted speed.
    """
    params = sampling_params(values)
    if backends is not None:
        if show or plot:
            raise InvalidOptionError(f"{'--show' if show else '--plot'} is about one backend; name it with --backend")
        compare_backends(backends, as_json=as_json)
        return
    drafts: tuple[str, ...] = values.pop("drafts")
    if show:
        _refuse_measuring(derive=derive, prompts=prompts, budget=budget, quick=quick, validate=validate, plot=plot)
        _show(values, drafts, as_json)
        return
    if plot:
        from localspec.plots import check_picture_path

        check_picture_path(Path(plot))  # before minutes of measuring
    seconds = _seconds(budget) if budget else (_QUICK_BUDGET_S if quick else _FULL_BUDGET_S)
    settings = _settings(params, prompts, max_gamma, seconds, quick)
    results = [_measure(dict(values, draft=draft), settings, validate) for draft in _drafts(values, drafts, derive)]
    results.sort(key=lambda result: -_best_speed(result[1]))
    calibration, findings = results[0]
    if as_json:
        click.echo(json.dumps(_as_json(calibration, findings)))
    else:
        _print(calibration, findings)
    if len(results) > 1:
        _rank(results)
    if plot:
        from localspec.calibration.report import save_picture

        save_picture(Path(plot), findings)


def _refuse_measuring(**given: object) -> None:
    names = [name for name, value in given.items() if value]
    if names:
        raise InvalidOptionError(f"--show measures nothing and cannot use --{names[0]}; leave out one of them")


def _settings(params: Any, prompts: str | None, max_gamma: int, budget_s: float, quick: bool) -> CalibrationSettings:
    from localspec.calibration.prompts import built_in_prompts, read_prompts
    from localspec.calibration.runner import CalibrationSettings

    chosen = read_prompts(Path(prompts)) if prompts else built_in_prompts()
    return CalibrationSettings(
        params=params, prompts=chosen, max_draft_tokens=max_gamma, budget_s=budget_s, quick=quick
    )


def _seconds(text: str) -> float:
    """Return the seconds of "90", "90s" or "3m"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min)?", text.strip())
    if not match or float(match[1]) <= 0:
        raise InvalidOptionError(f"--budget is {text!r}; write it as 90s or 3m")
    return float(match[1]) * (60 if match[2] and match[2].startswith("m") else 1)


def _drafts(values: dict[str, Any], named: tuple[str, ...], derive: str | None) -> list[str | None]:
    """Return the drafts to try, by name or path; None stands for the pair's own."""
    drafts: list[str | None] = [*named] or [None]
    for type_name in filter(None, (derive or "").split(",")):
        drafts.append(_derived(values, named[0] if named else None, type_name.strip().upper()))
    return drafts


def _derived(values: dict[str, Any], draft: str | None, type_name: str) -> str:
    """Make another quantisation of the draft beside the profiles, and return its path."""
    from localspec.backend.quantize import quantize
    from localspec.loading import find_files
    from localspec.registry import cache_dir

    files = find_files(values["pair"], target=values["target"], draft=draft, progress=True)
    if files.draft is None:
        raise InvalidOptionError("--derive needs a draft to start from; name one with --draft or --pair")
    path = cache_dir() / "derived" / f"{files.draft.stem}-{type_name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        click.echo(f"making {type_name} of {files.draft.name}", err=True)
        quantize(files.draft, path, type_name, threads=values["threads"])
    return str(path)


def _measure(values: dict[str, Any], settings: CalibrationSettings, validate: bool) -> tuple[Calibration, Findings]:
    from dataclasses import replace

    from localspec.calibration.runner import calibrate as run
    from localspec.calibration.runner import findings_of
    from localspec.profile import save
    from localspec.tuning import profile_directory

    threads = values["threads"]
    values["backend"] = _backend(values)
    session = open_session(dict(values, no_draft=False), use_profile=False)
    pair = session.pair
    if pair.draft is None or pair.draft_header is None:
        raise InvalidOptionError("there is no draft to calibrate; name one with --draft, or use --pair")
    with _progress() as progress:
        calibration = run(pair, settings, encode=session.encode, threads=threads, progress=progress)
    if calibration.interrupted:
        click.echo("interrupted: the report rests on what was measured so far", err=True)
    path = save(profile_directory(), calibration.profile)
    click.echo(f"profile written to {path}", err=True)
    findings = findings_of(
        calibration,
        target=pair.target_header.path.name,
        draft=pair.draft_header.path.name,
        temperature=settings.params.temperature,
    )
    session.close()
    if validate:
        checked = open_session(dict(values, no_draft=False))
        findings = replace(findings, measured=_validate(checked, settings))
        checked.close()
    return calibration, findings


def _backend(values: dict[str, Any]) -> str:
    """Return which backend to measure: with "auto" the one that generate and chat would use."""
    from localspec.loading import choose_backend, find_files

    files = find_files(values["pair"], target=values["target"], draft=values["draft"], progress=True)
    return choose_backend(values["backend"], files, threads=values["threads"])


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    layout = "{desc:<10} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, leave=False, bar_format=layout, disable=not on_terminal) as bar:

        def report(phase: str, share: float) -> None:
            if on_terminal:
                bar.set_description_str(phase, refresh=False)
                bar.update(max(0.0, share - bar.n))

        yield report


def _validate(session: Session, settings: CalibrationSettings) -> tuple[MeasuredSpeed, ...]:
    """Run plain and speculative generation in turn and return what each draft length really gained."""
    from statistics import median

    from localspec.calibration.report import MeasuredSpeed

    measured = []
    kinds = {prompt.kind: prompt for prompt in reversed(settings.prompts)}
    lengths = [gamma for gamma in (1, 2, 4, 6) if gamma <= settings.max_draft_tokens]
    for kind, prompt in kinds.items():
        speeds: dict[int, list[float]] = {gamma: [] for gamma in (0, *lengths)}
        for trial in range(_VALIDATION_ROUNDS):
            for gamma, values in speeds.items():
                result = session.generate(
                    prompt.content,
                    settings.params,
                    max_tokens=_VALIDATION_TOKENS,
                    num_draft_tokens=gamma,
                    seed=trial,
                )
                values.append(result.stats.tokens_per_s)
        for gamma in lengths:
            ratio = median(a / b for a, b in zip(speeds[gamma], speeds[0], strict=True) if b > 0)
            measured.append(MeasuredSpeed(kind, settings.params.temperature, gamma, ratio))
    return tuple(measured)


def _best_speed(findings: Findings) -> float:
    """Return predicted tokens per second of the best draft length over all kinds."""
    pooled = findings.at_temperature()[-1]
    return max(findings.speedups(pooled.under(findings.rule).tokens_per_step)) / findings.target_pass_s[0]


def _print(calibration: Calibration, findings: Findings) -> None:
    from localspec.calibration.report import render

    click.echo(render(findings, bar="█" if _can_print("█") else "#"))
    bandwidth = calibration.bandwidth
    click.echo(
        f"\nOne target token reads {bandwidth.pass_bytes / 1e9:.2f} GB at {bandwidth.bytes_per_s / 1e9:.1f} GB/s,"
        f" {bandwidth.share:.0%} of what plain reading reaches: {bandwidth.bound}-bound."
    )


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _rank(results: list[tuple[Calibration, Findings]]) -> None:
    """Say on stderr how the candidates compare; the report itself is the winner's."""
    click.echo("drafts by predicted speed:", err=True)
    for _, findings in results:
        click.echo(f"  {_best_speed(findings):6.1f} tokens/s  {findings.draft}", err=True)
    click.echo(f"the report is about the fastest, {results[0][1].draft}", err=True)


def _show(values: dict[str, Any], drafts: tuple[str, ...], as_json: bool) -> None:
    from localspec.errors import ProfileError
    from localspec.loading import choose_backend, find_files
    from localspec.tuning import look_up_profile

    if len(drafts) > 1:
        raise InvalidOptionError(f"--show is about one pair, and {len(drafts)} drafts are named; give one of them")
    values["draft"] = drafts[0] if drafts else None
    files = find_files(values["pair"], target=values["target"], draft=values["draft"], progress=True)
    if files.draft is None:
        raise InvalidOptionError("a profile belongs to a pair; name the draft with --draft, or use --pair")
    backend = choose_backend(values["backend"], files, threads=values["threads"])
    lookup = look_up_profile(files.target, files.draft, threads=values["threads"], backend=backend)
    if lookup.profile is None:
        raise ProfileError(f"{lookup.problem}{profile_options(values)}" if lookup.problem else "there is no profile")
    if as_json:
        click.echo(lookup.profile.to_json(), nl=False)
        return
    measured = f"measured {lookup.profile.created} with {lookup.profile.key.backend}"
    click.echo(f"{files.target.name} with {files.draft.name}, {measured}")
    for line in _summary(lookup.profile):
        click.echo(line)


def _summary(profile: Profile) -> Iterator[str]:
    yield f"threads {profile.threads}, flash attention {profile.flash_attention}"
    yield f"plain decoding {profile.plain_tokens_per_s:.1f} tokens/s"
    for change in profile.draft_temperatures:
        yield f"at temperature {change.temperature:g} the draft runs at {change.draft_temperature:g}"
    if not any(verdict.best_num_draft_tokens for verdict in profile.verdicts):
        yield "do not speculate with this pair on this machine"
        return
    temperatures = sorted({verdict.temperature for verdict in profile.verdicts})
    found = {(verdict.kind, verdict.temperature): verdict for verdict in profile.verdicts}
    yield "tokens to draft, and the speed that predicts, plain decoding being 1"
    yield f"{'temperature':14}" + "".join(f"{temperature:<14g}" for temperature in temperatures).rstrip()
    for kind in dict.fromkeys(verdict.kind for verdict in profile.verdicts):
        cells = [_advice(found.get((kind, temperature))) for temperature in temperatures]
        yield f"{kind:14.13}" + "".join(f"{cell:14}" for cell in cells).rstrip()


def _advice(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    best = verdict.best_num_draft_tokens
    return f"{best} ({verdict.predicted_speedup[best]:.2f})" if best else "none"


def _as_json(calibration: Calibration, findings: Findings) -> dict[str, Any]:
    from dataclasses import asdict

    from localspec.calibration.report import choose, verdict

    pooled = findings.at_temperature()[-1]
    tokens_per_step = pooled.under(findings.rule).tokens_per_step
    speedups = findings.speedups(tokens_per_step)
    return {
        "best_num_draft_tokens": max(range(len(speedups)), key=lambda gamma: (speedups[gamma], -gamma)),
        "predicted_speedup": list(speedups),
        "cost_ratio": findings.cost_ratio,
        "verify_cost": list(findings.verify_cost),
        "acceptance_rate": pooled.acceptance_rate,
        "tokens_per_step": list(tokens_per_step),
        "verdict": verdict(findings),
        "kinds": {choice.kind: asdict(choice) for choice in choose(findings)},
        "measured": [asdict(point) for point in findings.measured],
        "interrupted": calibration.interrupted,
        "profile": json.loads(calibration.profile.to_json()),
    }
