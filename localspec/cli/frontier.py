"""``localspec calibrate --frontier``: backends, targets and drafts compared in one search."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import sampling_params
from localspec.cli.running import progress_bar
from localspec.errors import LocalspecError, StoreError

if TYPE_CHECKING:
    from localspec.backend.choice import BackendName
    from localspec.backend.model_header import ModelHeader
    from localspec.calibration.frontier import Candidate, Frontier, ModelFile
    from localspec.calibration.runner import CalibrationSettings
    from localspec.calibration.search import Measurements, Message, SearchJob
    from localspec.loading import ModelFiles
    from localspec.profile import ProfileKey

__all__ = ["QUICK_SEARCH_S", "SEARCH_S", "search"]

SEARCH_S, QUICK_SEARCH_S = 300.0, 120.0
_FIRST_SHARE = 0.65  # of the budget, for the backend with which agreement is measured, if there are others


def search(
    values: dict[str, Any],
    *,
    targets: Sequence[str] | None,
    drafts: Sequence[str | None],
    backends: str | None,
    settings: CalibrationSettings,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure every file once with every backend, keep the profiles, and print the frontier.

    Args:
        values: options that load models, the given target among them, and sample.
        targets: others to compare it with; None stands for what else of the pair's target is at hand.
        drafts: None stands for the pair's own.
        backends: a comma-separated list; without it the one of ``--backend``, or all at hand.
        settings: what to measure, at the sampling options given.
        plot: where to write a picture.
        as_json: print one JSON object.
    """
    from dataclasses import replace

    from localspec.calibration.frontier import find_frontier
    from localspec.calibration.frontier_report import render, save_frontier_picture
    from localspec.loading import recommended_params

    given, target_paths = _targets(values, targets)
    draft_paths = _drafts(values, drafts)
    params = sampling_params(dict(values), recommended_params(given.sampling))
    settings = replace(settings, params=params)
    of_targets, of_drafts = _model_files(target_paths, draft_paths, values["context"])
    jobs = _jobs(_backends(backends, values["backend"]), target_paths, draft_paths, settings, values)
    measured, interrupted = _measure(jobs, settings.budget_s)
    options = {"temperature": params.temperature, "max_draft_tokens": settings.max_draft_tokens}
    frontier = find_frontier(measured, of_targets, of_drafts, **options)
    if frontier is None:
        click.echo("interrupted: too little was measured to compare anything", err=True)
        raise KeyboardInterrupt
    if interrupted:
        click.echo("interrupted: what was measured so far is compared", err=True)
    for left in measured.left_out:
        click.echo(f"left out with {left.backend}: {left.path.name}: {left.why}", err=True)
    contract, unsaved = _save_profiles(measured, frontier, settings, values["threads"], interrupted)
    command = _command(frontier, values)
    if as_json:
        click.echo(json.dumps(contract | _as_values(frontier, measured, command)))
    else:
        click.echo(f"{render(frontier)}\nTo run it: {command}")
    if plot:
        save_frontier_picture(Path(plot), frontier)
    if unsaved is not None:
        raise unsaved  # only now: what took minutes to measure has been said


# What takes part


def _backends(names: str | None, choice: str) -> list[BackendName]:
    from localspec.backend.choice import BACKENDS, identity_at_hand
    from localspec.backend.ik_library import find_library
    from localspec.errors import BackendError

    if names is not None:
        from localspec.cli.backends import named_backends

        return named_backends(names)
    if choice != "auto":
        return [name for name in BACKENDS if name == choice]
    at_hand = [name for name in BACKENDS if identity_at_hand(name) is not None]
    if "ik" not in at_hand:
        try:
            find_library()
        except BackendError as error:
            click.echo(f"left out ik: {error}", err=True)
    return at_hand


def _targets(values: dict[str, Any], others: Sequence[str] | None) -> tuple[ModelFiles, list[Path]]:
    from localspec import registry
    from localspec.loading import find_files

    given = find_files(values["pair"], target=values["target"], use_draft=False, progress=True)
    paths = [given.target]
    if others is None:
        names = registry.load()
        store, target = registry.Store(names), names.pair(values["pair"]).target
        alike = [model for model in names.models.values() if names.origin(model) == names.origin(target)]
        paths += [store.path(model) for model in alike if store.is_ready(model)]
    else:
        paths += [find_files(target=other, use_draft=False, progress=True).target for other in others]
    return given, list(dict.fromkeys(paths))


