"""Models and contexts on whichever native library is bound."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.backend.binding import Binding, ContextSettings, forget_log, last_error
from localspec.backend.context import FlashAttention, Span
from localspec.backend.cut import CutTable, open_cut
from localspec.backend.interrupts import deferred_interrupts
from localspec.backend.memory import MappingTrimmer
from localspec.backend.stdio import native_prints_on_stderr
from localspec.backend.threads import usable_cores
from localspec.backend.vocabulary import Vocabulary
from localspec.errors import (
    EvaluationError,
    InvalidOptionError,
    OutOfMemoryError,
    RollbackError,
    UnsupportedModelError,
)
from localspec.wording import counted

__all__ = ["Batch", "CutBatch", "NativeContext", "NativeModel", "Vocabulary", "reads_embeddings"]

_MAX_THREADS = 512  # ggml's own limit: thousands take minutes for a token, and beyond 32 bits a number wraps


def _check_threads(threads: int) -> int:
    if not 1 <= threads <= _MAX_THREADS:
        raise InvalidOptionError(
            f"threads is {threads}; use 1 to {_MAX_THREADS}, best as many as there are physical cores"
        )
    return threads


class NativeModel:
    """A loaded GGUF file: weights and vocabulary, no cache.

    Args:
        path: the file; its header should have been read and checked before.
        binding: the library that loads it.

    Attributes:
        vocabulary: the model's; of a cut one, numbered by the ids it kept, so that it says nothing about text.
        table: of a model with a cut vocabulary, the embeddings of all ids; None of any other.

    Raises:
        UnsupportedModelError: the library refused the file.
    """

    def __init__(self, path: Path, binding: Binding) -> None:
        self.table = open_cut(path)
        trimmer = MappingTrimmer(path)
        forget_log()
        with deferred_interrupts() as interrupted:

            def goes_on() -> bool:
                trimmer.trim()
                return not interrupted()

            with native_prints_on_stderr():
                pointer = binding.load_model(os.fsencode(path), goes_on)
        if not pointer:
            raise UnsupportedModelError(
                f"{path} cannot be loaded: {last_error(binding.name)}; {binding.newer} may know this kind of model"
            )
        trimmer.trim(last=True)
        self.path = path
        self.binding = binding
        self._pointer = pointer
        self.close = weakref.finalize(self, binding.free_model, pointer)
        self.vocabulary = Vocabulary(binding, binding.vocabulary(pointer), model=self.close)

    @property
    def pointer(self) -> Any:
        """The native handle."""
        if not self.close.alive:
            raise InvalidOptionError(f"{self.path} was closed; load it again")
        return self._pointer

    @property
    def trained_context(self) -> int:
        """Tokens of context the model was trained for."""
        return self.binding.trained_context(self.pointer)


class NativeContext:
    """A ``Context`` on a native library.

    Args:
        model: the weights; several contexts may share them.
        capacity: the most tokens a sequence can hold.
        num_sequences: how many sequences.
        threads: threads per pass; default the physical cores this process may use.
        flash_attention: which attention kernel.

    Raises:
        InvalidOptionError: an argument is out of range.
        OutOfMemoryError: there is no room for the cache.
    """

    def __init__(
        self,
        model: NativeModel,
        *,
        capacity: int,
        num_sequences: int = 1,
        threads: int | None = None,
        flash_attention: FlashAttention = "off",
    ) -> None:
        for name, value in (("context", capacity), ("sequences", num_sequences)):
            if value < 1:
                raise InvalidOptionError(f"{name} is {value}; use 1 or more")
        self.model = model
        self.capacity = capacity
        self.num_sequences = num_sequences
        self.threads = _check_threads(usable_cores() if threads is None else threads)
        self.vocabulary_size = model.vocabulary.size
        self.kept_ids = model.table.kept if model.table else None
        self._num_ids = self.kept_ids.vocabulary_size if self.kept_ids else self.vocabulary_size
        self.chunk = model.binding.max_pass
        self._binding = model.binding
        settings = ContextSettings(
            # One more for the token that a library may need beside a single embedding; see ``ik``.
            capacity=(capacity + (model.table is not None)) * num_sequences,
            num_sequences=num_sequences,
            max_pass=self.chunk,
            threads=self.threads,
            flash_attention=flash_attention,
        )
        with deferred_interrupts(), native_prints_on_stderr():
            pointer = self._binding.new_context(model.pointer, settings)
        if not pointer:
            raise OutOfMemoryError(
                f"no context of {num_sequences} × {capacity} tokens for {model.path}:"
                f" {last_error(self._binding.name)}; use a smaller --ctx"
            )
        self._pointer = pointer
        self._batch = _batch_for(model, self.chunk)
        self._lengths: dict[int, int] = {}  # of sequences that nothing has touched since they were asked for
        self._views: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.close = weakref.finalize(self, self._binding.free_context, pointer)

    def set_threads(self, threads: int) -> None:
        """Use so many threads from the next pass on.

        Raises:
            InvalidOptionError: the number is below 1.
        """
        self._check_open()
        self.threads = _check_threads(threads)
        self._binding.set_threads(self._pointer, threads)

    def length(self, sequence: int) -> int:
        """Return how many tokens the cache holds for ``sequence``, as the library itself counts them."""
        self._check_open()
        held = self._lengths.get(sequence)
        if held is None:
            held = self._lengths[sequence] = self._binding.length(self._pointer, sequence)
        return held

    def recount(self, sequence: int) -> int:
        """Return the same, asking the library whatever was noted: for those who do not trust the notes."""
        self._lengths.pop(sequence, None)
        return self.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of ``sequence``."""
        held = self.length(sequence)
        if held <= length:
            return
        del self._lengths[sequence]
        if not self._binding.truncate(self._pointer, sequence, length):
            raise RollbackError(
                f"the cache of {self.model.path.name} cannot go back from {held} to {counted(length, 'token')}"
                " (recurrent or hybrid model), so nothing can be drafted for it or by it; use it without a draft"
                " (--no-draft)"
            )

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let ``sequence`` hold the first ``length`` tokens of ``source``; see ``Context.copy``."""
        if source == sequence or self.length(source) < length:
            raise InvalidOptionError(
                f"{counted(length, 'token')} of sequence {source} cannot be copied to sequence {sequence}"
            )
        self.truncate(sequence, 0)
        if length == 0:
            return
        self._lengths.pop(sequence, None)
        copied = self._binding.copy(self._pointer, source, sequence, length)
        if not copied or self.length(sequence) != length:  # a recurrent state knows all of its sequence or nothing
            self.truncate(sequence, 0)
            raise RollbackError(
                f"the cache of {self.model.path.name} cannot share the first {length} tokens of a sequence (recurrent"
                " or hybrid model)"
            )

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        """Append every span's tokens; see ``Context.decode``."""
        starts = [self.length(span.sequence) for span in batch]
        num_tokens = sum(len(span.tokens) for span in batch)
        for span, start in zip(batch, starts, strict=True):
            if start + len(span.tokens) > self.capacity:
                raise EvaluationError(
                    f"{start} + {len(span.tokens)} tokens exceed the context of {self.capacity}; use a larger --ctx"
                )
            if bad := [token for token in span.tokens if not 0 <= token < self._num_ids]:
                raise EvaluationError(f"the token id {bad[0]} is not in 0..{self._num_ids - 1}")
        for span in batch:
            self._lengths.pop(span.sequence, None)
        if num_tokens <= self._batch.room:
            logits = self._evaluate(batch, starts)
        else:
            logits = self._evaluate_by(self._batch.room, batch, starts)
        for span, start in zip(batch, starts, strict=True):
            self._lengths[span.sequence] = start + len(span.tokens)
        return logits

    def _evaluate(self, spans: Sequence[Span], starts: Sequence[int]) -> NDArray[np.float32]:
        num_tokens = sum(len(span.tokens) for span in spans)
        self._batch.fill(spans, starts)
        try:
            return self._run(num_tokens, sum(span.rows for span in spans))
        except OutOfMemoryError:
            # Some libraries want room in one piece, and sequences that were rolled back leave it in holes.
            if num_tokens == 1:
                raise
            return self._evaluate_by((num_tokens + 1) // 2, spans, starts)

    def _evaluate_by(self, room: int, batch: Sequence[Span], starts: Sequence[int]) -> NDArray[np.float32]:
        return np.concatenate([self._evaluate(*part).copy() for part in _passes(room, batch, starts)])

    def _run(self, num_tokens: int, num_rows: int) -> NDArray[np.float32]:
        forget_log()
        code = self._binding.decode(self._pointer, self._batch.native(num_tokens))
        if code != 0:
            raise self._failure(code, num_tokens)
        if num_rows == 0:
            return np.empty((0, self.vocabulary_size), np.float32)
        address = self._binding.logits_address(self._pointer)
        assert address is not None
        view = self._views.get((address, num_rows))
        if view is None:  # the library keeps its buffer until it needs a larger one, so that few are ever made
            row_type = ctypes.c_float * (num_rows * self.vocabulary_size)
            view = np.ctypeslib.as_array(row_type.from_address(address)).reshape(num_rows, -1)
            self._views[address, num_rows] = view
        return view

    def _failure(self, code: int, num_tokens: int) -> EvaluationError:
        name = self._binding.name
        if code == 1:
            return OutOfMemoryError(
                f"the cache of {self.model.path.name} has no room for {counted(num_tokens, 'more token')}; use a"
                " larger --ctx"
            )
        if code == 2:
            return EvaluationError(f"a pass over {counted(num_tokens, 'token')} was aborted; the cache is as it was")
        if code == -1:
            return EvaluationError(
                f"{name} refused a batch of {counted(num_tokens, 'token')}: {last_error(name)}; run with -v for its"
                " log"
            )
        return EvaluationError(f"{name} failed with code {code}: {last_error(name)}; run with -v for its log")

    def _check_open(self) -> None:
        if not (self.close.alive and self.model.close.alive):
            raise InvalidOptionError(f"the context of {self.model.path.name} was closed; load the pair again")


def _passes(room: int, batch: Sequence[Span], starts: Sequence[int]) -> Iterator[tuple[list[Span], list[int]]]:
    """Cut a batch into passes of ``room`` tokens; a span is cut only where it would not fit a pass of its own."""
    spans: list[Span] = []
    begins: list[int] = []
    left = room
    for span, start in zip(batch, starts, strict=True):
        last = len(span.tokens) - span.padding
        at = 0
        while at < len(span.tokens):
            rest = len(span.tokens) - at
            if left == 0 or left < rest <= room:
                yield spans, begins
                spans, begins, left = [], [], room
            tokens = span.tokens[at : at + min(rest, left)]
            end = at + len(tokens)
            padding = min(len(tokens), max(0, end - last))
            rows = min(len(tokens) - padding, max(0, end - padding - (last - span.rows)))
            spans.append(Span(span.sequence, tokens, rows, padding))
            begins.append(start + at)
            at, left = end, left - len(tokens)
    yield spans, begins


class Batch:
    """A native batch whose arrays are allocated once and filled through numpy.

    Args:
        room: the most tokens it holds.
        batch_type: the library's structure.
    """

    def __init__(self, room: int, batch_type: Any) -> None:
        self.room = room
        self._tokens = np.zeros(room, np.int32)
        self._positions = np.zeros(room, np.int32)
        self._num_sequences = np.ones(room, np.int32)
        self._sequences = np.zeros(room, np.int32)
        self._rows = np.zeros(room, np.int8)
        first = self._sequences.ctypes.data
        self._sequence_pointers = first + np.arange(room, dtype=np.uintp) * self._sequences.itemsize
        self._struct = batch_type(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._num_sequences, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._rows, ctypes.c_int8),
        )

    def fill(self, batch: Sequence[Span], starts: Sequence[int]) -> None:
        """Write the spans, each beginning at its position in ``starts``."""
        end = 0
        for span, start in zip(batch, starts, strict=True):
            begin, end = end, end + len(span.tokens)
            self._tokens[begin:end] = span.tokens
            self._positions[begin:end] = np.arange(start, start + len(span.tokens))
            self._sequences[begin:end] = span.sequence
            self._rows[begin:end] = 0
            last = end - span.padding
            self._rows[last - span.rows : last] = 1

    def native(self, num_tokens: int) -> Any:
        """Return the native structure over the first ``num_tokens`` entries."""
        self._struct.n_tokens = num_tokens
        return self._struct


