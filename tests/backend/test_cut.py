"""Models with a cut vocabulary: the same logits for the kept ids, whatever is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec.backend import Span
from localspec.backend.compatibility import check_compatible
from localspec.backend.cut import CutTable, check_cuttable, open_cut, write_cut
from localspec.backend.gguf import read_gguf, read_numbers, read_raw
from localspec.backend.model_header import read_header
from localspec.backend.native import CutBatch, NativeContext, NativeModel, reads_embeddings
from localspec.backend.quantize import quantize
from localspec.backend.trim import TokenUse, choose_ids, count_tokens
from localspec.errors import (
    EvaluationError,
    IncompatibleModelsError,
    InvalidModelFileError,
    InvalidOptionError,
    UnsupportedModelError,
)
from localspec.loading import check_embeddings, load_models
from localspec.sampling import SamplingParams, law
from tests.backend.ggufs import U32, gguf, model, numbers, scalar, strings
from tests.backend.tiny_models import TOKENS, write_llama, write_mamba
from tests.backends import open_model

V = len(TOKENS)
# Nothing of this tiny model's vocabulary depends on what is kept, so letters go, and most bytes with them.
KEPT = np.array([0, 1, 2, 13, *range(30, 60), *range(262, V, 2)])
READ = [1, 263, 5, 31, 264, 200, 285, 40]  # kept and others
KEPT_ONLY = [1, 31, 40, 262]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("cut")
    whole = write_llama(directory / "whole.gguf")
    write_cut(whole, directory / "cut.gguf", KEPT, text="a test")
    return whole, directory / "cut.gguf"


@pytest.fixture
def contexts(paths: tuple[Path, Path]) -> Iterator[tuple[NativeContext, NativeContext]]:
    made = [NativeContext(open_model(path), capacity=64, num_sequences=2, threads=1) for path in paths]
    yield made[0], made[1]
    for context in made:
        context.close()
        context.model.close()


def test_rows_are_those_of_the_whole_table(paths: tuple[Path, Path]) -> None:
    whole = next(tensor for tensor in read_gguf(paths[0]).tensors if tensor.name == "token_embd.weight")
    expected = np.memmap(paths[0], "<f4", "r", offset=whole.start, shape=(V, whole.shape[0]))
    table = open_cut(paths[1])
    assert table is not None
    np.testing.assert_array_equal(table.rows(table.places[np.arange(V)]), expected)
    assert (table.places[KEPT] == np.arange(len(KEPT))).all()
    assert (table.kept.ids == KEPT).all()
    assert table.kept.vocabulary_size == V
    assert open_cut(paths[0]) is None


def test_the_header_is_about_the_whole_vocabulary(paths: tuple[Path, Path]) -> None:
    whole, cut = map(read_header, paths)
    assert cut.vocabulary_size == V
    assert read_raw(cut.tokens) == read_raw(whole.tokens)
    assert cut.token_types is not None
    assert cut.kept_ids is not None
    assert read_numbers(cut.kept_ids) == tuple(KEPT)
    assert (cut.bos_id, cut.eos_id) == (whole.bos_id, whole.eos_id) == (1, 2)
    assert cut.logits_bytes(1) == 4 * len(KEPT)
    assert whole.kept_ids is None
    check_compatible(whole, cut)


def test_special_ids_are_translated_back(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "whole.gguf")
    kept = np.array([2, *range(10, 40)])  # the end keeps its meaning under another number, the beginning goes
    write_cut(whole, tmp_path / "cut.gguf", kept, text="")
    header = read_header(tmp_path / "cut.gguf")
    assert (header.bos_id, header.eos_id) == (None, 2)
    assert read_gguf(tmp_path / "cut.gguf").metadata["tokenizer.ggml.eos_token_id"] == 0


def test_a_cut_draft_of_another_family_is_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(model(["<s>", "x", "y"]))
    with pytest.raises(IncompatibleModelsError):
        check_compatible(read_header(tmp_path / "other.gguf"), read_header(paths[1]))


def test_logits_of_kept_ids(contexts: tuple[NativeContext, NativeContext]) -> None:
    whole, cut = contexts
    assert cut.vocabulary_size == len(KEPT)
    assert cut.kept_ids is not None
    for tokens in (READ, KEPT_ONLY, READ[:1]):
        rows = [context.decode([Span(0, tokens, len(tokens))]).copy() for context in contexts]
        np.testing.assert_array_equal(rows[0][:, KEPT], rows[1])
        for context in contexts:
            context.truncate(0, 0)
    assert whole.kept_ids is None


def test_ids_and_embeddings_are_the_same(contexts: tuple[NativeContext, NativeContext]) -> None:
    _, cut = contexts
    batch = cut._batch
    assert isinstance(batch, CutBatch)
    rows = []
    for batch.by_embedding in (False, True):
        rows.append(cut.decode([Span(0, KEPT_ONLY, 4)]).copy())
        cut.truncate(0, 0)
    np.testing.assert_array_equal(rows[0], rows[1])
    batch.by_embedding = False
    assert reads_embeddings(cut)
    assert cut.length(0) == 0
    check_embeddings(cut)


def test_embeddings_that_are_read_otherwise(
    contexts: tuple[NativeContext, NativeContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cut = contexts
    rows = CutTable.rows
    monkeypatch.setattr(CutTable, "rows", lambda table, places: 5 * rows(table, places) + 1)
    with pytest.raises(UnsupportedModelError, match="does not read embeddings"):
        check_embeddings(cut)
    assert cut.length(0) == 0


def test_rollback_and_sequences(contexts: tuple[NativeContext, NativeContext]) -> None:
    rows = []
    for context in contexts:
        context.decode([Span(0, READ[:3], 0), Span(1, READ[3:6], 0)])
        context.truncate(0, 2)
        context.decode([Span(1, READ[:1], 1), Span(0, READ[6:8], 2)])
        context.truncate(1, 1)
        rows.append(context.decode([Span(0, [41], 1), Span(1, [286], 1)]).copy())
        assert (context.length(0), context.length(1)) == (5, 2)
    np.testing.assert_allclose(rows[0][:, KEPT], rows[1], atol=1e-5)


def test_ids_out_of_range(contexts: tuple[NativeContext, NativeContext]) -> None:
    with pytest.raises(EvaluationError, match=f"not in 0..{V - 1}"):
        contexts[1].decode([Span(0, [V], 1)])


def test_a_target_is_not_cut(paths: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="it can draft, not answer"):
        load_models(target=paths[1], draft=paths[0])


def test_a_file_that_lost_its_other_rows(paths: tuple[Path, Path], tmp_path: Path) -> None:
    table = next(tensor for tensor in read_gguf(paths[1]).tensors if tensor.name == "token_embd.weight")
    short = tmp_path / "short.gguf"
    short.write_bytes(paths[1].read_bytes()[: table.start + table.data_bytes + 64])
    with pytest.raises(InvalidModelFileError, match="make it again with `localspec models trim`"):
        open_cut(short)


def test_a_cut_file_is_neither_cut_nor_quantised(paths: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has a cut vocabulary already"):
        check_cuttable(paths[1])
    with pytest.raises(InvalidOptionError, match="quantise the file it was made from"):
        quantize(paths[1], tmp_path / "q.gguf", "Q8_0", threads=1)


def test_files_that_cannot_be_cut(tmp_path: Path) -> None:
    (tmp_path / "bare.gguf").write_bytes(model(["a", "b", "c"]))
    with pytest.raises(UnsupportedModelError, match="has no embedding for each token"):
        check_cuttable(tmp_path / "bare.gguf")
    tokens = strings("tokenizer.ggml.tokens", list("abcdefg"))
    tensors = [("token_embd.weight", (32, 7), 0, 896), ("per_layer_token_embd.weight", (64, 7), 0, 1792)]
    (tmp_path / "more.gguf").write_bytes(gguf([tokens], tensors))
    with pytest.raises(UnsupportedModelError, match=r"'per_layer_token_embd\.weight' says something about every id"):
        check_cuttable(tmp_path / "more.gguf")
    (tmp_path / "odd.gguf").write_bytes(gguf([tokens], [("token_embd.weight", (64, 7), 40, 252)]))  # NVFP4
    try:
        check_cuttable(tmp_path / "odd.gguf")
    except UnsupportedModelError as error:
        assert "NVFP4" in str(error)  # noqa: PT017 — a newer gguf reads it


def test_metadata_of_a_cut_file(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(7)]
    metadata = [
        scalar("general.alignment", U32, 64),
        strings("tokenizer.ggml.tokens", tokens),
        numbers("tokenizer.ggml.scores", 6, range(7)),
        strings("tokenizer.ggml.merges", ["t 0", "t 1"]),
        scalar("some.vocab_size", U32, 7),
        scalar("tokenizer.ggml.eos_token_id", U32, 5),
        scalar("tokenizer.ggml.padding_token_id", U32, 1),
    ]
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(gguf(metadata, [("token_embd.weight", (16, 7), 0, 448)]))
    write_cut(whole, tmp_path / "cut.gguf", np.array([0, 2, 5]), text="text")
    file = read_gguf(tmp_path / "cut.gguf")
    assert file.metadata["some.vocab_size"] == 3
    assert file.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert "tokenizer.ggml.padding_token_id" not in file.metadata
    assert file.metadata["localspec.cut.text"] == "text"
    assert read_numbers(file.metadata["tokenizer.ggml.scores"]) == (0, 2, 5)  # type: ignore[arg-type]
    assert file.metadata["tokenizer.ggml.merges"].count == 1  # type: ignore[union-attr]
    assert [tensor.shape for tensor in file.tensors] == [(16, 3)]
    assert file.tensors[0].start % 64 == 0


# --- which ids ----------------------------------------------------------------------------------------------------


def test_chosen_by_use_then_by_number() -> None:
    use = TokenUse(((90, 80, 70), (70, 60, 50)), (99,))
    types = [3 if token in (10, 11) else 6 if token == 12 else 1 for token in range(100)]
    chosen = choose_ids(use, keep=9, vocabulary_size=100, token_types=types)
    assert chosen.tolist() == [10, 11, 12, 50, 60, 70, 80, 90, 99]
    assert choose_ids(use, keep=12, vocabulary_size=100, token_types=types).tolist()[:3] == [0, 1, 2]
    assert choose_ids(use, keep=6, vocabulary_size=100, token_types=types).tolist() == [10, 11, 12, 80, 90, 99]


@pytest.mark.parametrize("keep", [-3, 0, 4, 100, 200])
def test_numbers_that_cannot_be_kept(keep: int) -> None:
    types = [3 if token < 4 else 1 for token in range(100)]
    with pytest.raises(InvalidOptionError, match="ids cannot be kept; use a number between 4,"):
        choose_ids(TokenUse((), ()), keep=keep, vocabulary_size=100, token_types=types)


def test_tokens_are_counted_by_the_models_tokenizer(tmp_path: Path) -> None:
    use = count_tokens(write_llama(tmp_path / "m.gguf"), [["abba b"], ["c"]])
    a, b, c = (TOKENS.index(letter) for letter in "abc")
    assert use.rankings[0] == (b, TOKENS.index("▁"), a)
    assert c in use.rankings[1]
    assert use.ending == (2,)


def test_a_model_that_llamacpp_cannot_load(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model(["a", "b"]))
    with pytest.raises(UnsupportedModelError, match="cannot be counted"):
        count_tokens(broken, [["a"]])


def test_a_recurrent_model_is_cut_as_well(tmp_path: Path) -> None:
    whole = write_mamba(tmp_path / "whole.gguf")
    write_cut(whole, tmp_path / "cut.gguf", KEPT, text="")
    assert read_header(tmp_path / "cut.gguf").memory == "recurrent"


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NativeModel, NativeModel, np.ndarray]]:
    path = tmp_path_factory.mktemp("cut") / "smollm2.gguf"
    whole = open_model(smollm2_path)
    header = read_header(smollm2_path)
    text = "The quick brown fox jumps over the lazy dog. def main(): return 0"
    use = TokenUse((tuple(whole.vocabulary.tokenize(text)),), (whole.vocabulary.size - 1,))
    types = read_numbers(header.token_types) if header.token_types else ()
    kept = choose_ids(use, keep=8192, vocabulary_size=header.vocabulary_size, token_types=types)
    write_cut(smollm2_path, path, kept, text=text)
    cut = open_model(path)
    yield whole, cut, kept
    for each in (whole, cut):
        each.close()


TEXT = (
    "Photosynthesis converts sunlight, carbon dioxide and water into glucose; stromatolites are its oldest witnesses."
    " Übermäßig 日本語 🙂 <|im_start|> def quicksort(xs): return xs if len(xs) < 2 else ..."
)


@pytest.mark.model
def test_real_logits_of_kept_ids(smollm2: tuple[NativeModel, NativeModel, np.ndarray]) -> None:
    whole, cut, kept = smollm2
    contexts = [NativeContext(each, capacity=256, threads=1) for each in (whole, cut)]
    tokens = whole.vocabulary.tokenize(TEXT)
    assert set(tokens) - set(kept.tolist()), "nothing is read that is not kept"
    for sizes in ([len(tokens)], [1] * 24, [5, 3, 2] * 3):
        at = 0
        for size in sizes:
            part = tokens[at : at + size]
            at += size
            rows = [context.decode([Span(0, part, len(part))]).copy() for context in contexts]
            np.testing.assert_array_equal(rows[0][:, kept], rows[1])
        for context in contexts:
            context.truncate(0, 0)
    assert reads_embeddings(contexts[1])
    for context in contexts:
        context.close()


@pytest.mark.model
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.8, top_k=40)]
)
def test_what_a_cut_costs_on_real_rows(
    smollm2: tuple[NativeModel, NativeModel, np.ndarray], smollm2_q4_0_path: Path, params: SamplingParams
) -> None:
    """α' ≥ α − Σ min(p, q) over the ids cut off, for a target that is another quantisation of the draft."""
    whole, cut, kept = smollm2
    target = open_model(smollm2_q4_0_path)
    contexts = [NativeContext(each, capacity=256, threads=1) for each in (target, whole, cut)]
    tokens = whole.vocabulary.tokenize(TEXT)
    rows = [context.decode([Span(0, tokens, len(tokens))]).copy() for context in contexts]
    ids = contexts[2].kept_ids
    assert ids is not None
    outside = np.ones(whole.vocabulary.size, np.bool_)
    outside[kept] = False
    lost = []
    for p_row, q_row, cut_row in zip(*rows, strict=True):
        p, q = law(p_row, params), law(q_row, params)
        both = np.minimum(p, q)
        after = np.minimum(p, ids.make_law(cut_row, params).dense(len(p))).sum()
        assert after >= both.sum() - both[outside].sum() - 1e-6
        lost.append(both.sum() - after)
    assert max(lost) > 0.05, "nothing that matters was cut off"
    for each in (*contexts, target):
        each.close()


