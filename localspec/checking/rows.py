"""Rows of logits recorded from the real pair, and small models that serve them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Span
from localspec.checking.ledger import Row, read_rows
from localspec.checking.noise import total_variation
from localspec.checking.subject import Subject, Text
from localspec.sampling import KeptIds, SamplingParams, make_law

__all__ = ["KEPT", "PROMPT", "START", "RecordedRows", "RowContext", "WholeRows", "reference_law"]

KEPT = 4
"""Tokens kept of a row: top-k of the replay."""

START = 2 * KEPT
"""The symbol that begins every text."""

PROMPT = START + 1
"""The symbol before it; both are no more than something to start from."""

_SIZE = PROMPT + 1
_NODES = 24
_WHOLE = 4  # places whose rows are kept as they are
_BEST_VARIATION = 0.4  # rows at which much is accepted and much rejected show most


@dataclass(frozen=True, slots=True, eq=False)
class WholeRows:
    """Rows of both models over the whole vocabulary, at neighbouring places of one text.

    Attributes:
        target: float32 [n+1, V].
        draft: the draft's, cut to ids that the target has, float32 [n, ≤ V]; −inf where it has no logits.
        tokens: what stands there in the text, n ids.
        kept: ids that the draft has logits for; None if all.
    """

    target: Row
    draft: Row
    tokens: tuple[int, ...]
    kept: KeptIds | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRows:
    """Rows of target and draft at the same places of real text, cut down to the tokens that either ranks highest.

    The tokens of a place become the symbols 0, 1, … in the order of their ids. Texts of symbols visit the places in
    an order of their own: ``after`` says which row stands behind which symbol.

    Attributes:
        target: float32 [places + 1, symbols]; the first row is certain of ``START``.
        draft: the same of the draft.
        variation: mean total variation of the two laws at temperature 1.
        whole: some of the rows as they were, of one place of each text.
    """

    target: Row
    draft: Row
    variation: float
    whole: tuple[WholeRows, ...] = ()

    @classmethod
    def record(cls, subject: Subject, texts: Sequence[Text]) -> RecordedRows:
        """Read both models' rows along ``texts``; the places that show most are kept."""
        params = SamplingParams(top_k=KEPT)
        found: list[tuple[float, tuple[Row, Row]]] = []
        whole: list[WholeRows] = []
        for text in texts:
            both = [read_rows(c, text.tokens[:-1], len(text.answer)) for c in (subject.target, subject.draft)]
            size = min(rows.shape[1] for rows in both)
            if len(text.answer) >= _WHOLE:
                tokens = text.answer[: _WHOLE - 1]
                p_rows, q_rows = both[0][:_WHOLE].copy(), both[1][: _WHOLE - 1, : both[0].shape[1]].copy()
                whole.append(WholeRows(p_rows, q_rows, tokens, subject.draft.kept_ids))
            for p, q in zip(both[0][:, :size], both[1][:, :size], strict=True):
                one, other = make_law(p, params), make_law(q, params)
                ids = np.flatnonzero(one.dense(size) + other.dense(size))
                found.append((total_variation(one, other), (_cut(p, ids), _cut(q, ids))))
        found.sort(key=lambda entry: abs(entry[0] - _BEST_VARIATION))
        kept = found[:_NODES]
        first = np.full((1, _SIZE), -np.inf, np.float32)
        first[0, START] = 0.0
        p_rows, q_rows = (np.concatenate([first, *(entry[1][i][None] for entry in kept)]) for i in (0, 1))
        return cls(p_rows, q_rows, float(np.mean([entry[0] for entry in kept])), tuple(whole))

    def disagreeing(self) -> RecordedRows:
        """Return the same with the draft's rows of other places: a draft that is mostly wrong, and often sure."""
        return replace(self, draft=np.concatenate([self.draft[:1], np.roll(self.draft[1:], 1, axis=0)]))

    def after(self, place: int, symbol: int) -> int:
        """Return the place that follows ``place`` when ``symbol`` stands there; 0 is before the start."""
        return 0 if symbol == PROMPT else 1 + (31 * place + 17 * symbol + symbol * symbol) % (len(self.target) - 1)

    def place(self, symbols: Sequence[int]) -> int:
        """Return the place after a whole text of symbols."""
        place = 0
        for symbol in symbols:
            place = self.after(place, symbol)
        return place


def _cut(row: Row, ids: NDArray[np.int64]) -> Row:
    small = np.full(_SIZE, -np.inf, np.float32)
    small[: len(ids)] = row[ids]
    return small


class RowContext:
    """A ``Context`` that serves recorded rows.

    Args:
        rows: which.
        table: ``rows.target`` or ``rows.draft``.
        capacity: tokens per sequence.
        num_sequences: how many.
    """

    chunk = 128
    kept_ids = None

    def __init__(self, rows: RecordedRows, table: Row, *, capacity: int, num_sequences: int) -> None:
        self.vocabulary_size = table.shape[1]
        self.capacity = capacity
        self.num_sequences = num_sequences
        self._rows = rows
        self._table = table
        self._places: list[list[int]] = [[] for _ in range(num_sequences)]  # after each token held

    def length(self, sequence: int) -> int:
        """Return how many tokens are held."""
        return len(self._places[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        del self._places[sequence][length:]

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let a sequence hold what another one does."""
        self._places[sequence] = self._places[source][:length]

    def decode(self, batch: Sequence[Span]) -> Row:
        """Append tokens; see ``Context.decode``."""
        chosen: list[int] = []
        for span in batch:
            places = self._places[span.sequence]
            for token in span.tokens:
                places.append(self._rows.after(places[-1] if places else 0, token))
            chosen += places[len(places) - span.rows :] if span.rows else []
        return self._table[chosen]


def reference_law(row: Row, params: SamplingParams, history: Sequence[int]) -> NDArray[np.float64]:
    """Return the law that temperature, top-k and penalties make of a row, written a second time and plainly.

    Not by ``make_law``: it is what the replay is tested against.
    """
    values = row.astype(np.float64)
    for token, count in Counter(history[-params.penalty_last_n :] if params.penalty_last_n else history).items():
        scale = params.repetition_penalty
        values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weights = np.zeros(len(values))
    for token in order[: params.top_k]:
        weights[token] = np.exp((values[token] - values[order[0]]) / params.temperature)
    law: NDArray[np.float64] = weights / weights.sum()
    return law
