"""Small GGUF files for tests, written from the format's description and not by the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from localspec.backend.model_header import ModelHeader, read_header

SCALAR_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, U32, I32, F32, BOOL = 8, 9, 4, 5, 6, 7

Pair = tuple[str, bytes]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(key: str, code: int, value: float) -> Pair:
    return key, struct.pack("<I" + SCALAR_LETTERS[code], code, value)


def string(key: str, value: str) -> Pair:
    return key, struct.pack("<I", STRING) + text(value)


def strings(key: str, values: Sequence[str | bytes]) -> Pair:
    return key, struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def numbers(key: str, code: int, values: Sequence[float]) -> Pair:
    body = struct.pack(f"<{len(values)}{SCALAR_LETTERS[code]}", *values)
    return key, struct.pack("<IIQ", ARRAY, code, len(values)) + body


def gguf(
    metadata: Sequence[Pair],
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (("output.weight", (8, 4), 0, 128),),
    *,
    version: int = 3,
) -> bytes:
    """A whole file; a tensor is its name, shape, type code and bytes."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(text(key) + value for key, value in metadata)
    data = b""
    for name, shape, code, size in tensors:
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, len(data))
        data += bytes(-(-size // 32) * 32)
    return out + bytes(-len(out) % 32) + data


def model(
    tokens: Sequence[str | bytes],
    *extra: Pair,
    types: Sequence[int] | None = None,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    pre: str | None = "qwen2",
) -> bytes:
    """A file that says what a language model says; ``extra`` adds metadata."""
    metadata = [
        string("general.architecture", architecture),
        scalar("general.file_type", U32, 15),
        scalar(f"{architecture}.block_count", U32, 2),
        scalar(f"{architecture}.context_length", U32, 2048),
        scalar(f"{architecture}.embedding_length", U32, 64),
        scalar(f"{architecture}.attention.head_count", U32, 4),
        string("tokenizer.ggml.model", tokenizer),
        strings("tokenizer.ggml.tokens", tokens),
        *([] if pre is None else [string("tokenizer.ggml.pre", pre)]),
        *([] if types is None else [numbers("tokenizer.ggml.token_type", I32, types)]),
    ]
    return gguf([pair for pair in metadata if pair[0] not in dict(extra)] + list(extra))


def header(path: Path, tokens: Sequence[str | bytes], *extra: Pair, **options: object) -> ModelHeader:
    """Write such a file and read its header."""
    path.write_bytes(model(tokens, *extra, **options))  # type: ignore[arg-type]
    return read_header(path)
