"""Reading the header of a GGUF file without loading it, and without touching its arrays.

A vocabulary of 152,000 strings costs seconds as Python objects, so arrays stay where they are: an
:class:`ArrayView` remembers the place, and :func:`read_strings` or :func:`read_numbers` fetch the items
of the few that someone asks for. Every length and offset is checked against the size of the file before
it is believed, so that a damaged file ends in one :class:`~localspec.errors.InvalidModelFileError`.

Format: GGUF versions 2 and 3, little-endian (the specification ``docs/gguf.md`` of ggml).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localspec.errors import InvalidModelFileError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CUT_IDS",
    "TENSOR_TYPES",
    "ArrayView",
    "GGUFFile",
    "TensorInfo",
    "Value",
    "read_gguf",
    "read_numbers",
    "read_raw",
    "read_strings",
]

CUT_IDS: Final = "localspec.cut.ids"
"""The entry that only a model with a cut vocabulary has: the ids it has logits for."""

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_STRING_TYPE: Final = 8
_ARRAY_TYPE: Final = 9
_SCALARS: Final = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip

TENSOR_TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Tensor type: name, elements per block, bytes per block."""

# The limits llama.cpp sets (names, dimensions) or that no real file comes near (the rest).
_MAX_KEY_BYTES: Final = 65_535
_MAX_TENSOR_NAME_BYTES: Final = 64
_MAX_DIMENSIONS: Final = 4
_MAX_STRINGS: Final = 1 << 24

_AGAIN: Final = "fetch it again"

_IMPOSTORS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model it points to; run `git lfs pull`"),
    (b"<!doctype html", "a web page, most likely an error or sign-in page saved under a model's name"),
    (b"<html", "a web page, most likely an error or sign-in page saved under a model's name"),
    (b"<?xml", "an XML document, most likely a server's error message"),
    (b'{"', "JSON text, most likely a server's error message"),
    (b"pk\x03\x04", "a ZIP archive (a PyTorch checkpoint or a wheel); localspec reads GGUF files"),
    (b"\x80\x02", "a pickled PyTorch checkpoint; localspec reads GGUF files"),
    (b"lmgg", "a model in the format before GGUF; convert it or fetch a current file"),
    (b"fmgg", "a model in the format before GGUF; convert it or fetch a current file"),
    (b"tjgg", "a model in the format before GGUF; convert it or fetch a current file"),
)


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies in a file: ``count`` items of type code ``item_type`` in bytes [start, end)."""

    path: Path
    item_type: int
    count: int
    start: int
    end: int


Value = bool | int | float | str | ArrayView


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape with the row length first, its type, and where in the file its data are."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    data_bytes: int
    start: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF file declares. Arrays are views; see :func:`read_strings` and :func:`read_numbers`.

    ``entries`` tells which bytes of the file, [start, end), hold each entry of the metadata, its key included.
    """

    path: Path
    version: int
    file_bytes: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    entries: Mapping[str, tuple[int, int]]


class _Cut(Exception):
    """The header wants bytes beyond the end of the file."""


