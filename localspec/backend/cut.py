"""Model files with a cut vocabulary: logits for some ids, embeddings of all of them.

A cut file holds the rows of the file it was made from, in another order. Its output head, and with it
``token_embd.weight``, have those of the kept ids only, so that llama.cpp takes it for a model that knows no others.
The table of embeddings comes last, and directly behind it, beyond what the file declares, the rows of all other ids:
together the whole table, kept ids first. What reads any id looks it up there.

What the file adds to the metadata: ``localspec.cut.ids``, the kept ids, ascending; ``localspec.cut.tokens`` and
``localspec.cut.token_types``, the arrays of the whole vocabulary; ``localspec.cut.made_from``, the fingerprint of the
original; ``localspec.cut.text``, in words, what the ids were chosen by.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from localspec.backend.gguf import (
    CUT_IDS,
    TENSOR_TYPES,
    ArrayView,
    GGUFFile,
    TensorInfo,
    read_gguf,
    read_numbers,
    read_raw,
    read_strings,
)
from localspec.backend.identity import file_fingerprint
from localspec.errors import InvalidModelFileError, InvalidOptionError, StoreError, UnsupportedModelError
from localspec.sampling import KeptIds

__all__ = ["CutTable", "check_cuttable", "open_cut", "write_cut"]

_EMBEDDINGS: Final = "token_embd.weight"
_HEADS: Final = ("output.weight", "output.bias")
_U32: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9
_ROWS_AT_ONCE: Final = 8192
_AGAIN: Final = "make it again with `localspec models trim`"

# The graphs of these multiply embeddings by √width where ids come in, and do not where embeddings come in.
_SCALED: Final = frozenset({"gemma3"})

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]


class CutTable:
    """The embeddings of all ids in a cut file; nothing of it is read that nobody looks up.

    Args:
        file: the cut file's header.

    Attributes:
        kept: which ids the model has logits for.
        places: where in the table each id is, int32 [V]; below K, the place of a kept id is its column too.
        width: entries of an embedding.

    Raises:
        InvalidModelFileError: the file lacks a part of the table.
        UnsupportedModelError: rows of its type cannot be read here.
    """

    def __init__(self, file: GGUFFile) -> None:
        ids, tokens = file.metadata.get(CUT_IDS), file.metadata.get("localspec.cut.tokens")
        table = _tensor(file, _EMBEDDINGS)
        if not isinstance(ids, ArrayView) or not isinstance(tokens, ArrayView) or table.shape[1:] != (ids.count,):
            raise InvalidModelFileError(f"{file.path} is damaged: its embeddings are not those of its ids; {_AGAIN}")
        size, row_bytes = tokens.count, table.data_bytes // ids.count
        if file.file_bytes < table.start + size * row_bytes:
            raise InvalidModelFileError(
                f"{file.path} is cut short: it lacks the embeddings of ids that it has no logits for; {_AGAIN}"
            )
        try:
            self.kept = KeptIds(np.array(read_numbers(ids), np.int64), size)
        except InvalidOptionError as error:
            raise InvalidModelFileError(f"{file.path} is damaged: {error}; {_AGAIN}") from None
        self.width = table.shape[0]
        self.places = np.empty(size, np.int32)
        self.places[np.concatenate([self.kept.ids, _others(self.kept.ids, size)])] = np.arange(size)
        self._type_name = table.type_name
        self._rows = np.memmap(file.path, np.uint8, "r", offset=table.start, shape=(size, row_bytes))
        scaled = file.metadata.get("general.architecture") in _SCALED
        self._scale = np.float32(math.sqrt(self.width)) if scaled else None
        dequantized(self._rows[:1], self._type_name, file.path)

    def rows(self, places: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the embeddings at ``places`` [n], float32 [n, width], as a model's graph takes them."""
        found = dequantized(self._rows[places], self._type_name)
        return found if self._scale is None else found * self._scale


def open_cut(path: Path) -> CutTable | None:
    """Return the table of a cut file; None of any other model file."""
    file = read_gguf(path)
    return CutTable(file) if CUT_IDS in file.metadata else None


def dequantized(rows: Bytes, type_name: str, path: Path | None = None) -> NDArray[np.float32]:
    """Return rows of a tensor as float32 [n, width].

    Raises:
        UnsupportedModelError: nothing here can read this type.
    """
    from gguf import GGMLQuantizationType  # an eighth of a second, which only cut drafts need
    from gguf.quants import dequantize

    try:
        return dequantize(rows, GGMLQuantizationType[type_name])
    except (NotImplementedError, KeyError):
        raise UnsupportedModelError(
            f"{path} holds its embeddings as {type_name}, which cannot be cut here; cut another quantisation of it"
        ) from None


