"""The llama.cpp backend: on tiny made-up models everywhere, on SmolLM2 where it is at hand."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localspec.backend import Span, can_roll_back, llamacpp
from localspec.backend.llamacpp import LlamaContext, LlamaModel, Vocabulary
from localspec.drafters import ModelDrafter, read_ahead
from localspec.engine import Engine
from localspec.errors import (
    EvaluationError,
    InvalidOptionError,
    OutOfMemoryError,
    PromptError,
    RollbackError,
    UnsupportedModelError,
)
from localspec.generation import Request
from localspec.policy import FixedPolicy
from localspec.sampling import SamplingParams
from tests.backend.tiny_models import TOKENS, write_mamba, write_unknown
from tests.fakes import scripted

GREEDY = SamplingParams(temperature=0)
LETTERS = [TOKENS.index(letter) for letter in "abcdefghijklmnop"]

LONG = 150


def close(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Whether rows are the same but for kernels, which differ with the size of a pass.

    On a row's standard deviation as the unit, that noise was measured at up to 0.09, and at 0.45 and more what rows
    after other tokens differ by (root mean squares).
    """
    assert left.shape == right.shape
    error = np.sqrt(((left - right) ** 2).mean(axis=-1))
    return bool((error < 0.15 * right.std(axis=-1)).all())


# --- a recurrent model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(write_mamba(tmp_path_factory.mktemp("mamba") / "tiny mämba.gguf"))


def test_a_recurrent_cache_says_that_it_cannot_forget(mamba: LlamaModel) -> None:
    context = LlamaContext(mamba, capacity=32, threads=1)
    assert not can_roll_back(context, LETTERS[:3])
    assert context.length(0) == 0
    context.decode([Span(0, LETTERS[:4], 0)])
    with pytest.raises(RollbackError, match=r"tiny mämba.gguf cannot go back from 4 to 2 tokens.*--no-draft"):
        context.truncate(0, 2)
    assert context.length(0) == 4
    context.truncate(0, 9)
    assert context.length(0) == 4
    context.truncate(0, 0)
    assert context.length(0) == 0


def test_a_recurrent_target_decodes_plainly(mamba: LlamaModel) -> None:
    """More than once, with prompts that begin alike; drafting for it or by it is refused, not wrong."""
    engine = Engine(LlamaContext(mamba, capacity=64, threads=1), None, ends_generation=lambda token: False)

    def tokens(prompt: list[int]) -> list[int]:
        generation = engine.start(Request(prompt=prompt, params=GREEDY, max_tokens=8, seed=1))
        while generation.finish_reason is None:
            engine.step([generation])
        return generation.tokens

    first = tokens(LETTERS[:5])
    other = tokens([*LETTERS[:3], *LETTERS[8:12]])
    assert tokens(LETTERS[:5]) == first != other
    assert len(first) == 8


@pytest.mark.parametrize("side", ["target", "draft"])
def test_speculation_with_a_recurrent_model_is_an_error(mamba: LlamaModel, side: str) -> None:
    target, draft = (LlamaContext(mamba, capacity=64, threads=1) for _ in range(2))
    drafter: Any = ModelDrafter(draft, vocabulary_size=len(TOKENS), ends_generation=lambda token: False)
    if side == "target":
        drafter = scripted(lambda prefix, position: LETTERS[len(prefix) % 7])
    engine = Engine(target, drafter, ends_generation=lambda token: False)
    asked = Request(
        prompt=LETTERS[:3],
        params=SamplingParams(temperature=5.0),
        draft_params=GREEDY,
        max_tokens=50,
        seed=1,
        policy=FixedPolicy(4),
    )
    generation = engine.start(asked)

    def finish() -> None:
        while generation.finish_reason is None:
            engine.step([generation])

    with pytest.raises(RollbackError):
        finish()


# --- what holds for any model -------------------------------------------------------------------------------------


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_unknown(tmp_path / "odd.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"odd\.gguf cannot be loaded: .*perpetuum.*newer llama-cpp-python"
    ):
        LlamaModel(path)


