"""The whole check of one pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from time import perf_counter

from localspec.checking.endings import check_endings
from localspec.checking.findings import Allowance, Finding, Part, Report
from localspec.checking.generations import check_generations
from localspec.checking.greedy import check_greedy
from localspec.checking.noise import check_noise
from localspec.checking.replay import check_replay
from localspec.checking.rollback import check_rollback
from localspec.checking.rows import RecordedRows
from localspec.checking.rule import check_rule
from localspec.checking.subject import CheckSettings, Subject, audited
from localspec.session import Session

__all__ = ["check"]

Progress = Callable[[str, float], None]
"""Called with what is being looked at and the share of the whole that is done."""

_SHARES: dict[Part, float] = {
    "noise": 0.08,
    "greedy": 0.22,
    "rollback": 0.10,
    "rule": 0.03,
    "replay": 0.15,
    "generations": 0.25,
    "endings": 0.08,
}
"""Of the budget; the rest is for writing texts and recording rows."""


def check(
    session: Session,
    settings: CheckSettings,
    *,
    found: Callable[[Finding], None] = lambda finding: None,
    progress: Progress = lambda part, share: None,
) -> Report:
    """Check a session's pair; an interrupt ends the check, and the report says so.

    Args:
        session: with a draft; nothing else may use it meanwhile.
        settings: how to check.
        found: told every finding as it comes.
        progress: told what is going on.

    Raises:
        InvalidOptionError: the session has no draft, or no prompt fits its context.
    """
    findings: list[Finding] = []
    try:
        with audited(session, settings) as subject:
            for finding in _findings(subject, progress):
                findings.append(finding)
                found(finding)
    except KeyboardInterrupt:
        return Report(tuple(findings), interrupted=True)
    return Report(tuple(findings))


def _findings(subject: Subject, progress: Progress) -> Iterator[Finding]:
    settings = subject.settings
    temperature = settings.sampling.temperature
    texts = cache(subject.texts)
    rows = cache(lambda: RecordedRows.record(subject, texts()))

    def nothing() -> None:
        pass

    parts: dict[Part, tuple[Callable[[], object], Callable[[Allowance], Finding]]] = {
        "noise": (texts, lambda allowance: check_noise(subject, texts(), allowance)),
        "greedy": (nothing, lambda allowance: check_greedy(subject, allowance)),
        "rollback": (texts, lambda allowance: check_rollback(subject, texts(), allowance)),
        "rule": (rows, lambda allowance: check_rule(rows(), settings.sampling, allowance)),
        "replay": (rows, lambda allowance: check_replay(rows(), temperature, allowance, seed=settings.seed)),
        "generations": (nothing, lambda allowance: check_generations(subject, allowance)),
        "endings": (nothing, lambda allowance: check_endings(subject, allowance)),
    }
    done = 0.0
    for part, (prepare, run) in parts.items():
        progress(part, done)
        yield _finding(subject, part, prepare, run)
        done += _SHARES[part]


def _finding(
    subject: Subject, part: Part, prepare: Callable[[], object], run: Callable[[Allowance], Finding]
) -> Finding:
    started = perf_counter()
    try:
        subject.clear()
        prepare()
        finding = run(Allowance(_SHARES[part] * subject.settings.budget_s))
    except Exception as error:  # a broken build may fail in any way, and that is a finding too
        problem = f"it ended in an error: {type(error).__name__}: {error}"
        finding = Finding(part=part, passed=False, summary="not finished", false_alarm=0.0, problems=(problem,))
    if faults := subject.take_faults():
        finding = replace(finding, passed=False, problems=(*finding.problems, *faults))
    return replace(finding, elapsed_s=perf_counter() - started)
