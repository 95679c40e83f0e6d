"""Where the user's lines come from: an editor in a terminal, plain lines from anywhere else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from localspec.errors import PromptError
from localspec.reading import MAX_FILE_BYTES

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

__all__ = ["LineReader", "open_reader"]

_PROMPT = "> "
_QUOTES = '"""'


class LineReader(Protocol):
    """Reads what the user says."""

    def read(self) -> str | None:
        """Return the next message, possibly of several lines; None when the user leaves.

        Raises:
            PromptError: a line does not end.
        """


def open_reader(interactive: bool) -> LineReader:
    """Return the reader that suits standard input and the terminals around."""
    if not interactive:
        return _Lines()
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    if dumb or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return _Patient(_Lines(prompts=True))
    return _Patient(_Editor())


class _Patient:
    """Another reader, which a first Ctrl-C at an empty prompt does not end."""

    def __init__(self, reader: LineReader) -> None:
        self._reader = reader
        self._warned = False

    def read(self) -> str | None:
        while True:
            try:
                text = self._reader.read()
            except KeyboardInterrupt:
                if self._warned:
                    raise
                self._warned = True
                click.echo("Ctrl-C once more leaves, and so does Ctrl-D; /help lists the commands.", err=True)
                continue
            self._warned = False
            return text


class _Lines:
    """Standard input, a line at a time."""

    def __init__(self, *, prompts: bool = False) -> None:
        self._prompts = prompts

    def read(self) -> str | None:
        if sys.stdin is None:
            return None
        if not self._prompts:
            return self._line()
        click.echo(_PROMPT, nl=False, err=True)
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self._line()
        except KeyboardInterrupt:
            click.echo(err=True)
            raise
        finally:
            signal.signal(signal.SIGINT, previous)

    def _line(self) -> str | None:
        line = sys.stdin.readline(MAX_FILE_BYTES)
        if len(line) == MAX_FILE_BYTES and line[-1] != "\n":  # as from /dev/zero: memory would fill
            raise PromptError(
                f"a line of standard input has more than {MAX_FILE_BYTES >> 20} MiB, more than any context holds"
            )
        return line.rstrip("\r\n") if line else None


class _Editor:
    """prompt_toolkit's line editor: history, pasting, several lines, completion."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            output=create_output(always_prefer_tty=True),  # so that answers can go to a file
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else "  ",
            key_bindings=_keys(),
            history=_history(),
            completer=_completer(),
            complete_while_typing=True,
            reserve_space_for_menu=6,
            enable_suspend=True,
        )

    def read(self) -> str | None:
        try:
            text = self._session.prompt()
        except EOFError:
            return None
        # Bytes that are no UTF-8 are read as from a pipe.
        return _unquoted(text.encode(errors="surrogateescape").decode(errors="replace"))


def _unquoted(text: str) -> str:
    if text.lstrip().startswith(_QUOTES):
        text = text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text


def _is_open(text: str) -> bool:
    """Whether ``text`` begins a quoted block that it does not end."""
    text = text.strip()
    return text.startswith(_QUOTES) and (len(text) < 2 * len(_QUOTES) or not text.endswith(_QUOTES))


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    @keys.add(Keys.SIGINT)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _history() -> History:
    """Return the history on disk, readable by the user alone, or one in memory where that cannot be."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from localspec.locations import config_dir

    class Forgiving(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk is no reason to stop talking
                super().store_string(string)

    path = config_dir() / "chat_history"
    try:
        _make_private(path)
    except OSError:
        return InMemoryHistory()
    return Forgiving(str(path))


def _make_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))


def _completer() -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    from localspec.cli.chat.commands import COMMANDS, arguments_of

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            text = document.text
            if not text.startswith("/") or "\n" in text or not document.is_cursor_at_the_end:
                return
            name, space, rest = text.partition(" ")
            if not space:
                for command in COMMANDS.values():
                    if command.name.startswith(name[1:]):
                        yield Completion(
                            f"/{command.name}", -len(name), display=command.usage, display_meta=command.summary
                        )
            elif name in ("/save", "/load"):
                yield from paths.get_completions(Document(rest), event)
            else:
                for word in arguments_of(name[1:]):
                    if word.startswith(rest):
                        yield Completion(word, -len(rest))

    return Commands()
