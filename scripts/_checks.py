"""The checks behind scripts/test.py, in the order in which they run: the quick ones first, pytest last."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _environment as environment

# What tests/conftest.py needs, by name in models.toml; it makes the others from these.
TEST_MODELS = ("smollm2-135m-q4_1", "qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_k_m")

# Generated documents: each script, given --check, leaves with 1 and names the file when the committed text is
# not what it would write. A new generator is one line here.
FRESHNESS: tuple[tuple[str, ...], ...] = (("scripts/record_chat.py",), ("scripts/render_docs.py",))

_MOST_WORKERS = 4  # each holds models of its own: up to 2 GB
_PYTEST_NOTHING_COLLECTED = 5
_PYTEST_CLOSING = re.compile(r"^=+ .*\bin [\d.]+s.* =+$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(slots=True)
class Report:
    """What has run so far."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)
    closing_lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], int]) -> int:
        """Announce and run one check; returns its exit code."""
        environment.say(f"Check: {name}")
        started = time.monotonic()
        code = check()
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.rows.append((name, "ok" if code == 0 else f"FAILED, {reason}", time.monotonic() - started))
        if code != 0:
            self.failed.append(name)
        return code

    def print(self) -> None:
        """The verdict on everything; pytest's own lines come last, for what reads them."""
        environment.say("Summary")
        for name, verdict, elapsed_s in self.rows:
            environment.note(f"{name:<24} {elapsed_s:7.1f} s  {verdict}")
        print("All checks passed" if not self.failed else f"Failed: {', '.join(self.failed)}", flush=True)
        for line in self.closing_lines:
            print(line, flush=True)


def main() -> int:
    """Parse the options, set up, check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/test.py", description="Run every check.")
    parser.add_argument("--fast", action="store_true", help="leave out the tests that need model files")
    parser.add_argument("-k", metavar="EXPR", help="run only the tests that match, and no other check")
    options = parser.parse_args()
    python = environment.prepare("dev")
    report = Report()
    if options.k is None:
        _static_checks(python, report)
    _tests(python, report, options)
    report.print()
    return 1 if report.failed else 0


def _static_checks(python: Path, report: Report) -> None:
    tool = python.parent
    checks: list[tuple[str, Sequence[str | Path]]] = [
        ("installed versions agree", [python, "-m", "pip", "--disable-pip-version-check", "check"]),
        ("ruff", [python, "-m", "ruff", "check", "."]),
        ("mypy", [python, "-m", "mypy"]),
        ("layers", [tool / "lint-imports"]),
        ("documentation", [python, "-m", "mkdocs", "build", "--strict"]),
    ]
    checks += [(" ".join(script), [python, *script, "--check"]) for script in FRESHNESS]
    for name, command in checks:
        report.run(name, lambda command=command: environment.run(command))  # type: ignore[misc]


def _tests(python: Path, report: Report, options: argparse.Namespace) -> None:
    selections = [("tests without models", "not model")]
    if not options.fast:
        selections.append(("tests on real models", "model"))
        pull: list[str | Path] = [python, "-m", "localspec", "models", "pull", *TEST_MODELS]
        report.run("test models", lambda: environment.run(pull))
        # A test without its model has to fail here: skipping would pass for success.
        os.environ["LOCALSPEC_REQUIRE_MODELS"] = "1"
    wanted = [] if options.k is None else ["-k", options.k]
    empty = 0
    for name, marker in selections:
        command = [python, "-m", "pytest", "-m", marker, *_workers(), *wanted]
        if sys.stdout.isatty():
            command.append("--color=yes")

        def check(command: Sequence[str | Path] = command) -> int:
            nonlocal empty
            code, closing = _watched(command)
            report.closing_lines += closing
            if code == _PYTEST_NOTHING_COLLECTED and wanted:
                empty += 1
                return code if empty == len(selections) else 0
            return code

        report.run(name, check)


def _workers() -> list[str]:
    """Return pytest's options for tests side by side, a module's mostly in one worker: its models are loaded once.

    With several at work a pass must not be spread over threads: they would wait for each other at every operation.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1:
        return []
    os.environ.setdefault("LOCALSPEC_THREADS", "1")
    return ["-n", str(min(cores, _MOST_WORKERS)), "--dist", "worksteal"]


def _watched(command: Sequence[str | Path]) -> tuple[int, list[str]]:
    """Run pytest, passing its output on as it comes; returns its exit code and its closing line, if any."""
    child = environment.spawn(command, environment.PIPE)
    assert child.stdout is not None
    kept = b""
    try:
        while chunk := os.read(child.stdout.fileno(), 65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            kept = (kept + chunk)[-4096:]
        code = child.wait()
    except BaseException:
        environment.stop(child)
        raise
    lines = _COLOUR.sub("", kept.decode(errors="replace")).splitlines()
    return code, [line for line in lines if _PYTEST_CLOSING.match(line)][-1:]
