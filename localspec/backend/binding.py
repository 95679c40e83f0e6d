"""What one native library of llama.cpp's family offers, and that a process can hold only one of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from localspec.backend.context import FlashAttention
from localspec.errors import BackendError

__all__ = [
    "Binding",
    "ContextSettings",
    "claim_process",
    "claimed",
    "forget_log",
    "last_error",
    "on_log",
    "show_native_log",
]


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How a native context is made.

    Attributes:
        capacity: tokens of all sequences together.
        num_sequences: how many sequences.
        max_pass: the most tokens of one pass.
        threads: threads per pass.
        flash_attention: which attention kernel.
    """

    capacity: int
    num_sequences: int
    max_pass: int
    threads: int
    flash_attention: FlashAttention


class Binding(Protocol):
    """A native library, as far as it is needed here. Models, vocabularies and contexts are its own handles.

    Attributes:
        name: of the library, in messages and profiles.
        newer: what may know a kind of model that it does not know.
        batch_type: its ``llama_batch``, a ctypes structure.
        max_pass: the most tokens to evaluate in one pass.
    """

    name: str
    newer: str
    batch_type: Any
    max_pass: int

    def build(self) -> str:
        """Return its version and what it was compiled for, in one line."""

    def load_model(self, path: bytes, goes_on: Callable[[], bool]) -> Any:
        """Return a model, or None; ``goes_on`` is asked now and then, and False ends the loading."""

    def free_model(self, model: Any) -> None:
        """Free a model."""

    def trained_context(self, model: Any) -> int:
        """Return the tokens of context it was trained for."""

    def vocabulary(self, model: Any) -> Any:
        """Return the vocabulary of a model, for the functions below."""

    def num_tokens(self, vocabulary: Any) -> int:
        """Return the number of ids."""

    def bos(self, vocabulary: Any) -> int:
        """Return the beginning-of-sequence id; negative if there is none."""

    def adds_bos(self, vocabulary: Any) -> bool:
        """Whether it belongs in front of every text."""

    def tokenize(self, vocabulary: Any, text: bytes, buffer: Any, room: int, control: bool) -> int:
        """Write the ids of a text without BOS; return their number, negative where there is no room for so many."""

    def piece(self, vocabulary: Any, token: int, buffer: Any, room: int, control: bool) -> int:
        """Write the bytes of a token; return their number, negative where there is no room for so many."""

    def ends_generation(self, vocabulary: Any, token: int) -> bool:
        """Whether a token ends a generation."""

    def attributes(self, vocabulary: Any, token: int) -> int:
        """Return the attributes of a token."""

    def new_context(self, model: Any, settings: ContextSettings) -> Any:
        """Return a context, or None where there is no room for one."""

    def free_context(self, context: Any) -> None:
        """Free a context."""

    def set_threads(self, context: Any, threads: int) -> None:
        """Use so many threads per pass."""

    def length(self, context: Any, sequence: int) -> int:
        """Return how many tokens the cache holds for a sequence."""

    def truncate(self, context: Any, sequence: int, length: int) -> bool:
        """Forget all but the first ``length`` tokens of a sequence; False if that is impossible."""

    def copy(self, context: Any, source: int, sequence: int, length: int) -> bool:
        """Let an empty sequence hold the first ``length`` tokens of ``source``.

        What it holds then, ``length`` tells; nothing, if the answer is False.
        """

    def decode(self, context: Any, batch: Any) -> int:
        """Evaluate a batch; return llama.cpp's code, 0 for success. After a failure the cache is as it was."""

    def logits_address(self, context: Any) -> int | None:
        """Return where the rows of the last pass are, one after the other."""


# One library per process


_claimed: str | None = None


def claimed() -> str | None:
    """Return the name of the library this process has loaded, if any."""
    return _claimed


def claim_process(name: str) -> None:
    """Take the process for the library ``name``, before it is loaded.

    llama.cpp and its forks export the same symbols under the same file names: loaded together, one would call into
    the other.

    Raises:
        BackendError: it was taken for another.
    """
    global _claimed
    if _claimed not in (None, name):
        raise BackendError(
            f"this process runs {_claimed}, and {name} cannot be loaded beside it; use one of them in each process"
        )
    _claimed = name


# The log


_log_lines: deque[str] = deque(maxlen=200)
_log_shown = False


def on_log(level: int, text: bytes, _data: Any) -> None:
    """Take a line of the native log; libraries call it."""
    line = text.decode(errors="replace")
    _log_lines.append(line)
    if _log_shown:
        sys.stderr.write(line)


def show_native_log(shown: bool) -> None:
    """Let the native library's own log through to stderr, or keep it back (the default)."""
    global _log_shown
    _log_shown = shown


def forget_log() -> None:
    """Forget what the library has said so far."""
    _log_lines.clear()


def last_error(name: str) -> str:
    """Return what the library ``name`` complained of since ``forget_log``, without its function names."""
    lines = [line.strip() for line in _log_lines if "error" in line.lower() or "fail" in line.lower()]
    return lines[0].split(": ", 1)[-1] if lines else f"{name} gave no reason"
