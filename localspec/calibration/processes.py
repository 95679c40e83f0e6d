"""A process for each backend, of which one can load one only."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from localspec.backend.interrupts import deferred_interrupts
from localspec.calibration.search import Message, Progress, SearchJob, measure
from localspec.errors import BackendError, LocalspecError

__all__ = ["run"]


class _Event(Protocol):
    def is_set(self) -> bool: ...

    def set(self) -> None: ...


def run(job: SearchJob, take: Callable[[Message], None]) -> bool:
    """Let a process of its own do a job, and hand over what it finds; returns whether it was interrupted.

    A first interrupt ends the measurement and loses nothing that is complete, a second one ends the process.

    Raises:
        KeyboardInterrupt: the second.
        LocalspecError: what ended the process.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    stop = context.Event()
    heeds = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    process = context.Process(target=_serve, args=(job, sending, stop, heeds), daemon=True)
    with _ignored_interrupts():  # until it can take them: the child inherits it
        process.start()
    sending.close()
    try:
        interrupted = _drain(receiving, take, stop)
        try:
            with deferred_interrupts():
                process.join()
        except KeyboardInterrupt:  # too late to stop anything
            interrupted = True
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        receiving.close()
    if process.exitcode:
        raise BackendError(
            f"measuring with {job.backend} ended with code {process.exitcode}; leave it out of --backends"
        )
    return interrupted


@dataclass(frozen=True, slots=True)
class _Stopped:
    """An interrupt ended the measurement."""


_Sent = Message | _Stopped | LocalspecError


def _drain(connection: Connection, take: Callable[[Message], None], stop: _Event) -> bool:
    interrupted = False
    while True:
        try:
            message = _receive(connection)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stop.set()
            continue
        if message is None:
            return interrupted
        if isinstance(message, _Stopped):
            interrupted = True
            continue
        if isinstance(message, LocalspecError):
            raise message
        take(message)


def _receive(connection: Connection) -> _Sent | None:
    """Wait for a message; None when there will be no more. An interrupt does not cut one in two."""
    while not connection.poll(0.5):
        pass
    message: _Sent | None = None
    with deferred_interrupts(), suppress(EOFError):
        message = connection.recv()
    return message


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore SIGINT in a block, where this is the thread that would get it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _serve(job: SearchJob, connection: Connection, stop: _Event, heeds_interrupts: bool = True) -> None:
    """Do a job and send what it yields; runs in a process of its own."""

    def send(message: _Sent) -> None:
        with deferred_interrupts(), suppress(BrokenPipeError):
            connection.send(message)

    def report(phase: str, share: float) -> None:
        if stop.is_set():  # an interrupt that only the parent got
            raise KeyboardInterrupt
        send(Progress(phase, min(1.0, share)))

    try:
        if heeds_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for message in measure(job, report):
            send(message)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        send(_Stopped())
    except LocalspecError as error:
        send(error)
    finally:
        connection.close()