class _Cursor:
    """A position in a mapped file; every read is checked against the end."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    def number(self, layout: struct.Struct) -> bool | int | float:
        start = self.position
        if start + layout.size > self.size:
            raise _Cut
        self.position = start + layout.size
        value: bool | int | float = layout.unpack_from(self.data, start)[0]
        return value

    def count(self, layout: struct.Struct = _U64) -> int:
        return int(self.number(layout))

    def skip(self, length: int) -> int:
        """Move on by ``length`` bytes and return where they began."""
        start = self.position
        if length > self.size - start:
            raise _Cut
        self.position = start + length
        return start

    def text(self, limit: int | None = None, what: str = "") -> str:
        length = self.count()
        if limit is not None and length > limit:
            raise _damaged(self.path, f"{what} of {length} bytes (at most {limit})")
        start = self.skip(length)
        return bytes(self.data[start : self.position]).decode("utf-8", "replace")

    def array(self, key: str) -> ArrayView:
        item_type, count = self.count(_U32), self.count()
        start = self.position
        if item_type in _SCALARS:
            self.skip(count * _SCALARS[item_type].size)
        elif item_type == _STRING_TYPE:
            if count > _MAX_STRINGS:
                raise _damaged(self.path, f"{key!r} announces {count} strings")
            self.position = _end_of_strings(self.data, start, count)
            if self.position > self.size:
                raise _Cut
        else:
            raise _damaged(self.path, f"{key!r} is an array of unknown item type {item_type}")
        return ArrayView(self.path, item_type, count, start, self.position)

    def value(self, key: str) -> Value:
        kind = self.count(_U32)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING_TYPE:
            return self.text()
        if kind == _ARRAY_TYPE:
            return self.array(key)
        raise _damaged(self.path, f"{key!r} has the unknown value type {kind}")


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of the GGUF file at ``path``.

    Raises :class:`ModelNotFoundError` where there is no such file and :class:`InvalidModelFileError` for
    everything that is not a whole, little-endian GGUF file of version 2 or 3.
    """
    path = Path(path)
    with _mapped(path) as data:
        cursor = _Cursor(data, path)
        where = "its preamble"
        try:
            version = _check_preamble(cursor)
            tensor_count, key_count = cursor.count(), cursor.count()
            metadata: dict[str, Value] = {}
            entries: dict[str, tuple[int, int]] = {}
            for index in range(_plausible(cursor, key_count, 13, "metadata entries")):
                where = f"metadata entry {index + 1} of {key_count}"
                start = cursor.position
                key = cursor.text(_MAX_KEY_BYTES, "a metadata key")
                where += f", {key!r}"
                if key in metadata:
                    raise _damaged(path, f"{key!r} appears twice")
                metadata[key] = cursor.value(key)
                entries[key] = start, cursor.position
            places: list[tuple[TensorInfo, int]] = []
            for index in range(_plausible(cursor, tensor_count, 24, "tensors")):
                where = f"tensor {index + 1} of {tensor_count}"
                places.append(_read_tensor(cursor))
        except _Cut:
            raise InvalidModelFileError(
                f"{path} is cut short or damaged: its {cursor.size:,} bytes end inside {where}; {_AGAIN}"
            ) from None
        tensors = _placed(cursor, metadata, places)
        return GGUFFile(path, version, cursor.size, metadata, tensors, entries)


def read_strings(view: ArrayView) -> list[bytes]:
    """Return the items of an array of strings, as the bytes the file holds."""
    if view.item_type != _STRING_TYPE:
        raise _damaged(view.path, f"an array of type {view.item_type} stands where strings belong")
    items = []
    with _mapped(view.path) as data:
        block = bytes(data[view.start : view.end])
    position = 0
    unpack = _U64.unpack_from
    for _ in range(view.count):
        start = position + 8
        position = start + unpack(block, position)[0]
        items.append(block[start:position])
    return items


def read_numbers(view: ArrayView) -> tuple[int | float, ...]:
    """Return the items of an array of numbers."""
    if view.item_type not in _SCALARS:
        raise _damaged(view.path, f"an array of type {view.item_type} stands where numbers belong")
    letter = _SCALARS[view.item_type].format[-1:]
    with _mapped(view.path) as data:
        return struct.unpack(f"<{view.count}{letter}", data[view.start : view.end])


def read_raw(view: ArrayView) -> bytes:
    """Return the bytes of an array as they lie in the file, for comparing two files quickly."""
    with _mapped(view.path) as data:
        return bytes(data[view.start : view.end])


def _end_of_strings(data: mmap.mmap | bytes, position: int, count: int) -> int:
    """Walk over ``count`` length-prefixed strings; the hot loop of reading a header."""
    unpack = _U64.unpack_from
    try:
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
    except (struct.error, OverflowError):
        raise _Cut from None
    return position


