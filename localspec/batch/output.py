"""Where answers go: a file that survives whatever ends the run, or a stream.

The output file is its own journal. Each line is written behind the others and synced to disk before it counts, so
that a run can end at any moment: what is missing is found by line numbers, and a last line cut short is cut off.
Beside it stands ``NAME.state``, which says of what run it is. Lines come in the order in which answers finish; when
the last one is there, the file is replaced by one in the order of the prompts.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from filelock import FileLock, Timeout

from localspec.batch.identity import RunIdentity
from localspec.errors import InvalidOptionError, StoreError
from localspec.registry.partial import DISK_FULL
from localspec.sampling import fresh_seed

__all__ = ["FileOutput", "Output", "StreamOutput", "files_beside"]

_CONTEXT: Final = "context"


class Output(Protocol):
    """Takes one line for each row of the prompt file."""

    @property
    def done(self) -> Collection[int]:
        """Line numbers of the rows that need nothing more."""

    @property
    def num_errors(self) -> int:
        """How many of them are errors."""

    def begin(self, run: RunIdentity) -> int:
        """Get ready for a run; returns its seed."""

    def append(self, row: int, data: bytes, *, is_error: bool) -> None:
        """Take the line of a row; when this returns it is as safe as it will be."""

    def finish(self) -> None:
        """Every row has its line."""


class StreamOutput:
    """A pipe or terminal: what is written is gone, and no run can go on from it.

    In the order of the prompts, lines that are ahead wait in a temporary file. If a run ends early, they come last.
    """

    def __init__(self, file: BinaryIO, *, ordered: bool) -> None:
        self._file = file
        self._ordered = ordered
        self._next = 1
        self._ahead = tempfile.TemporaryFile()  # noqa: SIM115 — for as long as this object lives
        self._places: dict[int, tuple[int, int]] = {}  # by row: offset and length in the temporary file
        self.done: Collection[int] = ()
        self.num_errors = 0

    def __enter__(self) -> StreamOutput:
        return self

    def __exit__(self, _kind: type[BaseException] | None, exception: BaseException | None, *_: object) -> None:
        try:
            if not isinstance(exception, OSError | StoreError):  # of which the stream may be the reason
                for row in sorted(self._places):
                    self._release(row)
        finally:
            self._ahead.close()

    def begin(self, run: RunIdentity) -> int:
        """Return the run's seed, or a fresh one."""
        return fresh_seed() if run.seed is None else run.seed

    def append(self, row: int, data: bytes, *, is_error: bool) -> None:
        """Write the line, or keep it until its turn comes."""
        self.num_errors += is_error
        if not self._ordered:
            self._write(data)
        elif row != self._next:
            with _disk_errors(Path(tempfile.gettempdir()) / "answers", resumable=False):
                offset = self._ahead.seek(0, os.SEEK_END)
                self._ahead.write(data)
                self._ahead.flush()
            self._places[row] = offset, len(data)
        else:
            self._write(data)
            self._next += 1
            while self._next in self._places:
                self._release(self._next)
                self._next += 1
            if not self._places:
                self._ahead.truncate(0)

    def finish(self) -> None:
        """Nothing is left to do."""

    def _release(self, row: int) -> None:
        offset, length = self._places.pop(row)
        self._ahead.seek(offset)
        self._write(self._ahead.read(length))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()


