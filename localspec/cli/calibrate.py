"""``localspec calibrate``: measure a pair on this machine, and say whether and how far to speculate."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.backends import compare_backends
from localspec.cli.frontier import QUICK_SEARCH_S, SEARCH_S, search
from localspec.cli.kept_profile import show_profile
from localspec.cli.options import candidate_options, sampling_options, sampling_params, seconds
from localspec.cli.running import open_session, progress_bar
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.calibration.report import Findings, MeasuredSpeed
    from localspec.calibration.runner import Calibration, CalibrationSettings
    from localspec.cli.deriving import Recipe
    from localspec.profile import Profile
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
@click.option("--frontier", is_flag=True, help="Compare backends, targets, drafts and copying; see what bought what.")
@click.option(
    "--derive",
    metavar="TYPE,...",
    help="Also try drafts made of the draft on the spot: Q4_0, cut:32768 (fewer token ids), Q4_0+cut:32768.",
)
@click.option("--prompts", metavar="FILE", help="Measure on your own prompts: text or JSONL.")
@click.option("--max-gamma", type=int, default=8, show_default=True, help="The longest draft to consider.")
@click.option("--budget", metavar="TIME", help="As 90s or 3m.  [default: 3m, --quick 40s; --frontier 5m, 2m]")
@click.option("--quick", is_flag=True, help="Only what usually decides: one depth, two temperatures.")
@click.option("--show", is_flag=True, help="Show the profile there is; measure nothing.")
@click.option("--validate", is_flag=True, help="Afterwards run plain and speculative in turn, and compare.")
@click.option("--plot", metavar="FILE", help="Write a picture (PNG or SVG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
def calibrate(
    backends: str | None,
    frontier: bool,
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
    (--draft A --draft B, or --derive Q4_0,cut:32768) are ranked by predicted speed; --frontier compares
    them with every backend and with other quantisations of the target, in memory as well.
    """
    params = sampling_params(dict(values))  # what is out of range is said before anything is loaded
    targets: tuple[str, ...] = values["targets"]
    _check_together(
        frontier=frontier,
        backends=backends,
        backend=values["backend"],
        targets=targets,
        show=show,
        validate=validate,
        plot=plot,
    )
    if backends is not None and not frontier:
        compare_backends(backends, as_json=as_json)
        return
    drafts: tuple[str, ...] = values.pop("drafts")
    values["target"] = next(iter(values.pop("targets")), None)
    if show:
        _refuse_measuring(derive=derive, prompts=prompts, budget=budget, quick=quick, validate=validate, plot=plot)
        show_profile(values, drafts, as_json=as_json)
        return
    if plot:
        from localspec.plots import check_picture_path

        check_picture_path(Path(plot))  # before minutes of measuring
    _check_profiles_can_be_kept()
    full_s, quick_s = (SEARCH_S, QUICK_SEARCH_S) if frontier else (_FULL_BUDGET_S, _QUICK_BUDGET_S)
    budget_s = seconds(budget) if budget else (quick_s if quick else full_s)
    settings = _settings(params, prompts, max_gamma, budget_s, quick)
    if derive and not drafts and values["pair"] is None and values["target"] is None:
        values["pair"] = _default_pair()  # what is made of its draft needs a target that is named
    candidates = _drafts(values | {"prompts": prompts}, drafts, derive)
    if frontier:
        more = targets[1:] if targets else None
        search(
            values, targets=more, drafts=candidates, backends=backends, settings=settings, plot=plot, as_json=as_json
        )
        return
    results = _measure_all(values, candidates, settings, validate)
    _report(sorted(results, key=lambda result: -_gain(result[1])), as_json=as_json, plot=plot)


def _check_together(
    *,
    frontier: bool,
    backends: str | None,
    backend: str,
    targets: tuple[str, ...],
    show: bool,
    validate: bool,
    plot: str | None,
) -> None:
    if frontier and (show or validate):
        raise InvalidOptionError(f"--frontier cannot be used with --{'show' if show else 'validate'}")
    if backends is not None and backend != "auto":
        raise InvalidOptionError(f"--backends says what to measure with; leave out --backend {backend}")
    if backends is not None and not frontier and (show or plot):
        raise InvalidOptionError(f"{'--show' if show else '--plot'} is about one backend; name it with --backend")
    if len(targets) > 1 and not frontier:
        raise InvalidOptionError(f"{len(targets)} targets are named; give one, or compare them with --frontier")


def _refuse_measuring(**given: object) -> None:
    names = [name for name, value in given.items() if value]
    if names:
        raise InvalidOptionError(f"--show measures nothing and cannot use --{names[0]}; leave out one of them")


