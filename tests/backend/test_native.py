"""Contexts on a made-up library: how batches are cut into passes, and what is known of lengths."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localspec.backend import Span
from localspec.backend.binding import ContextSettings
from localspec.backend.ik_layout import Batch
from localspec.backend.native import NativeContext
from localspec.checking.ledger import Ledger
from localspec.errors import EvaluationError, OutOfMemoryError
from localspec.plans import EvaluationPlan, PlannedContext

SIZE = 8


class FakeBinding:
    """Its logits of a token: the token, its position and its sequence, in the first three columns."""

    name = "fake"
    newer = "nothing"
    batch_type = Batch
    max_pass = 10

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.passes: list[list[int]] = []  # of which sequence each token was
        self.code = 0
        self.room = 99  # of the largest hole
        self.asked = 0
        self.logits = np.zeros((64, SIZE), np.float32)

    def new_context(self, model: Any, settings: ContextSettings) -> Any:
        return 1

    def free_context(self, context: Any) -> None: ...

    def length(self, context: Any, sequence: int) -> int:
        self.asked += 1
        return self.held.get(sequence, 0)

    def truncate(self, context: Any, sequence: int, length: int) -> bool:
        self.held[sequence] = length
        return True

    def decode(self, context: Any, batch: Any) -> int:
        if self.code:
            return self.code
        if batch.n_tokens > self.room:
            return 1
        sequences = [batch.seq_id[i][0] for i in range(batch.n_tokens)]
        row = 0
        for i, sequence in enumerate(sequences):
            assert batch.pos[i] == self.held.get(sequence, 0)
            self.held[sequence] = batch.pos[i] + 1
            if batch.logits[i]:
                self.logits[row, :3] = batch.token[i], batch.pos[i], sequence
                row += 1
        self.passes.append(sequences)
        return 0

    def logits_address(self, context: Any) -> int:
        return self.logits.ctypes.data


def opened(binding: Any, num_sequences: int = 4) -> NativeContext:
    model: Any = SimpleNamespace(
        binding=binding,
        pointer=1,
        path=Path("fake.gguf"),
        vocabulary=SimpleNamespace(size=SIZE),
        close=SimpleNamespace(alive=True),
    )
    return NativeContext(model, capacity=100, num_sequences=num_sequences, threads=1)


def rows(logits: Any) -> list[tuple[int, ...]]:
    return [tuple(int(x) for x in row[:3]) for row in logits]


def test_a_batch_that_fits_is_one_pass() -> None:
    binding = FakeBinding()
    context = opened(binding)
    got = context.decode([Span(0, [1, 2, 3], 2), Span(2, [4, 5, 0], 1, 1)])
    assert binding.passes == [[0, 0, 0, 2, 2, 2]]
    assert rows(got) == [(2, 1, 0), (3, 2, 0), (5, 1, 2)]


def test_sequences_share_passes_and_none_is_cut_that_fits_one() -> None:
    binding = FakeBinding()
    got = opened(binding).decode([Span(s, [1, 2, 3, 4], 4) for s in range(4)])
    assert binding.passes == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]
    assert rows(got) == [(i + 1, i, s) for s in range(4) for i in range(4)]


@pytest.mark.parametrize("num_rows", [0, 1, 12, 23])
@pytest.mark.parametrize("padding", [0, 2, 11])
def test_a_long_span_is_cut_with_its_rows_and_its_padding(num_rows: int, padding: int) -> None:
    binding = FakeBinding()
    tokens = [i % SIZE for i in range(23)]
    got = opened(binding).decode([Span(1, [7, 7], 1), Span(0, [*tokens, *[0] * padding], num_rows, padding)])
    assert all(len(one) <= 10 for one in binding.passes)
    assert sum(map(len, binding.passes)) == 25 + padding
    assert rows(got) == [(7, 1, 1)] + [(tokens[i], i, 0) for i in range(23 - num_rows, 23)]


def test_lengths_are_asked_for_once_and_after_anything_that_went_wrong() -> None:
    binding = FakeBinding()
    context = opened(binding)
    context.decode([Span(0, [1, 2, 3], 1)])
    asked = binding.asked
    for _ in range(5):
        context.decode([Span(0, [1], 1)])
    assert (context.length(0), binding.asked) == (8, asked)
    binding.code = -3
    with pytest.raises(EvaluationError, match="fake failed with code -3"):
        context.decode([Span(0, [1], 1)])
    binding.held[0] = 5  # as if the library had lost some
    assert context.length(0) == 5
    context.truncate(0, 2)
    binding.held[0] = 1
    assert context.length(0) == 1


def test_a_length_that_was_noted_wrongly_is_found_by_counting_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened(FakeBinding())
    ledger = Ledger(PlannedContext(context, EvaluationPlan()), "target")
    ledger.decode([Span(0, [1, 2, 3], 0)])
    monkeypatch.setattr(context, "truncate", context._lengths.__setitem__)
    ledger.truncate(0, 2)
    assert ledger.take_faults() == [
        "the target's cache holds 3 tokens after going back to 2 tokens, and should hold 2"
    ]
    assert context.length(0) == 3


def test_rows_are_views_of_the_librarys_memory() -> None:
    binding = FakeBinding()
    got = opened(binding).decode([Span(0, [3], 1)])
    binding.logits[0, 0] = 99
    assert got[0, 0] == 99
    assert ctypes.sizeof(ctypes.c_float) == got.itemsize


def test_where_room_is_in_pieces_passes_get_shorter() -> None:
    binding = FakeBinding()
    binding.room = 2
    got = opened(binding).decode([Span(0, [1, 2, 3, 4, 5], 3), Span(1, [6, 7, 0], 1, 1)])
    assert all(len(one) <= 2 for one in binding.passes)
    assert rows(got) == [(3, 2, 0), (4, 3, 0), (5, 4, 0), (7, 1, 1)]
    binding.room = 0
    with pytest.raises(OutOfMemoryError):
        opened(binding).decode([Span(2, [1, 2], 1)])