class FileOutput:
    """A file that a run can go on with; made by ``opened``."""

    def __init__(self, path: Path, *, ordered: bool, restart: bool, retry_errors: bool) -> None:
        self._path = path
        self._ordered = ordered
        self._restart = restart
        self._retry_errors = retry_errors
        self._file: FileIO | None = None
        self._resumable = True  # but for prompts that came through a pipe
        self._rows = array("q")  # the row of each line in the file, and where the line begins
        self._starts = array("q")
        self._length = 0
        self._errors: set[int] = set()
        self.done: set[int] = set()

    @classmethod
    @contextmanager
    def opened(
        cls, path: Path, *, ordered: bool = True, restart: bool = False, retry_errors: bool = False
    ) -> Iterator[FileOutput]:
        """Keep other runs away from ``path`` while the block runs.

        Args:
            path: the output file.
            ordered: leave it in the order of the prompts.
            restart: forget what it holds.
            retry_errors: do the rows again that ended in an error.

        Raises:
            StoreError: another run is at work on it, or it cannot be written.
        """
        path = path.resolve()  # of a symbolic link, what it points to is to be replaced
        if path.is_dir() or not path.parent.is_dir():
            raise StoreError(f"{path} cannot be written: it must be a file in a directory that exists")
        lock = FileLock(path.with_name(path.name + ".lock"))
        with _disk_errors(path):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise StoreError(
                    f"another run is writing {path}; wait for it, or give this one another output file"
                ) from None
        output = cls(path, ordered=ordered, restart=restart, retry_errors=retry_errors)
        try:
            yield output
        finally:
            output._close()
            lock.release()

    @property
    def num_errors(self) -> int:
        """How many rows ended in an error."""
        return len(self._errors)

    @property
    def state_path(self) -> Path:
        """The file that tells of what run this is."""
        return _state_of(self._path)

    def begin(self, run: RunIdentity) -> int:
        """Go on with what the file holds, if that is of the same run; returns the run's seed.

        Raises:
            InvalidOptionError: it is not, or the file is something else; nothing is changed then.
            StoreError: the file cannot be read or written.
        """
        with _disk_errors(self._path):
            for unfinished in (_beside(self._path), _beside(self.state_path)):
                unfinished.unlink(missing_ok=True)
            self._resumable = run.prompts is not None
            exists = not self._restart and self._path.exists() and self._path.stat().st_size > 0
            earlier = self._earlier_run() if exists else None
            if earlier is not None:
                self._check_same(run, earlier)
            started = run if earlier is None else replace(run, seed=earlier.seed)
            if started.seed is None:
                started = replace(started, seed=fresh_seed())
            assert started.seed is not None
            if earlier is None and self._path.exists():
                os.truncate(self._path, 0)  # else its lines would pass for those of the new run
            if earlier != started:
                self._replace(self.state_path, [started.to_json().encode()])
            self._open()
            self._scan()
        if self._retry_errors and self._errors:
            self._rewrite([i for i, row in enumerate(self._rows) if row not in self._errors])
            self._errors.clear()
        return started.seed

    def append(self, row: int, data: bytes, *, is_error: bool) -> None:
        """Write the line and sync it to disk.

        Raises:
            StoreError: that was not possible; the file is as before.
        """
        assert self._file is not None
        try:
            with _disk_errors(self._path, resumable=self._resumable):
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
        except StoreError:
            with suppress(OSError):
                self._file.truncate(self._length)
            raise
        self._note(row, len(data), is_error=is_error)

    def finish(self) -> None:
        """Bring the lines into the order of the prompts, if that is wanted."""
        if self._ordered and any(a > b for a, b in zip(self._rows, self._rows[1:], strict=False)):
            self._rewrite(sorted(range(len(self._rows)), key=self._rows.__getitem__))

    def _note(self, row: int, length: int, *, is_error: bool) -> None:
        self._rows.append(row)
        self._starts.append(self._length)
        self._length += length
        self.done.add(row)
        if is_error:
            self._errors.add(row)

    # The run it belongs to

    def _earlier_run(self) -> RunIdentity:
        try:
            return RunIdentity.from_json(self.state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidOptionError(
                f"{self._path} exists, and no {self.state_path.name} beside it says that a batch wrote it;"
                " choose another output file, or overwrite it with --restart"
            ) from None
        except ValueError as error:
            raise InvalidOptionError(
                f"{self.state_path} cannot be understood ({error}); begin again with --restart"
            ) from None

    def _check_same(self, run: RunIdentity, earlier: RunIdentity) -> None:
        then, now = (side.settings.get(_CONTEXT) for side in (earlier, run))
        # A larger one is what a prompt that did not fit asks for, and changes no prompt that did.
        larger = isinstance(then, int) and isinstance(now, int) and now > then
        but = frozenset({_CONTEXT} if self._retry_errors and larger else ())
        if found := run.differences(earlier, but=but):
            raise InvalidOptionError(
                f"{self._path} belongs to a run that differs: {'; '.join(found)}; repeat what it was begun with,"
                " choose another output file, or begin again with --restart"
            )

    # The file

    def _open(self) -> None:
        new = not self._path.exists()
        self._file = self._path.open("w+b" if new else "r+b", buffering=0)
        if new:
            _sync_directory(self._path)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _scan(self) -> None:
        """Find out which rows have their line, and cut off a last line that is not whole."""
        assert self._file is not None
        damage = None
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, data in enumerate(lines, 1):
                if damage is not None:
                    raise InvalidOptionError(
                        f"line {damage} of {self._path} is none that this program wrote, or is there twice;"
                        " restore the file, or begin again with --restart"
                    )
                found = _read_back(data)
                if found is None or found[0] in self.done:
                    damage = number  # which is to be expected of the last line, and of no other
                else:
                    self._note(found[0], len(data), is_error=found[1])
        self._file.truncate(self._length)
        self._file.seek(self._length)

    def _rewrite(self, order: Sequence[int]) -> None:
        """Replace the file by one with these of its lines, in this order."""
        assert self._file is not None
        ends = [*self._starts[1:], self._length]
        with _disk_errors(self._path, resumable=self._resumable):
            self._replace(self._path, (self._read(self._starts[i], ends[i]) for i in order))
            self._open()
            rows, lengths = ([values[i] for i in order] for values in (self._rows, _lengths(self._starts, ends)))
            self._rows, self._starts, self._length, self.done = array("q"), array("q"), 0, set()
            for row, length in zip(rows, lengths, strict=True):
                self._note(row, length, is_error=False)
            self._file.seek(self._length)

    def _read(self, start: int, end: int) -> bytes:
        assert self._file is not None
        self._file.seek(start)
        return self._file.read(end - start)

    def _replace(self, path: Path, parts: Collection[bytes] | Iterator[bytes]) -> None:
        """Write a file in such a way that after a failure of any kind the old one or the new one is there."""
        temporary = _beside(path)
        try:
            with temporary.open("wb") as new:
                for part in parts:
                    new.write(part)
                new.flush()
                os.fsync(new.fileno())
            if path.exists():
                shutil.copymode(path, temporary)
            self._close()  # an open file cannot be replaced on Windows
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path)


