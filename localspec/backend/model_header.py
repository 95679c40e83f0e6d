"""What a model file says of itself: the metadata of a GGUF header, named and checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Never

from localspec.backend.gguf import CUT_IDS, ArrayView, GGUFFile, read_gguf, read_numbers
from localspec.errors import InvalidModelFileError, UnsupportedModelError

__all__ = ["CACHE_PADDING", "ModelHeader", "read_header"]

CACHE_PADDING: Final = 256
"""llama.cpp rounds the tokens a cache holds up to a multiple of this."""

_F16_BYTES: Final = 2
_F32_BYTES: Final = 4

# Numbers of llama.cpp's `llama_ftype`.
_FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip

# Keys that only architectures with a recurrent state carry: state-space, RWKV, short convolution, delta nets.
_RECURRENT_KEYS: Final = ("ssm.", "wkv.", "shortconv.", "kda.")

# Tokenizers, and pre-tokenizers of "gpt2", that add BOS where the file does not say (llama.cpp's defaults).
_BOS_BY_DEFAULT: Final = frozenset({"llama", "bert"})
_BOS_BY_DEFAULT_PRE: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"})


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """The facts about one model that can be read without loading it.

    ``file_type`` is the quantisation the file was made as ("Q4_K_M"), ``tensor_type`` the type that holds
    most of its bytes ("Q4_K"). ``head_count_kv`` has one entry per layer; a layer without attention has 0.
    ``memory`` says what the model remembers tokens by. ``kept_ids`` are those that a model with a cut vocabulary has
    logits for; everything else, ``tokens`` too, is about the vocabulary before the cut.
    """

    path: Path
    file_bytes: int
    architecture: str
    name: str | None
    file_type: str
    tensor_type: str
    parameter_count: int
    weight_bytes: int
    tokenizer_model: str
    tokenizer_pre: str | None
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    context_length: int | None
    chat_template: str | None
    block_count: int
    embedding_length: int
    head_count: tuple[int, ...]
    head_count_kv: tuple[int, ...]
    key_length: int
    value_length: int
    sliding_window: int | None
    memory: Literal["attention", "hybrid", "recurrent"]
    tokens: ArrayView
    token_types: ArrayView | None
    kept_ids: ArrayView | None = None

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.tokens.count

    @property
    def can_roll_back(self) -> bool:
        """Whether the cache can forget its last tokens; loading a model probes it once more."""
        return self.memory == "attention"

    @property
    def rollback_note(self) -> str:
        """Why the cache can or cannot forget, in words."""
        if self.memory != "attention":
            return f"no: {self.architecture} keeps a recurrent state, which cannot take a drafted token back"
        if self.sliding_window:
            return f"yes, with a full-size cache (the window is {self.sliding_window} tokens)"
        return "yes"

    def cache_bytes(self, context: int) -> int:
        """Bytes of a 16-bit key and value cache for ``context`` tokens, every layer at full size.

        Grouped-query attention is counted by ``head_count_kv``. A recurrent state is not counted: it does
        not grow with the context.
        """
        cells = -(-context // CACHE_PADDING) * CACHE_PADDING
        return cells * sum(self.head_count_kv) * (self.key_length + self.value_length) * _F16_BYTES

    def logits_bytes(self, rows: int) -> int:
        """Bytes of ``rows`` rows of float32 logits."""
        return rows * (self.kept_ids or self.tokens).count * _F32_BYTES


def read_header(path: str | Path) -> ModelHeader:
    """Read what the model file at ``path`` says of itself, in milliseconds.

    Raises :class:`InvalidModelFileError` for a file that is damaged or not GGUF, and
    :class:`UnsupportedModelError` for a sound GGUF file that is no language model (an adapter, a projector).
    """
    fields = _Fields(read_gguf(path))
    file = fields.file
    architecture = fields.required_text("general.architecture")
    kept = fields.array(CUT_IDS)
    vocabulary = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    if kept is not None:
        vocabulary = ("localspec.cut.tokens", "localspec.cut.token_types")
    tokens = fields.array(vocabulary[0])
    if tokens is None or not tokens.count or not file.tensors:
        kind = fields.text("general.type") or architecture
        raise UnsupportedModelError(f"{path} ({kind}) is no language model: it lacks a vocabulary or weights")
    block_count = fields.required_number(f"{architecture}.block_count")
    embedding_length = fields.required_number(f"{architecture}.embedding_length")
    head_count = fields.per_layer(f"{architecture}.attention.head_count", block_count, (0,) * block_count)
    head_count_kv = fields.per_layer(f"{architecture}.attention.head_count_kv", block_count, head_count)
    head_length = embedding_length // max(max(head_count), 1)
    tokenizer = fields.required_text("tokenizer.ggml.model")
    pre = fields.text("tokenizer.ggml.pre")
    return ModelHeader(
        path=file.path,
        file_bytes=file.file_bytes,
        architecture=architecture,
        name=fields.text("general.name"),
        file_type=_file_type(fields),
        tensor_type=_dominant_type(file),
        parameter_count=sum(tensor.elements for tensor in file.tensors),
        weight_bytes=sum(tensor.data_bytes for tensor in file.tensors),
        tokenizer_model=tokenizer,
        tokenizer_pre=pre,
        bos_id=_whole_id(fields.number("tokenizer.ggml.bos_token_id"), kept),
        eos_id=_whole_id(fields.number("tokenizer.ggml.eos_token_id"), kept),
        add_bos=fields.flag(
            "tokenizer.ggml.add_bos_token", tokenizer in _BOS_BY_DEFAULT or pre in _BOS_BY_DEFAULT_PRE
        ),
        add_eos=fields.flag("tokenizer.ggml.add_eos_token", tokenizer == "t5"),
        context_length=fields.number(f"{architecture}.context_length"),
        chat_template=fields.text("tokenizer.chat_template"),
        block_count=block_count,
        embedding_length=embedding_length,
        head_count=head_count,
        head_count_kv=head_count_kv,
        key_length=fields.number(f"{architecture}.attention.key_length") or head_length,
        value_length=fields.number(f"{architecture}.attention.value_length") or head_length,
        sliding_window=fields.number(f"{architecture}.attention.sliding_window") or None,
        memory=_memory(file, architecture, head_count_kv),
        tokens=tokens,
        token_types=fields.array(vocabulary[1]),
        kept_ids=kept,
    )


def _whole_id(token: int | None, kept: ArrayView | None) -> int | None:
    """Return the id in the whole vocabulary of what a file numbers by its own."""
    if token is None or kept is None:
        return token
    ids = read_numbers(kept)
    return int(ids[token]) if token < len(ids) else None


def _file_type(fields: _Fields) -> str:
    code = fields.number("general.file_type")
    if code is None:
        return "unknown"
    return _FILE_TYPES.get(code & 0x3FF, f"type {code}")


def _dominant_type(file: GGUFFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors:
        sizes[tensor.type_name] += tensor.data_bytes
    return sizes.most_common(1)[0][0]


def _memory(
    file: GGUFFile, architecture: str, head_count_kv: tuple[int, ...]
) -> Literal["attention", "hybrid", "recurrent"]:
    prefixes = tuple(f"{architecture}.{key}" for key in _RECURRENT_KEYS)
    if not any(key.startswith(prefixes) for key in file.metadata):
        return "attention"
    return "hybrid" if any(head_count_kv) else "recurrent"


@dataclass(frozen=True, slots=True)
class _Fields:
    """Metadata by key, with the type each must have."""

    file: GGUFFile

    def text(self, key: str) -> str | None:
        value = self.file.metadata.get(key)
        return value if value is None or isinstance(value, str) else self._wrong(key, "text")

    def number(self, key: str) -> int | None:
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return self._wrong(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(key, default)
        return value if isinstance(value, bool) else self._wrong(key, "true or false")

    def array(self, key: str) -> ArrayView | None:
        value = self.file.metadata.get(key)
        return value if value is None or isinstance(value, ArrayView) else self._wrong(key, "an array")

    def per_layer(self, key: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """A number for every layer, which files give as one number or as an array."""
        value = self.file.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, ArrayView):
            number = self.number(key)
            return (0 if number is None else number,) * layers
        numbers = tuple(int(number) for number in read_numbers(value))
        whole = len(numbers) == layers and min(numbers) >= 0
        return numbers if whole else self._wrong(key, f"{layers} numbers")

    def required_text(self, key: str) -> str:
        value = self.text(key)
        return self._wrong(key, "text") if value is None else value

    def required_number(self, key: str) -> int:
        value = self.number(key)
        # The file has at least one tensor per layer and one weight per dimension: a bound on what to believe.
        return self._wrong(key, "a plausible number") if not value or value > self.file.file_bytes else value

    def _wrong(self, key: str, expected: str) -> Never:
        value = self.file.metadata.get(key)
        found = "missing" if value is None else repr(value)[:60]
        if isinstance(value, ArrayView):
            found = f"an array of {value.count}"
        raise InvalidModelFileError(
            f"{self.file.path} is damaged or incomplete: {key!r} is {found} where {expected} belongs; fetch it again"
        )