def _check_preamble(cursor: _Cursor) -> int:
    head = bytes(cursor.data[:24])
    if not head.startswith(b"GGUF"):
        if b"GGUF".startswith(head):
            raise InvalidModelFileError(f"{cursor.path} has only {cursor.size} bytes: it was cut short; {_AGAIN}")
        raise InvalidModelFileError(f"{cursor.path} is not a GGUF file: {_describe(head, cursor.size)}")
    cursor.skip(4)
    version = cursor.count(_U32)
    if version & 0xFFFF == 0 and version:
        raise InvalidModelFileError(
            f"{cursor.path} is a big-endian GGUF file; localspec reads little-endian ones: fetch that build"
        )
    if version not in (2, 3):
        raise InvalidModelFileError(
            f"{cursor.path} is GGUF version {version}; localspec reads versions 2 and 3: fetch a current file"
        )
    return version


def _describe(head: bytes, size: int) -> str:
    """Say what a file that is not GGUF looks like."""
    lowered = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, description in _IMPOSTORS:
        if lowered.startswith(start):
            return f"it is {description}"
    if head[8:10] == b'{"' and _U64.unpack_from(head)[0] < size:
        return "it is a safetensors file; localspec reads GGUF files"
    if not head.strip(b"\0"):
        return "it begins with zeros, as an unfinished download does; fetch it again"
    return f"it begins with {head[:8]!r}"


def _plausible(cursor: _Cursor, count: int, least_bytes: int, what: str) -> int:
    """Refuse a count that the rest of the file could not hold even at ``least_bytes`` each."""
    if count * least_bytes > cursor.size - cursor.position:
        raise _damaged(cursor.path, f"it announces {count} {what} in {cursor.size:,} bytes")
    return count


def _read_tensor(cursor: _Cursor) -> tuple[TensorInfo, int]:
    """Read one tensor's description; the second value is the offset of its data."""
    name = cursor.text(_MAX_TENSOR_NAME_BYTES, "a tensor name")
    dimensions = cursor.count(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _damaged(cursor.path, f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))
    type_code, offset = cursor.count(_U32), cursor.count()
    if type_code not in TENSOR_TYPES:
        raise _damaged(cursor.path, f"tensor {name!r} has type {type_code}, which this localspec does not know")
    type_name, block_elements, block_bytes = TENSOR_TYPES[type_code]
    if 0 in shape or shape[0] % block_elements:
        raise _damaged(cursor.path, f"tensor {name!r} of type {type_name} has the shape {shape}")
    return TensorInfo(name, shape, type_name, prod(shape) // block_elements * block_bytes, 0), offset


def _placed(
    cursor: _Cursor, metadata: Mapping[str, Value], places: list[tuple[TensorInfo, int]]
) -> tuple[TensorInfo, ...]:
    """Return the tensors with the places of their data, which must lie inside the file."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _damaged(cursor.path, f"'general.alignment' is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    for tensor, offset in places:
        if offset % alignment:
            raise _damaged(cursor.path, f"the data of tensor {tensor.name!r} are off the alignment, at {offset}")
        end = start + offset + tensor.data_bytes
        if end > cursor.size:
            raise InvalidModelFileError(
                f"{cursor.path} is cut short: it has {cursor.size:,} bytes, and the data of tensor "
                f"{tensor.name!r} end at byte {end:,}; {_AGAIN}"
            )
    return tuple(replace(tensor, start=start + offset) for tensor, offset in places)


def _damaged(path: Path, what: str) -> InvalidModelFileError:
    return InvalidModelFileError(f"{path} is damaged: {what}; {_AGAIN}")


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """Map a file for reading; nothing of it is read that nobody looks at."""
    try:
        if path.is_dir():
            raise InvalidModelFileError(f"{path} is a directory; name the .gguf file inside it")
        if path.exists() and not path.is_file():
            raise InvalidModelFileError(f"{path} is not a regular file")
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise InvalidModelFileError(f"{path} is empty (0 bytes); {_AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise InvalidModelFileError(f"{path} cannot be read: {error}") from error
