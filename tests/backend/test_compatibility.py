"""Which draft may draft for which target, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.backend.compatibility import MAX_PADDING, check_compatible
from localspec.backend.model_header import ModelHeader, read_header
from localspec.errors import IncompatibleModelsError
from tests.backend.ggufs import BOOL, U32, header, scalar

TOKENS = ["<|endoftext|>", "a", "b", "cd", "é"]
BOS = (scalar("tokenizer.ggml.bos_token_id", U32, 0), scalar("tokenizer.ggml.add_bos_token", BOOL, True))


@pytest.fixture
def make(tmp_path: Path):
    def make(name: str, tokens=TOKENS, *extra, **options) -> ModelHeader:
        return header(tmp_path / f"{name}.gguf", tokens, *extra, **options)

    return make


def refusal(target: ModelHeader, draft: ModelHeader) -> str:
    with pytest.raises(IncompatibleModelsError) as caught:
        check_compatible(target, draft)
    message = str(caught.value)
    assert "\n" not in message
    assert f"target.gguf ({target.vocabulary_size:,} tokens)" in message
    assert f"draft.gguf ({draft.vocabulary_size:,} tokens)" in message
    return message


def test_the_same_vocabulary(make) -> None:
    check_compatible(make("target"), make("draft"))


def test_one_token_that_differs_is_named_with_both_texts(make) -> None:
    message = refusal(make("target"), make("draft", [*TOKENS[:3], "xy", "é"]))
    assert "the first token that differs is 3: 'cd' against 'xy'" in message


def test_a_token_that_differs_in_a_byte_that_is_no_utf8(make) -> None:
    message = refusal(make("target", [*TOKENS, b"\xff"]), make("draft", [*TOKENS, b"\xfe"]))
    assert r"'\\xff' against '\\xfe'" in message


@pytest.mark.parametrize("longer", ["target", "draft"])
@pytest.mark.parametrize(
    ("piece", "kind"), [("[PAD5]", 1), ("<unused5>", 1), ("anything", 5), ("<|reserved_special_token_5|>", 3)]
)
def test_sizes_may_differ_by_padding(make, longer: str, piece: str, kind: int) -> None:
    types = [1] * len(TOKENS)
    short, long = make("short", types=types), make("long", [*TOKENS, piece], types=[*types, kind])
    check_compatible(*((long, short) if longer == "target" else (short, long)))


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_sizes_may_not_differ_by_tokens_that_mean_something(make, longer: str) -> None:
    models = {"target": make("target"), "draft": make("draft")}
    models[longer] = make(longer, [*TOKENS, "[PAD5]", "hello"])
    message = refusal(models["target"], models["draft"])
    assert f"only the {longer} has token 6, 'hello'" in message


def test_padding_has_an_end(make) -> None:
    padding = [f"[PAD{i}]" for i in range(MAX_PADDING + 1)]
    check_compatible(make("target", TOKENS + padding[:-1]), make("draft"))
    assert f"differ by {MAX_PADDING + 1:,}" in refusal(make("target", TOKENS + padding), make("draft"))


def test_another_tokenizer_over_the_same_tokens(make) -> None:
    message = refusal(make("target"), make("draft", tokenizer="llama"))
    assert "tokenizer 'gpt2' against 'llama'" in message
    message = refusal(make("target"), make("draft", pre="llama-bpe"))
    assert "pre-tokenizer 'qwen2' against 'llama-bpe'" in message
    check_compatible(make("target"), make("draft", pre=None))


def test_bos_and_eos_must_be_handled_alike(make) -> None:
    message = refusal(make("target", TOKENS, *BOS), make("draft"))
    assert "the target adds token 0 as BOS, the draft no BOS" in message
    eos = scalar("tokenizer.ggml.eos_token_id", U32, 1)
    # Which token ends a text does not matter to the draft, only what is added to a prompt.
    check_compatible(make("target", TOKENS, eos), make("draft"))
    added = scalar("tokenizer.ggml.add_eos_token", BOOL, True)
    assert "the draft token 1 as EOS" in refusal(make("target"), make("draft", TOKENS, eos, added))


@pytest.mark.model
def test_real_pairs(qwen_target_path: Path, qwen_draft_path: Path, smollm2_path: Path) -> None:
    target, draft, other = map(read_header, (qwen_target_path, qwen_draft_path, smollm2_path))
    check_compatible(target, draft)
    with pytest.raises(
        IncompatibleModelsError, match=r"151,936.*49,152.*token that differs is 0: '!' against"
    ):
        check_compatible(target, other)