def _check_profiles_can_be_kept() -> None:
    """Raise StoreError before minutes of measuring, where it would be raised after them."""
    from tempfile import TemporaryFile

    from localspec.registry.partial import store_errors
    from localspec.tuning import profile_directory

    directory = profile_directory()
    with store_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()


def _settings(params: Any, prompts: str | None, max_gamma: int, budget_s: float, quick: bool) -> CalibrationSettings:
    from localspec.calibration.prompts import built_in_prompts, read_prompts
    from localspec.calibration.runner import CalibrationSettings

    chosen = read_prompts(Path(prompts)) if prompts else built_in_prompts()
    return CalibrationSettings(
        params=params, prompts=chosen, max_draft_tokens=max_gamma, budget_s=budget_s, quick=quick
    )


def _default_pair() -> str:
    from localspec import registry

    return registry.load().pair().name


def _drafts(values: dict[str, Any], named: tuple[str, ...], derive: str | None) -> list[str | None]:
    """Return the drafts to try, by name or path; None stands for the pair's own."""
    from localspec.cli.deriving import read_recipes

    drafts: list[str | None] = [*named] or [None]
    recipes = read_recipes(derive or "")  # all are right before the first is followed, which takes a while
    drafts += [_derived(values, named[0] if named else None, recipe) for recipe in recipes]
    return list(dict.fromkeys(drafts))


def _derived(values: dict[str, Any], draft: str | None, recipe: Recipe) -> str | None:
    """Make another draft of the draft beside the profiles, and return its path; ``draft`` if it is that already."""
    from localspec.cli.deriving import derive
    from localspec.loading import find_files

    files = find_files(values["pair"], target=values["target"], draft=draft, progress=True)
    if files.draft is None:
        raise InvalidOptionError("--derive needs a draft to start from; name one with --draft or --pair")
    made = derive(files.draft, recipe, threads=values["threads"], prompts=values.get("prompts"))
    return draft if made == files.draft else str(made)


def _measure_all(
    values: dict[str, Any], drafts: list[str | None], settings: CalibrationSettings, validate: bool
) -> list[tuple[Calibration, Findings]]:
    """Measure one candidate after the other; an interrupt leaves out those that were not begun, or not far enough."""
    if len(drafts) > 1:
        _check_candidates(values, drafts)
    results: list[tuple[Calibration, Findings]] = []
    for draft in drafts:
        try:
            results.append(_measure(dict(values, draft=draft), settings, validate))
        except KeyboardInterrupt:
            kept = "only the drafts before it are compared" if results else "nothing is kept"
            click.echo(f"interrupted: too little was measured for a profile, and {kept}", err=True)
            if not results:
                raise
            break
        if results[-1][0].interrupted:
            break
    return results


def _check_candidates(values: dict[str, Any], drafts: list[str | None]) -> None:
    """Refuse a draft that does not fit before minutes are spent on the others."""
    from localspec.backend.compatibility import check_compatible
    from localspec.backend.model_header import read_header
    from localspec.loading import find_files

    for draft in drafts:
        files = find_files(values["pair"], target=values["target"], draft=draft, progress=True)
        if files.draft is not None:
            check_compatible(read_header(files.target), read_header(files.draft))


def _measure(values: dict[str, Any], settings: CalibrationSettings, validate: bool) -> tuple[Calibration, Findings]:
    from dataclasses import replace

    from localspec.calibration.profiles import findings_of
    from localspec.calibration.runner import calibrate as run
    from localspec.profile import save
    from localspec.tuning import profile_directory

    threads = values["threads"]
    values["backend"] = _backend(values)
    session = open_session(values | {"no_draft": False}, use_profile=False)
    # What models.toml recommends for the target holds here as it does when generating.
    settings = replace(settings, params=sampling_params(dict(values), session.default_params))
    pair = session.pair
    if pair.draft is None or pair.draft_header is None:
        raise InvalidOptionError("there is no draft to calibrate; name one with --draft, or use --pair")
    with progress_bar() as progress:
        calibration = run(
            pair, settings, encode=session.encode, threads=threads, progress=progress, notice=_say_beside_bar
        )
    if calibration.interrupted:
        click.echo("interrupted: the report rests on what was measured so far", err=True)
    path = save(profile_directory(), calibration.profile)
    click.echo(f"profile written to {path}", err=True)
    findings = findings_of(
        calibration.profile,
        calibration.agreements,
        target=pair.target_header.path.name,
        draft=pair.draft_header.path.name,
        temperature=settings.params.temperature,
    )
    session.close()
    if validate and not calibration.interrupted:
        with open_session(values | {"no_draft": False}) as checked, progress_bar() as progress:
            findings = replace(findings, measured=_validate(checked, settings, progress))
    return calibration, findings


