"""Giving back pages of a mapped model file that only loading needed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil

__all__ = ["MappingTrimmer"]

_DONT_NEED = 4  # MADV_DONTNEED


class MappingTrimmer:
    """Keeps the memory of a load near the size of the file.

    llama.cpp maps the file and copies most tensors into a layout its kernels prefer; the mapped originals stay
    resident, so that a quantised model takes nearly twice its size. Whenever more than the file is resident,
    the mapping is dropped; what is still read from it comes back from the page cache. Only on Linux, where the
    system tells where files are mapped; elsewhere nothing is done.

    Args:
        path: the file being loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path.resolve())
        self._process = psutil.Process()
        self._allowed = self._resident() + path.stat().st_size
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def trim(self) -> None:
        """Drop the mapping's pages if memory has grown past the file's size."""
        if self._libc is None or self._resident() <= self._allowed:
            return
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                if line.rstrip("\n").endswith(self._path):
                    start, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
                    self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