def _drafts(values: dict[str, Any], named: Sequence[str | None]) -> list[Path]:
    from localspec.loading import find_files

    found = [find_files(values["pair"], target=values["target"], draft=draft, progress=True).draft for draft in named]
    return list(dict.fromkeys(path for path in found if path is not None))


def _model_files(targets: Sequence[Path], drafts: Sequence[Path], context: int) -> tuple[list[ModelFile], ...]:
    """Read the headers, and refuse what does not fit together before minutes are spent on the rest."""
    from localspec.backend.compatibility import check_compatible
    from localspec.backend.identity import file_fingerprint
    from localspec.backend.model_header import read_header
    from localspec.calibration.frontier import ModelFile
    from localspec.cli.inspection import memory_parts
    from localspec.loading import check_can_answer

    headers = {path: read_header(path) for path in (*targets, *drafts)}
    for path in targets:
        check_can_answer(headers[path])
    for path in (*targets[1:], *drafts):
        check_compatible(headers[targets[0]], headers[path])
    origins = {file_fingerprint(path): path for path in drafts}
    found = []
    for paths in (targets, drafts):
        cuts = {path: _cut(path) for path in paths}
        labels = _distinct({path: _label(headers[path], cut[0] if cut else None) for path, cut in cuts.items()})
        found.append(
            [
                ModelFile(
                    path=path,
                    label=labels[path],
                    memory_bytes=sum(memory_parts(headers[path], context).values()),
                    uncut=origins.get(cut[1]) if cut else None,
                    is_cut=cut is not None,
                )
                for path, cut in cuts.items()
            ]
        )
    return tuple(found)


def _cut(path: Path) -> tuple[int, str] | None:
    """Return how many ids a draft with a cut vocabulary keeps, and what it is made from; None for a whole one."""
    from localspec.backend.gguf import ArrayView, read_gguf

    metadata = read_gguf(path).metadata
    kept, origin = (metadata.get(f"localspec.cut.{key}") for key in ("ids", "made_from"))
    return (kept.count, str(origin)) if isinstance(kept, ArrayView) else None


def _label(header: ModelHeader, kept: int | None) -> str:
    if kept is None:
        return header.file_type
    return f"{header.file_type} cut:{kept}" if kept % 1024 else f"{header.file_type} cut:{kept // 1024}k"


def _distinct(labels: dict[Path, str]) -> dict[Path, str]:
    """Return the labels; where several files share one their names, and as much of their paths as it takes."""
    depth = 0
    while shared := [path for path, label in labels.items() if [*labels.values()].count(label) > 1]:
        depth += 1
        labels |= {path: path.stem if depth == 1 else "/".join(path.parts[-depth:]) for path in shared}
    return labels


# Measuring


def _jobs(
    backends: Sequence[BackendName],
    targets: Sequence[Path],
    drafts: Sequence[Path],
    settings: CalibrationSettings,
    values: dict[str, Any],
) -> list[SearchJob]:
    """Return a job for each backend; agreement is measured with the first one."""
    from localspec.calibration.search import SearchJob

    temperature = settings.params.temperature
    return [
        SearchJob(
            backend=backend,
            targets=tuple(targets),
            drafts=tuple(drafts),
            settings=settings,
            temperatures=tuple(dict.fromkeys((temperature,) if settings.quick else (temperature, 0.0))),
            agreement=number == 0,
            context=values["context"],
            threads=values["threads"],
            template=values["template"],
        )
        for number, backend in enumerate(backends)
    ]


def _measure(
    jobs: Sequence[SearchJob], budget_s: float, *, clock: Callable[[], float] = perf_counter
) -> tuple[Measurements, bool]:
    """Do the jobs, one after the other; returns what they found, and whether an interrupt ended them.

    What one does not need of its share of the budget is left to the next.

    Raises:
        LocalspecError: the first of them failed.
    """
    from dataclasses import replace

    from localspec.calibration.processes import run
    from localspec.calibration.search import Measurements, Progress

    measured, interrupted, started = Measurements(), False, clock()
    with progress_bar() as show:

        def take(message: Message) -> None:
            measured.add(message)
            if isinstance(message, Progress):
                show(message.phase, (clock() - started) / budget_s)

        for number, job in enumerate(jobs):
            share = 1 / (len(jobs) - number) if number or len(jobs) == 1 else _FIRST_SHARE
            left_s = max(1.0, budget_s - (clock() - started))
            try:
                interrupted = run(replace(job, settings=replace(job.settings, budget_s=share * left_s)), take)
            except LocalspecError as error:
                if not number:
                    raise
                click.echo(f"left out {job.backend}: {error}", err=True)
            if interrupted:
                break
    return measured, interrupted


