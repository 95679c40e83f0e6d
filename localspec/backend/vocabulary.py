"""Text to token ids and back, by the vocabulary of a loaded model."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any, Final

from localspec.backend.binding import Binding
from localspec.errors import InvalidOptionError, PromptError

__all__ = ["Vocabulary"]

_CONTROL: Final = 1 << 3  # attributes of a token
_USER_DEFINED: Final = 1 << 4
_STRIPS_RIGHT: Final = 1 << 8


class Vocabulary:
    """Text to ids and back.

    Args:
        binding: the library of the model.
        pointer: the native handle, which lives as long as the model.
        model: the model's finalizer, which tells whether it lives; the model itself would be a cycle.

    Attributes:
        size: number of ids.
        bos: the beginning-of-sequence id, if there is one.
        adds_bos: whether the model wants it in front of every text.
    """

    def __init__(self, binding: Binding, pointer: Any, *, model: weakref.finalize[..., Any]) -> None:
        self._binding = binding
        self._pointer = pointer
        self._model = model
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self.size = binding.num_tokens(pointer)
        bos = binding.bos(pointer)
        self.bos = bos if bos >= 0 else None
        self.adds_bos = binding.adds_bos(pointer) and self.bos is not None

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
            buffer = (ctypes.c_int32 * room)()
            count = self._binding.tokenize(self.pointer, raw, buffer, room, control)
            if count >= 0:
                return buffer[:count]
            room = -count

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; control tokens have none."""
        if token not in self._pieces:
            self._pieces[token] = self._read_piece(token, control=False)
        return self._pieces[token]

    def marker(self, token: int) -> str:
        """Return the text of a token, control tokens included."""
        return self._read_piece(token, control=True).decode(errors="replace")

    def _read_piece(self, token: int, *, control: bool) -> bytes:
        self._check_id(token)
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._binding.piece(self.pointer, token, buffer, room, control)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def ends_generation(self, token: int) -> bool:
        """Whether the model declares ``token`` an end of generation."""
        if token not in self._ends:
            self._check_id(token)
            self._ends[token] = self._binding.ends_generation(self.pointer, token)
        return self._ends[token]

    @functools.cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max(len(self._read_piece(token, control=True)) for token in range(self.size))

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.size:  # the library would abort the process
            raise InvalidOptionError(f"the token id {token} is not in 0..{self.size - 1}")

    @functools.cached_property
    def _attributes(self) -> list[int]:
        return [self._binding.attributes(self.pointer, token) for token in range(self.size)]

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens by their text."""
        return {self.marker(i): i for i, bits in enumerate(self._attributes) if bits & _CONTROL}

    @functools.cached_property
    def user_defined_tokens(self) -> frozenset[str]:
        """Texts that ``tokenize`` makes one token of wherever they stand, ``control`` or not."""
        defined = (i for i, bits in enumerate(self._attributes) if bits & _USER_DEFINED)
        return frozenset(map(self.marker, defined))

    def swallows_space(self, token: int) -> bool:
        """Whether white space after this control token is no part of the text, as for Phi-3's."""
        return bool(self._attributes[token] & _STRIPS_RIGHT)
