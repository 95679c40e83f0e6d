"""Models and contexts through llama-cpp-python's low-level interface."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from localspec.backend.context import FlashAttention, Span
from localspec.backend.interrupts import deferred_interrupts
from localspec.backend.memory import MappingTrimmer
from localspec.backend.threads import usable_cores
from localspec.errors import (
    EvaluationError,
    InvalidOptionError,
    OutOfMemoryError,
    PromptError,
    RollbackError,
    UnsupportedModelError,
)

__all__ = ["FlashAttention", "LlamaContext", "LlamaModel", "Vocabulary", "native_build", "show_native_log"]

_CHUNK = 128  # tokens per pass while reading a prompt: a larger one is no faster on a CPU and delays an interrupt

_MAX_THREADS = 512  # ggml's own limit: thousands take minutes for a token, and beyond 32 bits a number wraps

_log_lines: deque[str] = deque(maxlen=200)
_log_shown = False


def _on_log(level: int, text: bytes, _data: Any) -> None:
    line = text.decode(errors="replace")
    _log_lines.append(line)
    if _log_shown:
        sys.stderr.write(line)


_log_callback = native.llama_log_callback(_on_log)  # kept alive here: llama.cpp holds only its address
native.llama_log_set(_log_callback, ctypes.c_void_p(0))


def show_native_log(shown: bool) -> None:
    """Let llama.cpp's own log through to stderr, or keep it back (the default)."""
    global _log_shown
    _log_shown = shown


def native_build() -> str:
    """Return the version of the binding and what its llama.cpp was compiled for, in one line."""
    features = native.llama_print_system_info().decode(errors="replace")
    return f"llama-cpp-python {native.__version__}, {' '.join(features.replace(' = 1', '').replace('|', '').split())}"


def _last_error() -> str:
    """Return what llama.cpp last complained of, without its function names."""
    lines = [line.strip() for line in _log_lines if "error" in line.lower() or "fail" in line.lower()]
    return lines[0].split(": ", 1)[-1] if lines else "llama.cpp gave no reason"


def _check_threads(threads: int) -> int:
    if not 1 <= threads <= _MAX_THREADS:
        raise InvalidOptionError(
            f"threads is {threads}; use 1 to {_MAX_THREADS}, best as many as there are physical cores"
        )
    return threads


class LlamaModel:
    """A loaded GGUF file: weights and vocabulary, no cache.

    Args:
        path: the file; its header should have been read and checked before.

    Raises:
        UnsupportedModelError: llama.cpp refused the file.
    """

    def __init__(self, path: Path) -> None:
        native.llama_backend_init()
        params = native.llama_model_default_params()
        params.n_gpu_layers = 0
        trimmer = MappingTrimmer(path)
        _log_lines.clear()
        with deferred_interrupts() as interrupted:

            @native.llama_progress_callback  # type: ignore[untyped-decorator]
            def goes_on(_fraction: float, _data: Any) -> bool:
                trimmer.trim()
                return not interrupted()

            params.progress_callback = goes_on
            pointer = native.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise UnsupportedModelError(
                f"{path} cannot be loaded: {_last_error()}; a newer llama-cpp-python may know this kind of model"
            )
        trimmer.trim(last=True)
        self.path = path
        self._pointer = pointer
        self.close = weakref.finalize(self, native.llama_model_free, pointer)
        self.vocabulary = Vocabulary(native.llama_model_get_vocab(pointer), model=self.close)

    @property
    def pointer(self) -> Any:
        """The native handle."""
        if not self.close.alive:
            raise InvalidOptionError(f"{self.path} was closed; load it again")
        return self._pointer

    @property
    def trained_context(self) -> int:
        """Tokens of context the model was trained for."""
        return int(native.llama_model_n_ctx_train(self.pointer))