# What comes of it


def _save_profiles(
    measured: Measurements, frontier: Frontier, settings: CalibrationSettings, threads: int | None, interrupted: bool
) -> tuple[dict[str, Any], StoreError | None]:
    """Keep the profile of every pair that was measured.

    Returns what is printed as JSON about the best one's pair, and why profiles could not be kept.
    """
    from localspec.calibration.frontier import profiles_of
    from localspec.calibration.profiles import findings_of
    from localspec.cli.calibrate import pair_as_json
    from localspec.profile import save
    from localspec.tuning import profile_directory, profile_key

    def key(backend: BackendName, target: Path, draft: Path) -> ProfileKey:
        build = measured.began[backend].build
        return profile_key(target, draft, threads=threads, backend=backend, build=build)

    best = frontier.best
    shown = next((c for c in frontier.candidates if _same_place(c, best) and c.draft), best)
    contract, count = _without_draft(measured, frontier, settings.max_draft_tokens, interrupted), 0
    unsaved: StoreError | None = None
    for backend, target, draft, profile, agreements in profiles_of(
        measured, frontier.targets, frontier.drafts, key=key, max_draft_tokens=settings.max_draft_tokens
    ):
        try:
            save(profile_directory(), profile)
            count += 1
        except StoreError as error:
            unsaved = error
        if (backend, target, draft) == (best.backend, best.target, best.draft or shown.draft):
            findings = findings_of(
                profile, agreements, target=target.name, draft=draft.name, temperature=settings.params.temperature
            )
            contract = pair_as_json(profile, findings, interrupted=interrupted)
    if count:
        click.echo(f"{count} profile{'s' * (count > 1)} written to {profile_directory()}", err=True)
    return contract, unsaved


def _same_place(one: Candidate, other: Candidate) -> bool:
    return (one.backend, one.target) == (other.backend, other.target)


def _without_draft(
    measured: Measurements, frontier: Frontier, max_draft_tokens: int, interrupted: bool
) -> dict[str, Any]:
    """Return the fields that JSON always has, where there is no draft model to fill them."""
    from localspec.calibration.frontier_report import verdict
    from localspec.tuning import PROFILE_DEPTH

    curves = measured.of_targets[frontier.best.backend, frontier.best.target].curves
    seconds = [curves.seconds(n, PROFILE_DEPTH) for n in range(1, max_draft_tokens + 2)]
    return {
        "best_num_draft_tokens": 0,
        "predicted_speedup": [1.0],
        "cost_ratio": None,
        "verify_cost": [one / seconds[0] for one in seconds],
        "acceptance_rate": None,
        "tokens_per_step": [1.0],
        "verdict": verdict(frontier),
        "interrupted": interrupted,
        "profile": None,
    }


def _as_values(frontier: Frontier, measured: Measurements, command: str) -> dict[str, Any]:
    from localspec.calibration.frontier_report import as_values

    left_out = [{"backend": one.backend, "file": str(one.path), "why": one.why} for one in measured.left_out]
    return {
        "backend": frontier.best.backend,
        "frontier": as_values(frontier) | {"left_out": left_out},
        "command": command,
    }


def _command(frontier: Frontier, values: dict[str, Any]) -> str:
    """Return what runs the best candidate; the backend is named only where "auto" would take another one."""
    from localspec.tuning import remembered_backend

    best = frontier.best
    parts = ["localspec", "generate", "--target", str(best.target)]
    parts += ["--draft", str(best.draft)] if best.draft else ["--no-draft"]
    parts += ["--drafter", best.drafter] if best.drafter in ("lookup", "model") else []
    remembered = remembered_backend(best.target, best.draft, threads=values["threads"]) or "llamacpp"
    parts += ["--backend", best.backend] if remembered != best.backend else []
    parts += ["--threads", str(values["threads"])] if values["threads"] else []
    return shlex.join(parts)
