"""A context that keeps its own account of what the cache within should hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.backend.native import NativeContext
from localspec.plans import PlannedContext
from localspec.sampling import Law, SamplingParams, make_law

__all__ = ["Evaluated", "Ledger", "Recorder", "read_rows", "row_distance", "sampled"]

Row = NDArray[np.float32]

_KEPT_FAULTS = 3
_SAMPLE = 4096  # logits that are kept of a row


class Ledger:
    """Passes everything on to a context, and notes tokens, rows and contradictions.

    It counts tokens itself, so that a cache which forgot too much or too little is found out at the next call,
    and it knows which tokens stand before every row that was evaluated.

    Args:
        context: does the work.
        name: what to call it in faults.

    Attributes:
        capacity: as the context's, or less: set it to let generations run into the end of the context.
        on_row: called with the tokens before each row, to its own last one, and the row itself, valid until the
            next pass.
        faults: what did not fit, the first few.
        num_passes: how often ``decode`` was called.
    """

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self.vocabulary_size = context.vocabulary_size
        self.kept_ids = context.kept_ids
        self.capacity = context.capacity
        self.num_sequences = context.num_sequences
        self.chunk = context.chunk
        self.on_row: Callable[[Sequence[int], Row], None] | None = None
        self.faults: list[str] = []
        self.num_passes = 0
        self._held: list[list[int]] = [[] for _ in range(context.num_sequences)]

    def length(self, sequence: int) -> int:
        """Return what the context says its cache holds."""
        return self.context.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.context.truncate(sequence, length)
        del self._held[sequence][length:]
        self._compare(sequence, f"after going back to {length} tokens", _counted(self.context, sequence))

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let a sequence hold what another one does."""
        self.context.copy(source, sequence, length)
        self._held[sequence] = self._held[source][:length]
        self._compare(sequence, f"after a copy of {length} tokens")

    def decode(self, batch: Sequence[Span]) -> Row:
        """Append every span's tokens in one pass."""
        rows = self.context.decode(batch)
        self.num_passes += 1
        end = 0
        for span in batch:
            held = self._held[span.sequence]
            own = len(span.tokens) - span.padding
            held += span.tokens[:own]
            if len(held) > self.capacity:  # the context within may have more room than is said
                self._complain(f"the {self.name} was given {len(held)} tokens, and holds {self.capacity}")
            self._compare(span.sequence, f"after a pass over {own} tokens")
            start, end = end, end + span.rows
            if self.on_row is not None:
                for i, row in enumerate(rows[start:end]):
                    self.on_row(held[: len(held) - span.rows + i + 1], row)
        if len(rows) != end:
            self._complain(f"a pass gave {len(rows)} rows of logits where {end} were asked for")
        return rows

    def hold(self, tokens: Sequence[int]) -> None:
        """Make the first sequence hold exactly ``tokens``, evaluating what it lacks of them."""
        pairs = zip(self._held[0], tokens, strict=False)
        self.truncate(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if lacking := tokens[self.length(0) :]:
            self.decode([Span(0, lacking, 0)])

    def clear(self) -> None:
        """Empty all sequences, whatever went wrong before."""
        for sequence in range(self.num_sequences):
            self.context.truncate(sequence, 0)
            self._held[sequence].clear()

    def take_faults(self) -> list[str]:
        """Return the faults since the last call."""
        taken, self.faults = self.faults, []
        return taken

    def _compare(self, sequence: int, when: str, counted: int | None = None) -> None:
        held = self.context.length(sequence) if counted is None else counted
        expected = len(self._held[sequence])
        if held != expected:
            self._complain(f"the {self.name}'s cache holds {held} tokens {when}, and should hold {expected}")

    def _complain(self, fault: str) -> None:
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(fault)


def _counted(context: Context, sequence: int) -> int:
    """Return how many tokens the native cache holds, whatever the layers above it have noted.

    After a truncation only: then there is no padding in it.
    """
    while isinstance(context, PlannedContext):
        context = context.context
    return context.recount(sequence) if isinstance(context, NativeContext) else context.length(sequence)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """A row that was evaluated.

    Attributes:
        prefix: the tokens before it.
        law: what the sampling settings make of it.
        sample: some of its logits.
    """

    prefix: tuple[int, ...]
    law: Law
    sample: Row


class Recorder:
    """Keeps, while it is active, the last row that was evaluated at every length.

    Where drafts were rejected the rows behind them are evaluated again, so what is left in the end belongs to the
    text that came out: ``at`` makes sure of it.

    Args:
        ledger: of the target.
        params: how laws are made.
    """

    def __init__(self, ledger: Ledger, params: SamplingParams) -> None:
        self._ledger = ledger
        self._params = params
        self._rows: dict[int, Evaluated] = {}

    def __enter__(self) -> Recorder:
        self._ledger.on_row = self._keep
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ledger.on_row = None

    def _keep(self, prefix: Sequence[int], row: Row) -> None:
        kept = Evaluated(tuple(prefix), make_law(row, self._params, prefix), sampled(row))
        self._rows[len(prefix)] = kept

    def at(self, history: Sequence[int], length: int) -> Evaluated | None:
        """Return the row that decided ``history[length]``; None if the last one there had other tokens before it."""
        row = self._rows.get(length)
        return row if row is not None and row.prefix == tuple(history[:length]) else None


def read_rows(context: Ledger, tokens: Sequence[int], num_rows: int) -> Row:
    """Evaluate ``tokens`` from an empty cache; return the last ``num_rows`` rows, [num_rows, V], a copy.

    Where the model has a cut vocabulary, V is that of the whole one, and its rows are −inf where it has no logits.
    """
    context.truncate(0, 0)
    if ahead := tokens[: len(tokens) - num_rows]:
        context.decode([Span(0, ahead, 0)])
    rows = context.decode([Span(0, tokens[len(tokens) - num_rows :], num_rows)])
    return context.kept_ids.widened(rows) if context.kept_ids else rows.copy()


def sampled(row: Row) -> Row:
    """Return a copy of some of a row's logits, always the same ones."""
    return row[:: max(1, len(row) // _SAMPLE)].copy()


def row_distance(row: Row, other: Row) -> float:
    """Return the largest difference of two rows of logits, in standard deviations of the first.

    Of two passes over the same tokens it is kernel noise, measured up to 0.27; a row of other tokens differs by 2 and
    more. Tokens that are masked with −inf in both do not count.
    """
    finite = np.isfinite(row) & np.isfinite(other)
    if not np.array_equal(np.isfinite(row), np.isfinite(other)):
        return float("inf")
    spread = float(row[finite].std())
    largest = float(np.abs(row[finite] - other[finite]).max(initial=0.0))
    return largest / spread if spread > 0 else (0.0 if largest == 0 else float("inf"))
