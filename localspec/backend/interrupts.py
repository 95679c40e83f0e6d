"""Ctrl-C while native code calls back into Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["deferred_interrupts"]


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold SIGINT back while a block runs; afterwards it takes its usual course.

    Python raises KeyboardInterrupt at the next bytecode it runs; if that belongs to a callback from native code,
    there is nobody to raise it to and the interrupt is lost. Yields a function that tells whether one is waiting,
    for callbacks that can end the native call early.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals only ever arrive in the main thread
        return
    waiting: list[tuple[Any, ...]] = []
    previous = signal.signal(signal.SIGINT, lambda *details: waiting.append(details))
    try:
        yield lambda: bool(waiting)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)
        if waiting and callable(previous):
            previous(*waiting[0])
