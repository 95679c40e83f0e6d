"""Saying on stderr how far a download is: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

__all__ = ["Reporter", "SilentReporter", "StderrReporter", "human_bytes"]

_LINE_EVERY_S: Final = 10.0

Advance = Callable[[int], None]
"""Told the bytes done so far."""


class Reporter(Protocol):
    """Where notices and progress go."""

    def notice(self, text: str) -> None:
        """Say one line."""

    def bar(self, label: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        """Show progress while the context is open."""


class SilentReporter:
    """Says nothing."""

    def notice(self, text: str) -> None:
        """Say nothing."""

    @contextmanager
    def bar(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        """Show nothing."""
        yield lambda done: None


class StderrReporter:
    """Speaks on stderr, looked up at each use so that redirection works."""

    def notice(self, text: str) -> None:
        """Print one line, above a bar if there is one."""
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    @contextmanager
    def bar(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        """A bar that vanishes when done, or plain lines where stderr is not a terminal."""
        if not sys.stderr.isatty():
            yield _Lines(self, label, total_bytes)
            return
        from tqdm import tqdm

        with tqdm(
            desc=label, total=total_bytes, unit="B", unit_scale=True, leave=False, file=sys.stderr
        ) as bar:
            # Only the rate of this run is worth showing, so bytes from an earlier one count as a start.
            first = True

            def advance(done: int) -> None:
                nonlocal first
                if first:
                    first = False
                    bar.initial = bar.n = bar.last_print_n = done
                bar.update(done - bar.n)

            yield advance


class _Lines:
    """A line every few seconds."""

    def __init__(self, reporter: StderrReporter, label: str, total_bytes: int | None) -> None:
        self._reporter = reporter
        self._label = label
        self._total = total_bytes
        self._next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, done: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_EVERY_S
        of = f" of {human_bytes(self._total)}" if self._total else ""
        self._reporter.notice(f"{self._label}: {human_bytes(done)}{of}")


def human_bytes(count: int) -> str:
    """Bytes as people read them, in powers of ten.

    >>> human_bytes(1_117_320_768)
    '1.12 GB'
    >>> human_bytes(999)
    '999 B'
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    return f"{value:.3g} {unit}"
