"""What the user sees: answers on stdout, everything about them on stderr, colours on terminals only."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

from localspec.session import TokenEvent

__all__ = ["Screen", "hidden_keys"]

_PATIENCE_S = 1.0  # a shorter wait needs no explanation
# A model may write anything; an escape sequence in it must not move the cursor or retitle the window.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_DRAFTED, _DIM, _OFF = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes answers and notes.

    Args:
        quiet: leave out notes and the status of answers.
        show_draft: colour what the draft proposed, if stdout is a terminal.
    """

    def __init__(self, *, quiet: bool = False, show_draft: bool = False) -> None:
        self.quiet = quiet
        self.show_draft = show_draft
        self._terminal = _is_terminal(sys.stdout)
        self._notes_terminal = _is_terminal(sys.stderr)
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._colours = self._terminal and not plain
        self._notes_colours = self._notes_terminal and not plain
        self._line_open = False
        self._waiting = ""

    def event(self, event: TokenEvent) -> None:
        """Write what one token adds to the answer."""
        self.stop_waiting()
        text = event.text
        if not text:
            return
        self._line_open = not text.endswith("\n")
        if self._terminal:
            text = text.translate(_VISIBLE)
        if event.drafted and self.show_draft and self._colours:
            text = f"{_DRAFTED}{text}{_OFF}"
        _write(sys.stdout, text)

    def end_answer(self) -> None:
        """Finish the answer's last line."""
        self.stop_waiting()
        if self._line_open:
            _write(sys.stdout, "\n")
        self._line_open = False

    def waiting(self, what: str) -> Callable[[int, int], None]:
        """Return a function that says on a terminal how far something is, once it takes longer than a moment."""
        started = time.monotonic()

        def advance(done: int, total: int) -> None:
            if done == total:
                self.stop_waiting()
            elif self._notes_terminal and not self.quiet and time.monotonic() - started > _PATIENCE_S:
                self._replace(f"{' ' if self._line_open else ''}({what}: {done} of {total} tokens)")

        return advance

    def stop_waiting(self) -> None:
        """Take the progress note away."""
        if self._waiting:
            self._replace("")

    def _replace(self, text: str) -> None:
        # Backspaces, because the first words of the answer may stand on the same line.
        back = "\b" * len(self._waiting)
        _remark(f"{back}{' ' * len(self._waiting)}{back}{text}")
        self._waiting = text

    def result(self, text: str) -> None:
        """Write what a command was asked for."""
        _write(sys.stdout, (text.translate(_VISIBLE) if self._terminal else text) + "\n")

    def note(self, text: str) -> None:
        """Say something in passing."""
        if not self.quiet and text:
            _remark(f"{_DIM}{text}{_OFF}\n" if self._notes_colours else f"{text}\n")

    def error(self, error: object) -> None:
        """Say in one line what cannot be done; the conversation goes on."""
        _remark(f"localspec: {' '.join(str(error).split())}\n")


@contextmanager
def hidden_keys() -> Iterator[None]:
    """Keep the terminal from echoing what is typed while a block runs; nothing is done where that is unknown."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    silent = [*before]
    silent[3] &= ~termios.ECHO

    def hide(*_signal: object) -> None:
        if os.tcgetpgrp(file) == os.getpgrp():  # a background process that touches the terminal is stopped
            termios.tcsetattr(file, termios.TCSANOW, silent)

    hide()
    previous = signal.signal(
        signal.SIGCONT, hide
    )  # the shell, to which Ctrl-Z leads, has set the terminal its own way
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, previous)
        termios.tcsetattr(file, termios.TCSANOW, before)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def _remark(text: str) -> None:
    """Write to stderr; an answer is not lost because nobody can hear a remark about it."""
    with suppress(OSError):
        _write(sys.stderr, text)


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is not None:
        click.echo(text, file=stream, nl=False, color=True)
        stream.flush()