def test_nothing_is_printed(mamba: LlamaModel, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    context = LlamaContext(mamba, capacity=8, threads=1)
    context.decode([Span(0, LETTERS[:2], 1)])
    with pytest.raises(UnsupportedModelError):
        LlamaModel(write_unknown(tmp_path / "odd.gguf"))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_native_log_goes_to_stderr_when_asked_for(mamba: LlamaModel, capsys: pytest.CaptureFixture[str]) -> None:
    llamacpp.show_native_log(True)
    try:
        LlamaContext(mamba, capacity=8, threads=1)
    finally:
        llamacpp.show_native_log(False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "llama" in captured.err


@pytest.mark.parametrize("bad", [-1, len(TOKENS), 2**31, 2**64, -(2**40)])
def test_an_id_out_of_range_is_an_error_and_changes_nothing(mamba: LlamaModel, bad: int) -> None:
    context = LlamaContext(mamba, capacity=32, threads=1)
    context.decode([Span(0, LETTERS[:2], 0)])
    for tokens in ([bad], [LETTERS[3], bad], [LETTERS[3]] * 10 + [bad]):
        with pytest.raises(EvaluationError, match=f"{bad} is not in 0..{len(TOKENS) - 1}"):
            context.decode([Span(0, tokens, 1)])
    assert context.length(0) == 2
    row = context.decode([Span(0, LETTERS[2:3], 1)])[0].copy()
    context.truncate(0, 0)
    assert close(row, context.decode([Span(0, LETTERS[:3], 1)])[0])


def test_a_recurrent_state_is_copied_whole_or_not_at_all(mamba: LlamaModel) -> None:
    context = LlamaContext(mamba, capacity=16, num_sequences=2, threads=1)
    context.decode([Span(0, LETTERS[:5], 0)])
    with pytest.raises(RollbackError, match="cannot share the first 3 tokens"):
        context.copy(0, 1, 3)
    assert (context.length(0), context.length(1)) == (5, 0)
    context.copy(0, 1, 5)
    assert context.length(1) == 5
    rows = [context.decode([Span(sequence, LETTERS[5:6], 1)])[0].copy() for sequence in (0, 1)]
    assert close(rows[1], rows[0])


@pytest.mark.parametrize(("source", "sequence", "length"), [(0, 0, 2), (0, 1, 4), (1, 0, 1)])
def test_copies_of_what_is_not_there(mamba: LlamaModel, source: int, sequence: int, length: int) -> None:
    context = LlamaContext(mamba, capacity=16, num_sequences=2, threads=1)
    context.decode([Span(0, LETTERS[:3], 0)])
    with pytest.raises(InvalidOptionError, match=f"{length} tokens of sequence {source} cannot be copied"):
        context.copy(source, sequence, length)
    assert (context.length(0), context.length(1)) == (3, 0)


@pytest.mark.parametrize("held", [0, 3, 8])
def test_more_tokens_than_the_context_holds(mamba: LlamaModel, held: int) -> None:
    context = LlamaContext(mamba, capacity=8, threads=1)
    if held:
        context.decode([Span(0, LETTERS[:held], 0)])
    with pytest.raises(EvaluationError, match=rf"{held} \+ {9 - held} tokens exceed the context of 8"):
        context.decode([Span(0, LETTERS[: 9 - held], 1)])
    assert context.length(0) == held


def test_no_tokens_at_all(mamba: LlamaModel) -> None:
    context = LlamaContext(mamba, capacity=8, threads=1)
    for batch in ([], [Span(0, [], 0)]):
        with pytest.raises(EvaluationError):
            context.decode(batch)
    assert context.decode([Span(0, LETTERS[:2], 2)]).shape == (2, len(TOKENS))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("context", {"capacity": 0}),
        ("context", {"capacity": -5}),
        ("sequences", {"capacity": 8, "num_sequences": 0}),
        ("threads", {"capacity": 8, "threads": -1}),
        ("threads", {"capacity": 8, "threads": 0}),
        ("threads", {"capacity": 8, "threads": 4000}),
        ("threads", {"capacity": 8, "threads": (1 << 32) + 1}),
    ],
)
def test_sizes_out_of_range(mamba: LlamaModel, name: str, options: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name} is "):
        LlamaContext(mamba, **options)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    assert LlamaModel(write_mamba(tmp_path / os.fsdecode(b"t\xefny.gguf"))).vocabulary.size == len(TOKENS)


