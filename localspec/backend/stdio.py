"""Keep what native code prints off standard output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["native_prints_on_stderr"]


@contextmanager
def native_prints_on_stderr() -> Iterator[None]:
    """Send to stderr what native code prints: ggml warns with ``printf``, past its log callback.

    It is the process's descriptor that moves, so what another thread prints meanwhile goes to stderr as well. Where
    there is no standard output, nothing is done.
    """
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        _flush()
        with suppress(OSError):  # without a stderr it stays where it is
            os.dup2(2, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Write out what C's library holds back, while the descriptor is the right one."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase") if sys.platform == "win32" else ctypes.CDLL(None)
        library.fflush(None)