class CutBatch(Batch):
    """A batch for a model with a cut vocabulary: of its own ids where all are kept, else of embeddings.

    Args:
        room: the most tokens it holds.
        batch_type: the library's structure.
        table: of the model.

    Attributes:
        by_embedding: go by embeddings even where all ids are kept.
    """

    def __init__(self, room: int, batch_type: Any, table: CutTable) -> None:
        super().__init__(room, batch_type)
        self.by_embedding = False
        self._table = table
        self._embeddings = np.zeros((room, table.width), np.float32)

    def fill(self, batch: Sequence[Span], starts: Sequence[int]) -> None:
        """Write the spans, each beginning at its position in ``starts``."""
        super().fill(batch, starts)
        end = sum(len(span.tokens) for span in batch)
        places = self._table.places[self._tokens[:end]]
        if self.by_embedding or (places >= len(self._table.kept.ids)).any():
            self._embeddings[:end] = self._table.rows(places)
            self._struct.token, self._struct.embd = None, _pointer(self._embeddings, ctypes.c_float)
        else:
            self._tokens[:end] = places
            self._struct.token, self._struct.embd = _pointer(self._tokens, ctypes.c_int32), None


def reads_embeddings(context: NativeContext) -> bool:
    """Whether an empty context takes the embeddings of tokens as it takes their ids; true without a cut.

    Some architectures do more to one than to the other. Tried on two tokens of sequence 0, which is left empty.
    """
    batch, kept = context._batch, context.kept_ids
    if kept is None or not isinstance(batch, CutBatch) or context.capacity < 2:
        return True
    rows = []
    try:
        for batch.by_embedding in (False, True):
            rows.append(context.decode([Span(0, kept.ids[[len(kept.ids) // 2, -1]].tolist(), 1)])[0].copy())
            context.truncate(0, 0)
    finally:
        batch.by_embedding = False
        context.truncate(0, 0)
    return float(abs(rows[1] - rows[0]).max()) <= 0.1 * float(rows[0].std())


def _batch_for(model: NativeModel, room: int) -> Batch:
    batch_type = model.binding.batch_type
    return CutBatch(room, batch_type, model.table) if model.table else Batch(room, batch_type)


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