def test_what_is_closed_cannot_be_used(tmp_path: Path) -> None:
    model = LlamaModel(write_mamba(tmp_path / "m.gguf"))
    first, second = (LlamaContext(model, capacity=8, threads=1) for _ in range(2))
    vocabulary = model.vocabulary
    first.close()
    first.close()
    for use in (lambda: first.length(0), lambda: first.truncate(0, 0), lambda: first.decode([Span(0, [1], 1)])):
        with pytest.raises(InvalidOptionError, match="closed"):
            use()
    assert second.decode([Span(0, [1], 1)]).shape == (1, len(TOKENS))
    model.close()
    uses: list[Any] = [
        lambda: second.decode([Span(0, [1], 1)]),
        lambda: LlamaContext(model, capacity=8),
        lambda: model.trained_context,
        lambda: vocabulary.tokenize("a"),
        lambda: vocabulary.piece(5),
        lambda: vocabulary.marker(5),
        lambda: vocabulary.ends_generation(2),
        lambda: vocabulary.control_tokens,
    ]
    for use in uses:
        with pytest.raises(InvalidOptionError, match="closed"):
            use()
    second.close()


def test_what_nobody_holds_is_freed(tmp_path: Path) -> None:
    """Without the garbage collector: a model is a gigabyte that must not wait for it."""
    model = LlamaModel(write_mamba(tmp_path / "m.gguf"))
    context = LlamaContext(model, capacity=8, threads=1)
    context.decode([Span(0, [1], 1)])
    model.vocabulary.piece(5)
    alive = weakref.ref(model), weakref.ref(context)
    gc.disable()
    try:
        del model, context
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [-1, len(TOKENS), 2**40])
def test_no_text_for_ids_out_of_range(mamba: LlamaModel, bad: int) -> None:
    for use in (mamba.vocabulary.piece, mamba.vocabulary.marker, mamba.vocabulary.ends_generation):
        with pytest.raises(InvalidOptionError, match=f"{bad} is not in"):
            use(bad)


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LlamaModel:
    return LlamaModel(smollm2_path)


@pytest.fixture(scope="module")
def shared(smollm2: LlamaModel) -> LlamaContext:
    return LlamaContext(smollm2, capacity=512, num_sequences=3, threads=1)


@pytest.fixture
def context(shared: LlamaContext) -> Iterator[LlamaContext]:
    yield shared
    for sequence in range(shared.num_sequences):
        shared.truncate(sequence, 0)


@pytest.fixture(scope="module")
def text(smollm2: LlamaModel) -> list[int]:
    words = " ".join(f"Line {i} of the log names the number {i * i}." for i in range(40))
    return smollm2.vocabulary.tokenize(words)


@pytest.fixture(scope="module")
def long_rows(shared: LlamaContext, text: list[int]) -> NDArray[np.float32]:
    """The rows of the first LONG tokens, by passes of 50."""
    starts = range(0, LONG, 50)
    rows = [shared.decode([Span(0, text[at : at + 50], 50)]).copy() for at in starts]
    shared.truncate(0, 0)
    return np.concatenate(rows)


def one_at_a_time(context: LlamaContext, tokens: list[int], sequence: int = 0) -> NDArray[np.float32]:
    rows = [context.decode([Span(sequence, [token], 1)])[0].copy() for token in tokens]
    context.truncate(sequence, 0)
    return np.array(rows)


@pytest.mark.model
def test_rows_of_a_pass_are_those_of_single_tokens(context: LlamaContext, text: list[int]) -> None:
    tokens = text[:12]
    single = one_at_a_time(context, tokens)
    for rows in (12, 5, 1):
        together = context.decode([Span(0, tokens, rows)])
        assert together.dtype == np.float32
        assert close(together, single[12 - rows :])
        context.truncate(0, 0)
    assert context.decode([Span(0, tokens, 0)]).shape == (0, context.vocabulary_size)


@pytest.mark.model
def test_padding_fills_a_pass_and_gets_no_rows(context: LlamaContext, text: list[int]) -> None:
    expected = one_at_a_time(context, text[:6])
    filled = [*text[:6], 0, 0]
    rows = context.decode([Span(1, text[:4], 1), Span(0, filled, 3, 2)])
    assert context.length(0) == 8
    assert close(rows, expected[[3, 3, 4, 5]])