@pytest.mark.model
def test_real_rollback(smollm2: tuple[NativeModel, NativeModel, np.ndarray]) -> None:
    whole, cut, kept = smollm2
    context = NativeContext(cut, capacity=256, threads=1)
    tokens = whole.vocabulary.tokenize(TEXT)
    fresh = [context.decode([Span(0, [token], 1)])[0].copy() for token in tokens[:30]]
    context.truncate(0, 0)
    for depth in range(2, 30, 3):
        context.truncate(0, 0)
        for token in tokens[:depth]:
            context.decode([Span(0, [token], 0)])
        context.decode([Span(0, tokens[-3:], 3)])
        context.decode([Span(0, kept[:2].tolist(), 2)])
        context.truncate(0, depth)
        np.testing.assert_array_equal(context.decode([Span(0, [tokens[depth]], 1)])[0], fresh[depth])
    context.close()


@pytest.mark.model
def test_gemma_is_read_by_embeddings(gemma_path: Path, tmp_path: Path) -> None:
    """It scales embeddings that it looks up, and not those it is given."""
    header = read_header(gemma_path)
    types = read_numbers(header.token_types) if header.token_types else ()
    kept = choose_ids(TokenUse((), (1, 106)), keep=16384, vocabulary_size=header.vocabulary_size, token_types=types)
    write_cut(gemma_path, tmp_path / "cut.gguf", kept, text="")
    whole, cut = (open_model(path) for path in (gemma_path, tmp_path / "cut.gguf"))
    contexts = [NativeContext(each, capacity=64, threads=1) for each in (whole, cut)]
    tokens = [2, *whole.vocabulary.tokenize("Stromatolites are the oldest witnesses of photosynthesis.")]
    rows = [context.decode([Span(0, tokens, 3)]).copy() for context in contexts]
    np.testing.assert_array_equal(rows[0][:, kept], rows[1])
    assert reads_embeddings(contexts[1]) or contexts[1].length(0)
    for each in (*contexts, whole, cut):
        each.close()
