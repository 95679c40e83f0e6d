"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from localspec.registry import human_bytes, progress
from localspec.registry.progress import StderrReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_there_are_lines_without_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    reporter = StderrReporter()
    reporter.notice("here it comes")
    with reporter.bar("model", 4000) as advance:
        advance(1000)
        advance(4000)
    with reporter.bar("other", None) as advance:
        advance(12_345_678)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "here it comes",
        "model: 1 kB of 4 kB",
        "model: 4 kB of 4 kB",
        "other: 12.3 MB",
    ]


def test_lines_come_only_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with StderrReporter().bar("model", 10) as advance:
        for done in range(10):
            advance(done)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = StderrReporter()
    with reporter.bar("model", 4000) as advance:
        advance(3000)
        reporter.notice("something happened")
        advance(1000)  # a server that starts again
        advance(4000)
    shown = terminal.getvalue()
    assert "model" in shown
    assert "something happened\n" in shown
    assert shown.endswith("\r")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (1_234_567_890_123_456, "1.23e+03 TB"),
    ],
)
def test_human_bytes(count: int, words: str) -> None:
    assert human_bytes(count) == words