def _backend(values: dict[str, Any]) -> str:
    """Return which backend to measure: with "auto" the one that generate and chat would use."""
    from localspec.loading import choose_backend, find_files

    files = find_files(values["pair"], target=values["target"], draft=values["draft"], progress=True)
    return choose_backend(values["backend"], files, threads=values["threads"])


def _say_beside_bar(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def _validate(
    session: Session, settings: CalibrationSettings, progress: Callable[[str, float], None]
) -> tuple[MeasuredSpeed, ...]:
    """Run plain and speculative generation in turn and return what each draft length really gained.

    An interrupt keeps the rounds that are done; nothing is measured if it comes in the first one.
    """
    from localspec.benchmark import BenchmarkSettings, benchmark
    from localspec.calibration.report import MeasuredSpeed

    lengths = tuple(gamma for gamma in (1, 2, 4, 6) if gamma <= settings.max_draft_tokens)
    plan = BenchmarkSettings(
        params=settings.params,
        temperatures=(settings.params.temperature,),
        lengths=lengths,
        prompts=settings.prompts,
        max_tokens=_VALIDATION_TOKENS,
        trials=_VALIDATION_ROUNDS,
    )
    try:
        cells = benchmark(session, plan, progress=progress).cells
    except KeyboardInterrupt:
        _say_beside_bar("interrupted: there is no validation")
        return ()
    return tuple(
        MeasuredSpeed(cell.kind, cell.temperature, side.num_draft_tokens, side.speedup.median)
        for cell in cells
        for side in cell.sides
        if side.num_draft_tokens is not None
    )


def _gain(findings: Findings) -> float:
    """Return the predicted speed of the best draft over plain decoding, over all kinds, whether it pays or not.

    That both were measured together makes it a better measure than tokens per second of runs minutes apart.
    """
    pooled = findings.at_temperature()[-1]
    return max(findings.speedups(pooled.under(findings.rule).tokens_per_step)[1:])


def _print(calibration: Calibration, findings: Findings) -> None:
    from localspec.calibration.report import render, wrapped

    click.echo(render(findings, bar="█" if _can_print("█") else "#"))
    bandwidth = calibration.bandwidth
    read = (
        f"One target token reads {bandwidth.pass_bytes / 1e9:.2f} GB at {bandwidth.bytes_per_s / 1e9:.1f} GB/s,"
        f" {bandwidth.share:.0%} of what plain reading reaches: {bandwidth.bound}-bound."
    )
    click.echo("\n" + wrapped(read))


def _report(results: list[tuple[Calibration, Findings]], *, as_json: bool, plot: str | None) -> None:
    """Print what was found about the first, which is the fastest."""
    calibration, findings = results[0]
    if as_json:
        click.echo(json.dumps(pair_as_json(calibration.profile, findings, interrupted=calibration.interrupted)))
    else:
        _print(calibration, findings)
    if len(results) > 1:
        _rank(results)
    if plot:
        from localspec.calibration.report import save_picture

        save_picture(Path(plot), findings)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _rank(results: list[tuple[Calibration, Findings]]) -> None:
    """Say on stderr how the candidates compare; the report itself is the winner's."""
    click.echo("drafts by predicted speed over plain decoding:", err=True)
    for _, findings in results:
        click.echo(f"  {_gain(findings):4.2f}×  {findings.draft}", err=True)
    click.echo(f"the report is about the first, {results[0][1].draft}", err=True)


def pair_as_json(profile: Profile, findings: Findings, *, interrupted: bool) -> dict[str, Any]:
    """Return what is printed about one pair as JSON."""
    from dataclasses import asdict

    from localspec.calibration.report import choose, verdict
    from localspec.profile import best

    pooled = findings.at_temperature()[-1]
    tokens_per_step = pooled.under(findings.rule).tokens_per_step
    speedups = findings.speedups(tokens_per_step)
    return {
        "best_num_draft_tokens": best(speedups),
        "predicted_speedup": list(speedups),
        "cost_ratio": findings.cost_ratio,
        "verify_cost": list(findings.verify_cost),
        "acceptance_rate": pooled.acceptance_rate,
        "tokens_per_step": list(tokens_per_step),
        "verdict": verdict(findings),
        "kinds": {choice.kind: asdict(choice) for choice in choose(findings)},
        "measured": [asdict(point) for point in findings.measured],
        "interrupted": interrupted,
        "profile": json.loads(profile.to_json()),
    }
