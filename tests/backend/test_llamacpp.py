"""The llama.cpp backend on tiny made-up models; what any backend has to do with a real one is in test_contract.py."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import Span, can_roll_back
from localspec.backend.binding import show_native_log
from localspec.backend.llamacpp import BINDING, LlamaContext, LlamaModel
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import (
    EvaluationError,
    InvalidOptionError,
    RollbackError,
    UnsupportedModelError,
)
from localspec.generation import Request
from localspec.policy import FixedPolicy
from localspec.sampling import SamplingParams
from tests.backend.tiny_models import TOKENS, write_llama, write_mamba, write_unknown
from tests.backends import close
from tests.fakes import scripted

GREEDY = SamplingParams(temperature=0)
LETTERS = [TOKENS.index(letter) for letter in "abcdefghijklmnop"]

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
    show_native_log(True)
    try:
        LlamaContext(mamba, capacity=8, threads=1)
    finally:
        show_native_log(False)
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
    with pytest.raises(InvalidOptionError, match=f"{length} tokens? of sequence {source} cannot be copied"):
        context.copy(source, sequence, length)
    assert (context.length(0), context.length(1)) == (3, 0)


def test_more_sequences_than_a_pass_holds_tokens(tmp_path: Path) -> None:
    num_sequences = BINDING.max_pass + 2
    model = LlamaModel(write_llama(tmp_path / "tiny.gguf"))
    context = LlamaContext(model, capacity=4, num_sequences=num_sequences, threads=1)
    rows = context.decode([Span(sequence, LETTERS[:2], 1) for sequence in range(num_sequences)])
    assert close(rows, rows[:1].repeat(num_sequences, axis=0))
    assert context.length(num_sequences - 1) == 2


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