@pytest.mark.model
def test_padding_of_a_long_span(context: LlamaContext, text: list[int], long_rows: NDArray[np.float32]) -> None:
    """Passes end inside the rows, and inside the padding."""
    for padding in (10, context.chunk):
        rows = context.decode([Span(0, [*text[:LONG], *[0] * padding], 40, padding)])
        assert context.length(0) == LONG + padding
        assert close(rows, long_rows[-40:])
        context.truncate(0, 0)


@pytest.mark.model
def test_sequences_in_one_pass_do_not_see_each_other(context: LlamaContext, text: list[int]) -> None:
    pieces = [text[:7], text[20:23], text[50:61]]
    single = [one_at_a_time(context, piece, sequence) for sequence, piece in enumerate(pieces)]
    context.decode([Span(s, piece[:-2], 0) for s, piece in enumerate(pieces) if len(piece) > 2])
    assert [context.length(s) for s in range(3)] == [5, 1, 9]
    rows = context.decode([Span(2, pieces[2][-2:], 2), Span(0, pieces[0][-2:], 1), Span(1, pieces[1][-2:], 2)])
    assert [context.length(s) for s in range(3)] == [7, 3, 11]
    assert close(rows, np.concatenate([single[2][-2:], single[0][-1:], single[1][-2:]]))


@pytest.mark.model
def test_a_long_span_is_read_in_chunks(
    context: LlamaContext, text: list[int], long_rows: NDArray[np.float32]
) -> None:
    """LONG tokens are more than a pass takes; rows may straddle the passes."""
    assert context.chunk < LONG
    for rows in (100, 0):
        got = context.decode([Span(0, text[:LONG], rows), Span(1, text[:5], 1)])
        assert (context.length(0), context.length(1)) == (LONG, 5)
        assert got.shape == (rows + 1, context.vocabulary_size)
        if rows:
            assert close(got[:-1], long_rows[LONG - rows :])
        assert close(got[-1:], long_rows[4:5])
        context.truncate(0, 0)
        context.truncate(1, 0)


@pytest.mark.model
def test_going_back_gives_what_a_fresh_start_gives(context: LlamaContext, text: list[int]) -> None:
    fresh = context.decode([Span(0, [*text[:10], *text[30:33]], 3)]).copy()
    context.truncate(0, 0)
    context.decode([Span(0, text[:20], 0)])
    context.truncate(0, 10)
    assert context.length(0) == 10
    assert close(context.decode([Span(0, text[30:33], 3)]), fresh)
    context.truncate(0, 99)
    assert context.length(0) == 13


@pytest.mark.model
def test_smollm2_can_roll_back(context: LlamaContext) -> None:
    assert can_roll_back(context, [300, 400, 500])
    assert context.length(0) == 0


@pytest.mark.model
def test_a_copied_prefix_is_as_one_that_was_read(context: LlamaContext, text: list[int]) -> None:
    """And the two sequences are independent of each other from there on."""
    context.decode([Span(0, text[:20], 0)])
    expected = context.decode([Span(0, text[20:24], 4)]).copy()
    context.decode([Span(1, text[30:40], 0)])  # what the sequence held before is gone
    context.copy(0, 1, 20)
    context.copy(0, 2, 7)
    assert [context.length(sequence) for sequence in range(3)] == [24, 20, 7]
    assert close(context.decode([Span(1, text[20:24], 4)]), expected)
    context.truncate(0, 3)  # shared cells stay with the others
    assert close(context.decode([Span(2, text[7:24], 4)]), expected)
    context.truncate(1, 20)
    assert close(context.decode([Span(1, text[20:24], 4)]), expected)
    context.copy(1, 0, 0)
    assert context.length(0) == 0


@pytest.mark.model
def test_sequences_that_add_different_numbers_of_tokens_share_a_pass(context: LlamaContext, text: list[int]) -> None:
    alone = []
    for sequence, count in enumerate((1, 4, 9)):
        alone.append(context.decode([Span(sequence, text[sequence : sequence + count], 1)])[0].copy())
    for sequence in range(3):
        context.truncate(sequence, 0)
    spans = [Span(sequence, text[sequence : sequence + count], 1) for sequence, count in enumerate((1, 4, 9))]
    assert close(context.decode(spans), np.array(alone))


