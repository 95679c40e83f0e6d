"""Files that a user names and that are read whole."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Final

__all__ = ["MAX_FILE_BYTES", "check_ends", "read_whole"]

MAX_FILE_BYTES: Final = 64 << 20
"""Far more than any template, conversation or list of prompts has; a slip of the keyboard should not fill memory."""


def read_whole(path: Path) -> bytes:
    """Return the content of a file or a pipe.

    Raises:
        OSError: it cannot be read, is a device, or has more than ``MAX_FILE_BYTES``; ``strerror`` says so.
    """
    check_ends(path)
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES >> 20} MiB", str(path))
    return data


def check_ends(path: Path) -> None:
    """Raise OSError for a device, such as /dev/zero, of which no end can be expected."""
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a device, and not a file", str(path))
