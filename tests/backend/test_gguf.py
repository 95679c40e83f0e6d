"""The header reader: what it reads, and that nothing but its own errors comes out of damaged files."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localspec.backend import gguf as reader
from localspec.backend.gguf import ArrayView, read_gguf, read_numbers, read_strings
from localspec.backend.model_header import read_header
from localspec.errors import InvalidModelFileError, ModelError, ModelNotFoundError, UnsupportedModelError
from tests.backend.ggufs import (
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    gguf,
    model,
    numbers,
    scalar,
    string,
    strings,
    text,
)

TOKENS = ["a", "b", "ä", b"\xff\xfe", ""]
SMALL = model(TOKENS, numbers("tokenizer.ggml.scores", F32, [0.5] * 5), types=[1, 1, 1, 6, 3])


@pytest.fixture
def write(tmp_path: Path):
    def write(data: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(write, version: int) -> None:
    scalars = {
        0: 255,
        1: -1,
        2: 65535,
        3: -2,
        4: 1 << 31,
        5: -3,
        6: 0.5,
        7: True,
        10: 1 << 63,
        11: -4,
        12: 1e-300,
    }
    metadata = [scalar(f"key.{code}", code, value) for code, value in scalars.items()]
    metadata += [
        string("a.string", "größe\n"),
        strings("some.strings", TOKENS),
        numbers("some.numbers", I32, [-1, 2, 3]),
        numbers("no.numbers", F32, []),
        scalar("last", U32, 7),
    ]
    file = read_gguf(write(gguf(metadata, [("t", (256, 2, 3), 12, 864), ("u", (5,), 0, 20)], version=version)))
    assert file.version == version
    assert {code: file.metadata[f"key.{code}"] for code in scalars} == scalars
    assert file.metadata["a.string"] == "größe\n"
    assert file.metadata["last"] == 7
    view = file.metadata["some.strings"]
    assert isinstance(view, ArrayView)
    assert read_strings(view) == [token.encode() if isinstance(token, str) else token for token in TOKENS]
    assert isinstance(file.metadata["some.numbers"], ArrayView)
    assert read_numbers(file.metadata["some.numbers"]) == (-1, 2, 3)
    assert isinstance(file.metadata["no.numbers"], ArrayView)
    assert read_numbers(file.metadata["no.numbers"]) == ()
    assert [(t.name, t.shape, t.type_name, t.data_bytes, t.elements) for t in file.tensors] == [
        ("t", (256, 2, 3), "Q4_K", 864, 1536),
        ("u", (5,), "F32", 20, 5),
    ]


def test_alignment_of_the_file_is_honoured(write) -> None:
    data = gguf([scalar("general.alignment", U32, 64)], [])
    padded = data[:16] + data[16:]
    entry = text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)
    body = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + padded[24 : 24 + 8 + 17 + 8] + entry
    whole = body + bytes(-len(body) % 64) + bytes(16)
    assert read_gguf(write(whole)).tensors[0].data_bytes == 16
    with pytest.raises(InvalidModelFileError, match="cut short"):
        read_gguf(write(whole[:-1]))


def test_a_file_cut_anywhere_is_refused_in_one_line(write) -> None:
    for length in range(len(SMALL)):
        with pytest.raises(InvalidModelFileError) as caught:
            read_gguf(write(SMALL[:length]))
        assert "\n" not in str(caught.value)
        assert "fetch it again" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"GGU", "3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n  <html lang='en'>", "web page"),
        (b'{"error":"Access to model is restricted"}', "JSON"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "XML"),
        (b"PK\x03\x04" + bytes(30), "ZIP"),
        (b"\x80\x02}q\x00.", "PyTorch"),
        (b"lmgg" + bytes(30), "format before GGUF"),
        (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}' + bytes(20), "safetensors"),
        (bytes(5000), "zeros"),
        (b"hello world, this is text", "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(20), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    ],
)
def test_what_is_no_gguf_file_is_named(write, data: bytes, words: str) -> None:
    with pytest.raises(InvalidModelFileError, match=words):
        read_gguf(write(data))


def test_a_directory_a_missing_file_and_a_device(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFileError, match="is a directory"):
        read_gguf(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_gguf(tmp_path / "missing.gguf")
    if Path("/dev/null").exists():
        with pytest.raises(InvalidModelFileError, match="not a regular file"):
            read_gguf("/dev/null")


def test_paths_with_spaces_and_other_letters(write) -> None:
    assert read_gguf(write(SMALL, "mein Modell ü 模型.gguf")).version == 3


HUGE = (1 << 62, 1 << 63, (1 << 64) - 1)


@pytest.mark.parametrize("count", HUGE)
def test_absurd_counts_allocate_nothing(write, count: int) -> None:
    preamble = b"GGUF" + struct.pack("<I", 3)
    entry = text("k") + struct.pack("<II", 9, U32)
    some_strings = text("k") + struct.pack("<II", 9, STRING)
    files = [
        preamble + struct.pack("<QQ", count, 0),
        preamble + struct.pack("<QQ", 0, count),
        preamble + struct.pack("<QQ", 0, 1) + struct.pack("<Q", count) + bytes(100),
        preamble + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IQ", 8, count) + bytes(100),
        preamble + struct.pack("<QQ", 0, 1) + entry + struct.pack("<Q", count) + bytes(100),
        preamble + struct.pack("<QQ", 0, 1) + some_strings + struct.pack("<Q", count) + bytes(100),
        preamble + struct.pack("<QQ", 0, 1) + some_strings + struct.pack("<QQ", 3, count) + bytes(100),
        preamble + struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQQIQ", 2, 32, count, 0, 0) + bytes(100),
        preamble
        + struct.pack("<QQ", 1, 0)
        + text("t")
        + struct.pack("<IQQIQ", 2, 32, 1, 0, count & ~31)
        + bytes(100),
    ]
    for data in files:
        path = write(data)
        tracemalloc.start()
        with pytest.raises(InvalidModelFileError):
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ([("a.key", struct.pack("<I", 77))], [], "value type 77"),
        ([("a.key", struct.pack("<IIQ", 9, 9, 1) + bytes(40))], [], "item type 9"),
        ([scalar("a.key", U32, 1), scalar("a.key", U32, 2)], [], "twice"),
        ([scalar("general.alignment", U32, 48)], [], "power of two"),
        ([string("general.alignment", "32")], [], "power of two"),
        ([], [("t", (4,), 99, 16)], "type 99"),
        ([], [("t", (33,), 2, 18)], "shape"),
        ([], [("t", (0, 4), 0, 16)], "shape"),
        ([], [("t" * 65, (4,), 0, 16)], "tensor name"),
        ([], [("t", (1, 1, 1, 1, 1), 0, 4)], "5 dimensions"),
    ],
)
def test_what_makes_no_sense_is_named(write, metadata, tensors, words: str) -> None:
    with pytest.raises(InvalidModelFileError, match=words):
        read_gguf(write(gguf(metadata, tensors)))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, len(SMALL)),
)
def test_only_model_errors_come_out_of_damaged_headers(tmp_path: Path, flips, cut) -> None:
    data = bytearray(SMALL)
    for position, value in flips:
        data[position] = value
    _read_all(tmp_path / "f.gguf", bytes(data[:cut]))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=400))
def test_only_model_errors_come_out_of_noise(tmp_path: Path, noise: bytes) -> None:
    _read_all(tmp_path / "f.gguf", b"GGUF\x03\x00\x00\x00" + noise)


def _read_all(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        file = read_gguf(path)
        for value in file.metadata.values():
            if isinstance(value, ArrayView):
                (read_strings if value.item_type == STRING else read_numbers)(value)
    except InvalidModelFileError:
        return
    try:
        header = read_header(path)
        header.cache_bytes(4096)
    except ModelError:
        return


def test_tensor_types_agree_with_the_reference() -> None:
    constants = pytest.importorskip("gguf")
    known = {kind.value: (kind.name, *sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    shared = known.keys() & reader.TENSOR_TYPES.keys()
    assert len(shared) >= 30
    assert {code: known[code] for code in shared} == {code: reader.TENSOR_TYPES[code] for code in shared}


# What the metadata mean


def test_the_facts_of_a_header(write) -> None:
    header = read_header(
        write(
            model(
                TOKENS,
                scalar("llama.attention.head_count_kv", U32, 2),
                scalar("tokenizer.ggml.bos_token_id", U32, 1),
                scalar("tokenizer.ggml.add_bos_token", BOOL, True),
                string("tokenizer.chat_template", "{{ x }}"),
            )
        )
    )
    assert (header.architecture, header.file_type, header.tensor_type) == ("llama", "Q4_K_M", "F32")
    assert (header.vocabulary_size, header.tokenizer_model, header.tokenizer_pre) == (5, "gpt2", "qwen2")
    assert (header.bos_id, header.eos_id, header.add_bos, header.add_eos) == (1, None, True, False)
    assert (header.context_length, header.chat_template, header.parameter_count) == (2048, "{{ x }}", 32)
    assert (header.key_length, header.value_length, header.head_count_kv) == (16, 16, (2, 2))
    assert header.can_roll_back
    # 2 layers of 2 heads of 16 keys and 16 values, 2 bytes each; 300 tokens take 512 cells.
    assert header.cache_bytes(300) == 512 * 2 * 2 * (16 + 16) * 2
    assert header.logits_bytes(3) == 3 * 5 * 4


def test_lengths_and_heads_that_a_file_gives_itself(write) -> None:
    header = read_header(
        write(
            model(
                TOKENS,
                numbers("llama.attention.head_count_kv", I32, [1, 0]),
                scalar("llama.attention.key_length", U32, 24),
                scalar("llama.attention.value_length", U32, 8),
            )
        )
    )
    assert header.head_count_kv == (1, 0)
    assert header.cache_bytes(256) == 256 * 1 * (24 + 8) * 2


@pytest.mark.parametrize(
    ("tokenizer", "pre", "added"),
    [("llama", None, True), ("gpt2", "qwen2", False), ("gpt2", "llama-bpe", True)],
)
def test_bos_where_the_file_does_not_say(write, tokenizer: str, pre: str | None, added: bool) -> None:
    assert read_header(write(model(TOKENS, tokenizer=tokenizer, pre=pre))).add_bos is added


@pytest.mark.parametrize(
    ("architecture", "extra", "memory"),
    [
        (
            "mamba",
            [scalar("mamba.ssm.state_size", U32, 16), scalar("mamba.attention.head_count", U32, 0)],
            "recurrent",
        ),
        (
            "rwkv7",
            [scalar("rwkv7.wkv.head_size", U32, 64), scalar("rwkv7.attention.head_count", U32, 0)],
            "recurrent",
        ),
        ("lfm2", [scalar("lfm2.shortconv.l_cache", U32, 3)], "hybrid"),
        ("qwen3next", [scalar("qwen3next.ssm.conv_kernel", U32, 4)], "hybrid"),
        ("qwen3", [], "attention"),
    ],
)
def test_recurrent_models_cannot_roll_back(write, architecture: str, extra, memory: str) -> None:
    header = read_header(write(model(TOKENS, *extra, architecture=architecture)))
    assert header.memory == memory
    assert header.can_roll_back is (memory == "attention")
    assert header.rollback_note.startswith("yes" if memory == "attention" else "no")


def test_a_sliding_window_is_named(write) -> None:
    header = read_header(write(model(TOKENS, scalar("llama.attention.sliding_window", U32, 512))))
    assert header.can_roll_back
    assert "512" in header.rollback_note


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (string("llama.block_count", "two"), "'llama.block_count' is 'two'"),
        (scalar("llama.block_count", U32, 1 << 31), "plausible"),
        (scalar("llama.embedding_length", U32, 0), "plausible"),
        (numbers("llama.attention.head_count_kv", I32, [1, 2, 3]), "2 numbers"),
        (numbers("llama.attention.head_count_kv", I32, [1, -2]), "2 numbers"),
        (string("tokenizer.ggml.tokens", "x"), "an array"),
        (scalar("tokenizer.ggml.model", U32, 3), "text"),
        (scalar("tokenizer.ggml.add_bos_token", U32, 1), "true or false"),
        (scalar("llama.context_length", F32, 0.5), "whole number"),
    ],
)
def test_metadata_of_the_wrong_kind(write, pair, words: str) -> None:
    with pytest.raises(InvalidModelFileError, match=words):
        read_header(write(model(TOKENS, pair)))


def test_a_file_that_is_no_language_model(write) -> None:
    data = gguf([string("general.architecture", "clip"), string("general.type", "mmproj")])
    with pytest.raises(UnsupportedModelError, match="mmproj"):
        read_header(write(data))


@pytest.mark.model
def test_real_headers_agree_with_llama_cpp(smollm2_path: Path, qwen_draft_path: Path) -> None:
    import llama_cpp

    for path in (smollm2_path, qwen_draft_path):
        header = read_header(path)
        llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
        assert header.vocabulary_size == llama_cpp.llama_vocab_n_tokens(vocabulary)
        assert header.bos_id == llama_cpp.llama_vocab_bos(vocabulary)
        assert header.eos_id == llama_cpp.llama_vocab_eos(vocabulary)
        assert header.add_bos == llama_cpp.llama_vocab_get_add_bos(vocabulary)
        assert header.add_eos == llama_cpp.llama_vocab_get_add_eos(vocabulary)
        pieces = read_strings(header.tokens)
        for token in (0, 1000, header.vocabulary_size - 1):
            assert pieces[token] == llama_cpp.llama_vocab_get_text(vocabulary, token)
        llama.close()


@pytest.mark.model
def test_cache_sizes_are_those_llama_cpp_reports(smollm2_path: Path, qwen_draft_path: Path, gemma_path: Path) -> None:
    """The numbers are llama.cpp's own, from its log of a context of 300 and of 4,096 tokens (MiB)."""
    for path, small, large in (
        (smollm2_path, 11.25, 90),
        (qwen_draft_path, 6, 48),
        (gemma_path, 9, 72),
    ):
        header = read_header(path)
        assert (header.cache_bytes(300), header.cache_bytes(4096)) == (small * 2**20, large * 2**20)


@pytest.mark.model
def test_a_real_file_cut_short(smollm2_path: Path, tmp_path: Path) -> None:
    size = smollm2_path.stat().st_size
    head = smollm2_path.read_bytes()[: 3 << 20]
    for length in (0, 3, 1000, size // 2, size - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(head[:length])
        with path.open("r+b") as file:
            file.truncate(length)  # zeros after the head, which nothing reads
        with pytest.raises(InvalidModelFileError):
            read_header(path)
