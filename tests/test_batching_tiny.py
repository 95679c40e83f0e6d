"""Batches through llama.cpp itself, on models of a few kilobytes: caches shared, copied and cut as real ones are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localspec
from localspec.backend import Span
from localspec.backend.llamacpp import LlamaContext, LlamaModel
from localspec.batching import BatchRequest
from localspec.sampling import SamplingParams, record_seed
from localspec.session import Session
from tests.backend.tiny_models import TOKENS, write_llama, write_mamba

GREEDY = SamplingParams(temperature=0)
HEAD = "once upon a time there was a king who had three sons and "
LETTERS = [TOKENS.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    return write_llama(directory / "target.gguf"), write_llama(directory / "draft.gguf", seed=1)


@pytest.fixture(scope="module")
def session(paths: tuple[Path, Path]) -> Iterator[Session]:
    target, draft = paths
    with localspec.load_pair(
        target=target, draft=draft, context=256, parallel=8, threads=1, use_profile=False
    ) as pair:
        yield pair


def records(**options: object) -> list[BatchRequest]:
    return [
        BatchRequest(
            id=str(i),
            prompt=(HEAD if i % 4 else "") + "abcdefgh"[i % 8] * (i + 1),
            raw=True,
            max_tokens=12 + i % 5,
            **options,  # type: ignore[arg-type]
        )
        for i in range(24)
    ]


@pytest.mark.parametrize("parallel", [2, 4, 8])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "block"])
def test_neighbours_change_nothing(session: Session, parallel: int, num_draft_tokens: int, rule: str) -> None:
    params = GREEDY if rule == "greedy" else SamplingParams(temperature=0.9)
    settings = {"num_draft_tokens": num_draft_tokens, "rule": "block" if rule == "greedy" else rule}
    expected = {}
    for r in records():
        alone = session.generate(
            r.prompt, params, raw=True, max_tokens=r.max_tokens, seed=record_seed(5, r.id), **settings
        )
        expected[r.id] = alone.tokens
    found, reused = {}, []
    for answer in session.generate_batch(records(params=params), seed=5, parallel=parallel, **settings):
        assert answer.result is not None, answer.error
        found[answer.request.id] = answer.result.tokens
        reused.append(answer.result.stats.reused_tokens)
    assert (
        sum(found[id] != expected[id] for id in expected) <= 1
    )  # kernels round differently in passes of other sizes
    assert sum(n >= len(HEAD) - 2 for n in reused) >= 15, "the common beginning is copied"


def test_a_copied_prefix_is_as_one_that_was_read(paths: tuple[Path, Path]) -> None:
    context = LlamaContext(LlamaModel(paths[0]), capacity=64, num_sequences=3, threads=1)
    context.decode([Span(0, LETTERS[:10], 0)])
    expected = context.decode([Span(0, LETTERS[10:14], 4)]).copy()
    context.decode([Span(1, LETTERS[12:20], 0)])  # what the sequence held before is gone
    context.copy(0, 1, 10)
    context.copy(0, 2, 7)
    assert [context.length(sequence) for sequence in range(3)] == [14, 10, 7]
    context.truncate(0, 3)  # cells that are shared stay with the others
    assert np.allclose(context.decode([Span(1, LETTERS[10:14], 4)]), expected, atol=1e-3)
    assert np.allclose(context.decode([Span(2, LETTERS[7:14], 4)]), expected, atol=1e-3)
    assert np.allclose(context.decode([Span(0, LETTERS[3:14], 4)]), expected, atol=1e-3)
    context.copy(1, 0, 0)
    assert context.length(0) == 0


def test_sequences_that_add_different_numbers_of_tokens_share_a_pass(paths: tuple[Path, Path]) -> None:
    context = LlamaContext(LlamaModel(paths[0]), capacity=32, num_sequences=4, threads=1)
    counts = (1, 7, 0, 3)
    spans = [Span(s, LETTERS[s : s + count], 1) for s, count in enumerate(counts) if count]
    alone = []
    for span in spans:
        alone.append(context.decode([span])[0].copy())
        context.truncate(span.sequence, 0)
    assert np.allclose(context.decode(spans), np.array(alone), atol=1e-3)


def test_every_sequence_can_be_filled(paths: tuple[Path, Path]) -> None:
    """Also where cells of finished sequences lie scattered among those of running ones."""
    with localspec.load_pair(target=paths[0], context=256, parallel=4, threads=1) as narrow:
        requests = [
            BatchRequest(id=str(i), prompt="abcd"[i % 4] * (1 + 37 * i % 200), raw=True, params=GREEDY)
            for i in range(12)
        ]
        for answer in narrow.generate_batch(requests, seed=1, parallel=4, num_draft_tokens=0):
            assert answer.result is not None
            assert answer.result.finish_reason in ("context", "stop")


def test_room_is_made_when_it_is_needed(paths: tuple[Path, Path]) -> None:
    with localspec.load_pair(target=paths[0], draft=paths[1], context=256, threads=1, use_profile=False) as narrow:
        assert narrow.pair.target.num_sequences == 1
        stream = narrow.stream("a", raw=True, max_tokens=5, num_draft_tokens=0)
        batch = narrow.generate_batch(records(), seed=1, parallel=5)
        assert all(answer.result for answer in batch)
        assert narrow.pair.target.num_sequences == 5
        assert narrow.pair.draft is not None
        assert narrow.pair.draft.num_sequences == 5
        with pytest.raises(localspec.LocalspecError):  # its cache is gone
            next(stream)
        assert len(narrow.generate("a", raw=True, max_tokens=3, num_draft_tokens=2).tokens) <= 3


def test_a_recurrent_model_runs_in_batches_too(tmp_path: Path) -> None:
    """It shares nothing and drafts nothing."""
    with localspec.load_pair(target=write_mamba(tmp_path / "m.gguf"), context=128, threads=1) as recurrent:
        alone = {r.id: recurrent.generate(r.prompt, GREEDY, raw=True, max_tokens=8).tokens for r in records()}
        found = {}
        requests = [BatchRequest(id=r.id, prompt=r.prompt, raw=True, max_tokens=8, params=GREEDY) for r in records()]
        for parallel, order in itertools.product((2, 4), (1, -1)):
            for answer in recurrent.generate_batch(requests[::order], seed=1, parallel=parallel):
                assert answer.result is not None, answer.error
                found[answer.request.id] = answer.result.tokens
            assert sum(found[id] != alone[id] for id in alone) <= 1
