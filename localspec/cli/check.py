"""``localspec check``: evidence that a pair's output is exact, produced on the user's own pair."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import model_options, sampling_options, sampling_params, seconds
from localspec.cli.running import MODEL_OPTIONS, open_session, progress_bar, say, what_runs
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.checking.findings import Finding, Report

__all__ = ["check"]

_TITLES = {
    "noise": "kernel noise",
    "greedy": "greedy identity",
    "rollback": "rollback",
    "rule": "rules, enumerated",
    "replay": "engine, replayed",
    "generations": "generations",
    "endings": "endings",
}
_WIDTH = 100


@click.command()
@model_options
@sampling_options
@click.option("--gamma", "-g", type=int, default=4, show_default=True, help="The draft length that matters to you.")
@click.option("--prompts", metavar="FILE", help="Generate from your own prompts: text or JSONL.")
@click.option("--budget", metavar="TIME", default="120s", show_default=True, help="For all parts, as 90s or 3m.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the lines.")
@click.pass_context
def check(
    ctx: click.Context, /, gamma: int, prompts: str | None, budget: str, seed: int, as_json: bool, **values: Any
) -> None:
    """Check on this machine that speculation with a pair leaves the target's law as it is.

    Seven parts, each with its verdict: what kernels do to logits, greedy text with and without drafts, taking
    drafts back, the verification rules, the engine on recorded rows, long generations, and how generations end.
    Leaves with 1 if one of them fails. docs/exactness.md says what each of them shows.
    """
    if values.pop("no_draft"):
        raise InvalidOptionError("a check needs a draft; leave out --no-draft")
    from localspec.checking.runner import check as run
    from localspec.checking.subject import CheckSettings

    budget_s = seconds(budget)
    options = {name: values.pop(name) for name in list(values) if name not in MODEL_OPTIONS}
    params = sampling_params(dict(options))
    chosen = {} if prompts is None else {"prompts": _prompts(prompts)}
    CheckSettings(params=params, num_draft_tokens=gamma, budget_s=budget_s, seed=seed, **chosen)
    with open_session(dict(values, no_draft=False), say_profile=False) as session:
        subject = what_runs(session)
        if not as_json and "draft" in subject:
            what = f"Checking {subject['target']} with the draft {subject['draft']}, by {subject['backend']}"
            click.echo(textwrap.fill(what, _width()))
        settings = CheckSettings(
            params=sampling_params(options, session.default_params),
            num_draft_tokens=gamma,
            budget_s=budget_s,
            seed=seed,
            **chosen,
        )
        with progress_bar() as progress:
            report = run(session, settings, found=(lambda finding: None) if as_json else _print, progress=progress)
    if as_json:
        click.echo(json.dumps(_as_json(report, subject), ensure_ascii=False))
    else:
        click.echo(textwrap.fill(_verdict(report), _width()))
    if report.interrupted:
        say("interrupted: the parts that are missing were not looked at")
        ctx.exit(130)
    if not report.passed:
        ctx.exit(1)


def _prompts(name: str) -> Any:
    from localspec.calibration.prompts import read_prompts

    return read_prompts(Path(name))


def _print(finding: Finding) -> None:
    from tqdm import tqdm

    mark = "ok    " if finding.passed else "FAILED"
    odds = f" False alarm: at most 1 in {1 / finding.false_alarm:,.0f} seeds." if finding.false_alarm else ""
    text = f"{mark} {_TITLES[finding.part]}: {finding.summary}.{odds}"
    # It takes the progress bar away first.
    tqdm.write(textwrap.fill(text, _width(), subsequent_indent=" " * 7))
    for problem in finding.problems:
        tqdm.write(textwrap.fill(f"- {problem}", _width(), initial_indent=" " * 7, subsequent_indent=" " * 9))
    sys.stdout.flush()


def _width() -> int:
    """Return how long lines may be: what a terminal takes, and no more than what is good to read."""
    return min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)


def _verdict(report: Report) -> str:
    if report.interrupted:
        return "Not finished."
    failed = [_TITLES[finding.part] for finding in report.findings if not finding.passed]
    if failed:
        return f"NOT EXACT on this machine, damaged, or not tested: see {', '.join(failed)}."
    return (
        "Exact with respect to the logits evaluated, as far as these tests can see. A sound build fails by chance at"
        f" most once in {1 / report.false_alarm:,.0f} seeds."
    )


def _as_json(report: Report, subject: dict[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **subject,
        "passed": report.passed,
        "interrupted": report.interrupted,
        "false_alarm": report.false_alarm,
        "findings": [asdict(finding) for finding in report.findings],
    }
