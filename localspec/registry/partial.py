"""A file that is not whole yet: its bytes so far, where they came from, and what may go wrong on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from localspec.errors import StoreError
from localspec.registry.progress import human_bytes

__all__ = ["DISK_FULL", "FULL_REMEDY", "PartialFile", "Writer", "check_space", "store_errors", "write_atomically"]

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)
"""Error numbers of a full disk or a spent quota."""

FULL_REMEDY: Final = (
    "free some space, or set LOCALSPEC_CACHE_DIR to a directory on another disk, and run the command again: "
    "it goes on where it stopped"
)
_MARGIN_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class _Mark:
    """``origin`` identifies the very content; ``parts`` whole parts of it end at byte ``bytes``."""

    origin: str
    parts: int
    bytes: int


class PartialFile:
    """The bytes of a file fetched so far, which survive the process.

    Bytes are only ever continued from the same origin; from any other, the file starts anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark_path = path.with_name(path.name + ".json")

    @property
    def bytes(self) -> int:
        """Bytes on disk, those after the last mark included."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def has(self, origin: str) -> bool:
        """Whether the bytes on disk came from ``origin``."""
        mark = self._read_mark()
        return mark is not None and mark.origin == origin

    def begin(self, origin: str) -> tuple[int, int]:
        """Continue or start anew; return the whole parts on disk and the byte they end at."""
        mark = self._read_mark()
        if mark is None or mark.origin != origin or self.bytes < mark.bytes:
            self.discard()
            mark = _Mark(origin, 0, 0)
            write_atomically(self._mark_path, json.dumps(asdict(mark)))
        return mark.parts, mark.bytes

    def mark(self, origin: str, *, parts: int, bytes: int) -> None:
        """Remember that ``parts`` whole parts end at byte ``bytes``."""
        write_atomically(self._mark_path, json.dumps(asdict(_Mark(origin, parts, bytes))))

    @contextmanager
    def opened_at(self, length: int) -> Iterator[Writer]:
        """The file, cut to ``length`` bytes and ready to take what follows them."""
        with store_errors(self.path):
            file = self.path.open("r+b" if self.path.exists() else "w+b", buffering=0)
        with file:
            writer = Writer(file, self.path)
            writer.restart(length)
            yield writer

    def discard(self) -> None:
        """Forget every byte."""
        with store_errors(self.path):
            self.path.unlink(missing_ok=True)
            self._mark_path.unlink(missing_ok=True)

    def move_to(self, destination: Path) -> None:
        """Give the file, now whole, its name in one step."""
        with store_errors(destination):
            os.replace(self.path, destination)
            self._mark_path.unlink(missing_ok=True)

    def _read_mark(self) -> _Mark | None:
        try:
            values = json.loads(self._mark_path.read_text(encoding="utf-8"))
            return _Mark(str(values["origin"]), int(values["parts"]), int(values["bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Writer:
    """Appends to a partial file; unbuffered, so that what it counts is what the disk has taken."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.length = 0

    def restart(self, length: int) -> None:
        """Cut the file to ``length`` bytes and go on from there."""
        with store_errors(self._path):
            self._file.truncate(length)
            self._file.seek(length)
        self.length = length

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        rest = memoryview(data)
        with store_errors(self._path):
            while rest:
                written = self._file.write(rest)
                self.length += written
                rest = rest[written:]


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about ``path`` into one :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise StoreError(f"the disk is full at {path.parent}; {FULL_REMEDY}") from error
        raise StoreError(
            f"{path} cannot be used: {error.strerror or error}; make it accessible or set "
            "LOCALSPEC_CACHE_DIR to another"
        ) from error


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise :class:`StoreError` if ``needed_bytes`` more do not fit on the disk of ``directory``."""
    with store_errors(directory / "file"):
        free = shutil.disk_usage(directory).free
    if free < needed_bytes + _MARGIN_BYTES:
        raise StoreError(
            f"not enough space at {directory}: {human_bytes(needed_bytes)} needed, {human_bytes(free)} free; "
            f"{FULL_REMEDY}"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old one or the new one, never a piece."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with store_errors(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