def check_cuttable(path: Path) -> GGUFFile:
    """Return the header of a file whose vocabulary can be cut.

    Raises:
        UnsupportedModelError: it cannot, for the reason given.
    """
    file = read_gguf(path)
    if CUT_IDS in file.metadata:
        raise UnsupportedModelError(f"{path} has a cut vocabulary already; cut the file it was made from")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    table = next((tensor for tensor in file.tensors if tensor.name == _EMBEDDINGS), None)
    if not isinstance(tokens, ArrayView) or table is None or len(table.shape) != 2 or table.shape[1] != tokens.count:
        raise UnsupportedModelError(f"{path} has no embedding for each token of a vocabulary, so none can be cut off")
    for tensor in file.tensors:
        if tokens.count in tensor.shape and tensor.name not in (_EMBEDDINGS, *_HEADS):
            raise UnsupportedModelError(
                f"{path} cannot be cut: {tensor.name!r} says something about every id, and not as logits"
            )
    first = np.memmap(path, np.uint8, "r", offset=table.start, shape=(1, table.data_bytes // tokens.count))
    dequantized(first, table.type_name, path)
    return file


def write_cut(source: Path, destination: Path, kept: Ids, *, text: str) -> None:
    """Write ``source`` with logits for the ids ``kept`` only; the file appears whole or not at all.

    Args:
        source: a whole model file.
        destination: the cut one.
        kept: ids, ascending.
        text: what they were chosen by, to be kept in the file.

    Raises:
        UnsupportedModelError: as ``check_cuttable``.
        StoreError: the file cannot be written.
    """
    file = check_cuttable(source)
    temporary = destination.with_name(f"{destination.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            _write(out, file, kept, text)
        read_gguf(temporary)
        os.replace(temporary, destination)
    except OSError as error:
        raise StoreError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(out: BinaryIO, file: GGUFFile, kept: Ids, text: str) -> None:
    data = np.memmap(file.path, np.uint8, "r")
    alignment = file.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    size = _size(file)
    entries = list(_entries(file, data, kept, text))
    embeddings = _tensor(file, _EMBEDDINGS)
    tensors = [*(tensor for tensor in file.tensors if tensor is not embeddings), embeddings]
    out.write(b"GGUF" + struct.pack("<IQQ", file.version, len(tensors), len(entries)))
    out.writelines(entries)
    offset = 0
    for tensor in tensors:
        rows = len(kept) if tensor.name in (_EMBEDDINGS, *_HEADS) else size
        shape = tensor.shape if rows == size else (*tensor.shape[:-1], rows)
        out.write(_described(tensor, shape, offset))
        offset += _aligned(tensor.data_bytes // size * rows if rows != size else tensor.data_bytes, alignment)
    for tensor in tensors:
        out.write(bytes(-out.tell() % alignment))
        values = data[tensor.start : tensor.start + tensor.data_bytes]
        if tensor.name in (_EMBEDDINGS, *_HEADS):
            _write_rows(out, values.reshape(size, -1), kept)
        else:
            out.write(values.data)
    _write_rows(out, data[embeddings.start :][: embeddings.data_bytes].reshape(size, -1), _others(kept, size))
    out.write(bytes(-out.tell() % alignment))


def _write_rows(out: BinaryIO, table: Bytes, ids: Ids) -> None:
    for at in range(0, len(ids), _ROWS_AT_ONCE):
        out.write(table[ids[at : at + _ROWS_AT_ONCE]].data)


def _described(tensor: TensorInfo, shape: tuple[int, ...], offset: int) -> bytes:
    code = next(code for code, (name, *_) in TENSOR_TYPES.items() if name == tensor.type_name)
    return _text(tensor.name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def _entries(file: GGUFFile, data: Bytes, kept: Ids, text: str) -> Iterator[bytes]:
    """Yield the entries of the metadata, encoded: the new ones first, where a fingerprint looks at all of them."""
    yield _array(CUT_IDS, _U32, len(kept), kept.astype("<u4").tobytes())
    yield _text(b"localspec.cut.made_from") + struct.pack("<I", _STRING) + _text(file_fingerprint(file.path).encode())
    yield _text(b"localspec.cut.text") + struct.pack("<I", _STRING) + _text(text.encode(errors="replace"))
    for key, value in file.metadata.items():
        start, end = file.entries[key]
        if isinstance(value, ArrayView) and key.startswith("tokenizer.ggml."):
            yield from _array_entries(key, value, kept)
        elif key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            column = int(np.searchsorted(kept, value))  # type: ignore[arg-type]  # whole numbers, as the header says
            if column < len(kept) and kept[column] == value:
                yield _number(key, column)
        elif key.endswith(".vocab_size"):
            yield _number(key, len(kept))
        else:
            yield data[start:end].tobytes()


def _array_entries(key: str, view: ArrayView, kept: Ids) -> Iterator[bytes]:
    """Yield what becomes of an array of the tokenizer; the whole vocabulary stays, under another name."""
    name = key.removeprefix("tokenizer.ggml.")
    raw = read_raw(view)
    if name == "merges":  # of ids that are no longer there; one stays, since ik_llama.cpp warns of an empty array
        merges = read_strings(view)[:1]
        yield _array(key, view.item_type, len(merges), b"".join(map(_text, merges)))
        return
    if name == "tokens":
        yield _array("localspec.cut.tokens", view.item_type, view.count, raw)
        pieces = read_strings(view)
        yield _array(key, view.item_type, len(kept), b"".join(_text(pieces[token]) for token in kept.tolist()))
    elif name in ("token_type", "scores"):
        if name == "token_type":
            yield _array("localspec.cut.token_types", view.item_type, view.count, raw)
        items = np.frombuffer(raw, np.uint8).reshape(view.count, -1)
        yield _array(key, view.item_type, len(kept), items[kept].tobytes())
    else:
        yield _array(key, view.item_type, view.count, raw)


def _array(key: str, item_type: int, count: int, items: bytes) -> bytes:
    return _text(key.encode()) + struct.pack("<IIQ", _ARRAY, item_type, count) + items


def _number(key: str, value: int) -> bytes:
    return _text(key.encode()) + struct.pack("<II", _U32, value)


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def _others(kept: Ids, size: int) -> Ids:
    """Return the ids below ``size`` that are not kept."""
    rest: Any = np.ones(size, np.bool_)
    rest[kept] = False
    return np.flatnonzero(rest)


def _size(file: GGUFFile) -> int:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArrayView)
    return tokens.count


def _tensor(file: GGUFFile, name: str) -> TensorInfo:
    found = next((tensor for tensor in file.tensors if tensor.name == name), None)
    if found is None:
        raise InvalidModelFileError(f"{file.path} has no tensor {name!r}; fetch it again")
    return found