class Vocabulary:
    """Text to ids and back.

    Args:
        pointer: the native handle, which lives as long as the model.
        model: the model's finalizer, which tells whether it lives; the model itself would be a cycle.

    Attributes:
        size: number of ids.
        bos: the beginning-of-sequence id, if there is one.
        adds_bos: whether the model wants it in front of every text.
    """

    def __init__(self, pointer: Any, *, model: weakref.finalize[..., Any]) -> None:
        self._pointer = pointer
        self._model = model
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self.size = int(native.llama_vocab_n_tokens(pointer))
        bos = int(native.llama_vocab_bos(pointer))
        self.bos = bos if bos >= 0 else None
        self.adds_bos = bool(native.llama_vocab_get_add_bos(pointer)) and self.bos is not None

    @property
    def pointer(self) -> Any:
        """The native handle."""
        if not self._model.alive:
            raise InvalidOptionError("the model of this vocabulary was closed; load it again")
        return self._pointer

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """Return the ids of ``text``, without BOS.

        Args:
            text: what to encode.
            control: whether markers such as ``<|im_end|>`` become control tokens. Never for text of users.

        Raises:
            PromptError: the text holds lone surrogates and therefore is not Unicode text.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text holds {text[error.start]!r} at character {error.start}, which is no Unicode character;"
                " remove it, or read the input as UTF-8"
            ) from None
        room = len(raw) + 16
        while True:
            buffer = (native.llama_token * room)()
            count = native.llama_tokenize(self.pointer, raw, len(raw), buffer, room, False, control)
            if count >= 0:
                return buffer[:count]
            room = -count

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; control tokens have none."""
        if token not in self._pieces:
            self._pieces[token] = self._read_piece(token, special=False)
        return self._pieces[token]

    def marker(self, token: int) -> str:
        """Return the text of a token, control tokens included."""
        return self._read_piece(token, special=True).decode(errors="replace")

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        self._check_id(token)
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = native.llama_token_to_piece(self.pointer, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def ends_generation(self, token: int) -> bool:
        """Whether the model declares ``token`` an end of generation."""
        if token not in self._ends:
            self._check_id(token)
            self._ends[token] = bool(native.llama_vocab_is_eog(self.pointer, token))
        return self._ends[token]

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.size:  # llama.cpp would abort the process
            raise InvalidOptionError(f"the token id {token} is not in 0..{self.size - 1}")

    @functools.cached_property
    def _attributes(self) -> list[int]:
        return [int(native.llama_vocab_get_attr(self._pointer, token)) for token in range(self.size)]

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens by their text."""
        return {
            self.marker(i): i for i, bits in enumerate(self._attributes) if bits & native.LLAMA_TOKEN_ATTR_CONTROL
        }

    @functools.cached_property
    def user_defined_tokens(self) -> frozenset[str]:
        """Texts that ``tokenize`` makes one token of wherever they stand, ``control`` or not."""
        defined = (i for i, bits in enumerate(self._attributes) if bits & native.LLAMA_TOKEN_ATTR_USER_DEFINED)
        return frozenset(map(self.marker, defined))

    def swallows_space(self, token: int) -> bool:
        """Whether white space after this control token is no part of the text, as for Phi-3's."""
        return bool(self._attributes[token] & native.LLAMA_TOKEN_ATTR_RSTRIP)


class LlamaContext:
    """A ``Context`` on llama.cpp.

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
        model: LlamaModel,
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
        self.chunk = _CHUNK
        with deferred_interrupts():
            pointer = native.llama_init_from_model(model.pointer, self._params(flash_attention))
        if not pointer:
            raise OutOfMemoryError(
                f"no context of {num_sequences} × {capacity} tokens for {model.path}: {_last_error()};"
                " use a smaller --ctx"
            )
        self._pointer = pointer
        self._memory = native.llama_get_memory(pointer)
        self._batch = _Batch(max(_CHUNK, num_sequences))
        self._views: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.close = weakref.finalize(self, native.llama_free, pointer)

    def _params(self, flash_attention: FlashAttention) -> Any:
        params = native.llama_context_default_params()
        params.n_ctx = self.capacity * self.num_sequences
        params.n_seq_max = self.num_sequences
        params.n_batch = params.n_ubatch = max(_CHUNK, self.num_sequences)
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[flash_attention]
        # One cache for all: sequences that add different numbers of tokens still share one pass over the weights
        # (with a cache each, llama.cpp splits such a batch), and a common prefix is copied without moving data.
        params.kv_unified = self.num_sequences > 1
        params.swa_full = True  # a sliding-window cache forgets what a rollback needs
        params.no_perf = True
        return params

    def set_threads(self, threads: int) -> None:
        """Use so many threads from the next pass on.

        Raises:
            InvalidOptionError: the number is below 1.
        """
        self._check_open()
        self.threads = _check_threads(threads)
        native.llama_set_n_threads(self._pointer, threads, threads)

    def length(self, sequence: int) -> int:
        """Return how many tokens the cache holds for ``sequence``, as llama.cpp itself counts them."""
        self._check_open()
        return int(native.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of ``sequence``."""
        held = self.length(sequence)
        if held > length and not native.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RollbackError(
                f"the cache of {self.model.path.name} cannot go back from {held} to {length} tokens (recurrent or"
                " hybrid model), so nothing can be drafted for it or by it; use it without a draft (--no-draft)"
            )

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let ``sequence`` hold the first ``length`` tokens of ``source``; see ``Context.copy``."""
        if source == sequence or self.length(source) < length:
            raise InvalidOptionError(f"{length} tokens of sequence {source} cannot be copied to sequence {sequence}")
        self.truncate(sequence, 0)
        if length == 0:
            return
        native.llama_memory_seq_cp(self._memory, source, sequence, 0, length)
        if self.length(sequence) != length:  # a recurrent state knows all of its sequence or nothing
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
            if bad := [token for token in span.tokens if not 0 <= token < self.vocabulary_size]:
                raise EvaluationError(f"the token id {bad[0]} is not in 0..{self.vocabulary_size - 1}")
        if num_tokens <= self._batch.room:
            self._batch.fill(batch, starts)
            return self._run(num_tokens, sum(span.rows for span in batch))
        return self._decode_in_chunks(batch, starts)

    def _decode_in_chunks(self, batch: Sequence[Span], starts: list[int]) -> NDArray[np.float32]:
        kept: list[NDArray[np.float32]] = []
        for span, start in zip(batch, starts, strict=True):
            last = len(span.tokens) - span.padding
            for at in range(0, len(span.tokens), self._batch.room):
                tokens = span.tokens[at : at + self._batch.room]
                padding = min(len(tokens), max(0, at + len(tokens) - last))
                rows = min(len(tokens) - padding, max(0, at + len(tokens) - padding - (last - span.rows)))
                self._batch.fill([Span(span.sequence, tokens, rows, padding)], [start + at])
                logits = self._run(len(tokens), rows)
                if rows:
                    kept.append(logits.copy())
        return np.concatenate(kept) if kept else np.empty((0, self.vocabulary_size), np.float32)

    def _run(self, num_tokens: int, num_rows: int) -> NDArray[np.float32]:
        _log_lines.clear()
        code = native.llama_decode(self._pointer, self._batch.native(num_tokens))
        if code != 0:
            raise self._failure(code, num_tokens)
        if num_rows == 0:
            return np.empty((0, self.vocabulary_size), np.float32)
        address = ctypes.cast(native.llama_get_logits(self._pointer), ctypes.c_void_p).value
        assert address is not None
        view = self._views.get((address, num_rows))
        if view is None:  # llama.cpp keeps its buffer until it needs a larger one, so that few are ever made
            row_type = ctypes.c_float * (num_rows * self.vocabulary_size)
            view = np.ctypeslib.as_array(row_type.from_address(address)).reshape(num_rows, -1)
            self._views[address, num_rows] = view
        return view

    def _failure(self, code: int, num_tokens: int) -> EvaluationError:
        if code == 1:
            return OutOfMemoryError(
                f"the cache of {self.model.path.name} has no room for {num_tokens} more tokens; use a larger --ctx"
            )
        if code == 2:
            return EvaluationError(f"a pass over {num_tokens} tokens was aborted; the cache is as it was")
        if code == -1:
            return EvaluationError(
                f"llama.cpp refused a batch of {num_tokens} tokens: {_last_error()}; run with -v for its log"
            )
        return EvaluationError(f"llama.cpp failed with code {code}: {_last_error()}; run with -v for its log")

    def _check_open(self) -> None:
        if not (self.close.alive and self.model.close.alive):
            raise InvalidOptionError(f"the context of {self.model.path.name} was closed; load the pair again")


class _Batch:
    """A native batch whose arrays are allocated once and filled through numpy.

    Args:
        room: the most tokens it holds.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._tokens = np.zeros(room, np.int32)
        self._positions = np.zeros(room, np.int32)
        self._num_sequences = np.ones(room, np.int32)
        self._sequences = np.zeros(room, np.int32)
        self._rows = np.zeros(room, np.int8)
        first = self._sequences.ctypes.data
        self._sequence_pointers = first + np.arange(room, dtype=np.uintp) * self._sequences.itemsize
        self._struct = native.llama_batch(
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


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