@pytest.mark.model
def test_capacity_is_that_of_each_sequence(smollm2: LlamaModel, text: list[int]) -> None:
    context = LlamaContext(smollm2, capacity=40, num_sequences=3, threads=1)
    for sequence in range(3):
        context.decode([Span(sequence, text[:40], 1)])
    for sequence in range(3):
        assert context.length(sequence) == 40
        with pytest.raises(EvaluationError, match=r"40 \+ 1 tokens exceed the context of 40"):
            context.decode([Span(sequence, text[:1], 1)])


@pytest.mark.model
def test_lengths_are_true_after_an_interrupt_while_reading(
    context: LlamaContext, text: list[int], long_rows: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LlamaContext._run

    def interrupted(self: LlamaContext, num_tokens: int, num_rows: int) -> NDArray[np.float32]:
        run(self, num_tokens, num_rows)
        raise KeyboardInterrupt  # as Python does once llama_decode has returned

    for held in (context.chunk, LONG - 1):
        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "_run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read_ahead(context, 0, text[: LONG - 1])
        assert context.length(0) == held
    assert close(context.decode([Span(0, text[LONG - 1 : LONG], 1)]), long_rows[-1:])


@pytest.mark.model
def test_failures_of_llama_decode_are_told_apart(
    context: LlamaContext, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, kind in ((1, OutOfMemoryError), (2, EvaluationError), (-1, EvaluationError), (-3, EvaluationError)):
        with monkeypatch.context() as patch:
            patch.setattr(llamacpp.native, "llama_decode", lambda *_, code=code: code)
            with pytest.raises(kind) as caught:
                context.decode([Span(0, text[:3], 1)])
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        assert context.length(0) == 0
    assert context.decode([Span(0, text[:3], 1)]).shape[0] == 1


# --- its vocabulary -----------------------------------------------------------------------------------------------

SAMPLES = [
    "Hello, world",
    "def f(x):\n    return x  # two  spaces\n\n\n",
    " leading and trailing ",
    "naïve Straße 漢字 🙂👩‍👩‍👧 ﷽",
    "a\0b\x01\x7f\r\n\t",
    "̈ combining first",
    "",
    "   ",
    "x" * 5000,
]


@pytest.mark.model
@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_text_survives_its_tokens(smollm2: LlamaModel, sample: str) -> None:
    vocabulary = smollm2.vocabulary
    ids = vocabulary.tokenize(sample)
    assert all(0 <= token < vocabulary.size for token in ids)
    assert b"".join(map(vocabulary.piece, ids)) == sample.encode()


@pytest.mark.model
def test_markers_in_text_of_users_stay_text(smollm2: LlamaModel) -> None:
    vocabulary = smollm2.vocabulary
    markers = vocabulary.control_tokens
    assert "<|im_start|>" in markers
    assert "<|im_end|>" in markers
    for marker, token in markers.items():
        typed = vocabulary.tokenize(f"ab{marker}cd")
        assert not set(typed) & set(markers.values())
        assert b"".join(map(vocabulary.piece, typed)).decode() == f"ab{marker}cd"
        assert vocabulary.tokenize(marker, control=True) == [token]
        assert vocabulary.piece(token) == b""
        assert vocabulary.marker(token) == marker


@pytest.mark.model
def test_ends_of_generation(smollm2: LlamaModel) -> None:
    vocabulary = smollm2.vocabulary
    assert vocabulary.ends_generation(vocabulary.control_tokens["<|im_end|>"])
    assert vocabulary.ends_generation(vocabulary.control_tokens["<|endoftext|>"])
    assert not vocabulary.ends_generation(vocabulary.control_tokens["<|im_start|>"])
    assert not vocabulary.ends_generation(vocabulary.tokenize("a")[0])


@pytest.mark.model
def test_lone_surrogates_are_refused(smollm2: LlamaModel) -> None:
    with pytest.raises(PromptError, match=r"udc80.*character 2"):
        smollm2.vocabulary.tokenize("ab\udc80")


@pytest.mark.model
def test_what_the_vocabulary_says_of_itself(smollm2: LlamaModel) -> None:
    vocabulary: Vocabulary = smollm2.vocabulary
    assert vocabulary.size == 49_152
    assert vocabulary.bos == vocabulary.control_tokens["<|im_start|>"]
    assert not vocabulary.adds_bos
    assert smollm2.trained_context == 8192
