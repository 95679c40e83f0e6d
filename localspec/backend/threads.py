"""How many threads a memory-bound pass can use."""

from __future__ import annotations

import os

import psutil

from localspec.errors import InvalidOptionError

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Return the number of physical cores this process may use, at least 1.

    Two threads on one physical core share its bandwidth and slow a decoding pass down, so hyper-threads are not
    counted; affinity masks and a container's CPU quota are respected. Where others keep the cores busy, fewer
    threads are faster, since each pass waits for its slowest: the environment variable LOCALSPEC_THREADS sets them.

    Raises:
        InvalidOptionError: LOCALSPEC_THREADS is not a whole number from 1.
    """
    if chosen := os.environ.get("LOCALSPEC_THREADS"):
        if not chosen.isdecimal() or int(chosen) < 1:
            raise InvalidOptionError(f"LOCALSPEC_THREADS is {chosen!r}; use a whole number from 1, or unset it")
        return int(chosen)
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    logical = psutil.cpu_count() or physical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = _quota()
    share = max(1, round(physical * allowed / logical))
    return max(1, min(share, quota or share))


def _quota() -> int | None:
    """Return the whole CPUs a Linux control group grants, if it limits them."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            granted, period = file.read().split()
        return None if granted == "max" else max(1, int(granted) // int(period))
    except (OSError, ValueError):
        return None
