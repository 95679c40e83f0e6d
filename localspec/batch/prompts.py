"""The prompt file: lines of JSONL, read one at a time and never held."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from localspec.errors import PromptError
from localspec.reading import check_ends

__all__ = ["MAX_LINE_BYTES", "Line", "PromptFile"]

MAX_LINE_BYTES: Final = 8 << 20
"""More than any context holds; a longer line is skipped without being read into memory."""

_BLOCK_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line, its end and a byte order mark at the start of the file taken off.

    Attributes:
        number: counts from 1, blank lines included.
        data: its bytes; None if there are more than ``MAX_LINE_BYTES``.
    """

    number: int
    data: bytes | None


class PromptFile:
    """A JSONL file, or what comes through a pipe.

    Attributes:
        name: for messages.
        sha256: of the content, in hex; None for a pipe, which can be read only once.
        num_lines: blank ones included; None for a pipe.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        self._hash = hashlib.sha256()
        self._left = sys.maxsize  # bytes to read: what is appended during a run is not part of it
        self.sha256: str | None = None
        self.num_lines: int | None = None
        if file.seekable():
            self._start = file.tell()
            self.sha256, self.num_lines, self._left = self._survey()

    @classmethod
    @contextmanager
    def opened(cls, name: str) -> Iterator[PromptFile]:
        """Open the file ``name``, or standard input for "-".

        Raises:
            PromptError: it cannot be read.
        """
        if name == "-":
            yield cls(sys.stdin.buffer, "standard input")
            return
        try:
            check_ends(Path(name))
            file = open(name, "rb")  # noqa: SIM115 — what the block raises is not about this file
        except OSError as error:
            raise PromptError(f"{name} cannot be read: {error.strerror or error}") from error
        with file:
            yield cls(file, name)

    def is_same_file(self, path: Path) -> bool:
        """Whether writing to ``path`` would overwrite what is read here."""
        try:
            mine = os.fstat(self._file.fileno())
            return stat.S_ISREG(mine.st_mode) and os.path.samestat(mine, path.stat())
        except OSError:
            return False

    def lines(self) -> Iterator[Line]:
        """Read the lines; can be done once.

        Raises:
            PromptError: the file is not what it was when it was opened.
        """
        if self.sha256 is not None:
            self._file.seek(self._start)
        number = 0
        while (data := self._read_line()) != b"":
            number += 1
            if data is not None and number == 1:
                data = data.removeprefix(_BOM)
            yield Line(number, None if data is None else data.removesuffix(b"\n").removesuffix(b"\r"))
        if self.sha256 is not None and self._hash.hexdigest() != self.sha256:
            raise PromptError(
                f"{self.name} changed while it was read, so answers may belong to other prompts;"
                " leave it alone during a run, and begin again with --restart"
            )

    def _read_line(self) -> bytes | None:
        """Return the next line with its end, b"" at the end of the file, None for one that is too long."""
        data = self._take(MAX_LINE_BYTES + 2)
        whole = data.endswith(b"\n") or len(data) < MAX_LINE_BYTES + 2
        if whole and len(data.removesuffix(b"\n").removesuffix(b"\r")) <= MAX_LINE_BYTES:
            return data
        while data and not data.endswith(b"\n"):
            data = self._take(_BLOCK_BYTES)
        return None

    def _take(self, most: int) -> bytes:
        data = self._file.readline(min(most, self._left))
        self._hash.update(data)
        self._left -= len(data)
        return data

    def _survey(self) -> tuple[str, int, int]:
        """Return hash, number of lines and bytes of the whole file."""
        digest = hashlib.sha256()
        num_lines, num_bytes, last = 0, 0, b"\n"
        while block := self._file.read(_BLOCK_BYTES):
            digest.update(block)
            num_lines += block.count(b"\n")
            num_bytes += len(block)
            last = block[-1:]
        return digest.hexdigest(), num_lines + (last != b"\n"), num_bytes