def _sync_directory(path: Path) -> None:
    """Make sure that the name of a new file is on disk as well."""
    if os.name != "nt":  # where a directory cannot be opened
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def files_beside(path: Path) -> list[Path]:
    """Return what stands beside an output file, at the end or for a while."""
    state = _state_of(path)
    return [path.with_name(path.name + ".lock"), state, _beside(path), _beside(state)]


def _state_of(path: Path) -> Path:
    return path.with_name(path.name + ".state")


def _beside(path: Path) -> Path:
    """Return where a file is written that is to replace ``path``."""
    return path.with_name(path.name + ".unfinished")


def _lengths(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _read_back(data: bytes) -> tuple[int, bool] | None:
    """Return the row of a line and whether it is an error; None if it is no line of ours, or not whole."""
    if not data.endswith(b"\n"):
        return None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    row = values.get("line") if isinstance(values, dict) else None
    if isinstance(row, bool) or not isinstance(row, int):
        return None
    return row, values.get("error") is not None


@contextmanager
def _disk_errors(path: Path, *, resumable: bool = True) -> Iterator[None]:
    """Turn what the operating system says about ``path`` into one StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            again = "run the same command again: it goes on where it stopped" if resumable else "begin again"
            raise StoreError(f"the disk is full at {path.parent}; free some space and {again}") from error
        stays = "what is in it stays" + (", and the same command goes on with it" if resumable else "")
        raise StoreError(f"{path} cannot be written: {error.strerror or error}; {stays}") from error
