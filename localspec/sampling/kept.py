"""Laws of a model that has logits for some ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from localspec.errors import InvalidOptionError
from localspec.sampling.chain import make_law
from localspec.sampling.laws import DenseLaw, Floats, Ids, Law, SparseLaw
from localspec.sampling.params import SamplingParams

__all__ = ["KeptIds"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds:
    """What the columns of a model's rows stand for: column i for the id ``ids[i]``.

    Attributes:
        ids: int64 [K], ascending.
        vocabulary_size: V; ids are below it.

    Raises:
        InvalidOptionError: ``ids`` is none of that.
    """

    ids: Ids
    vocabulary_size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if (
            ids.ndim != 1
            or not ids.size
            or (ids[:-1] >= ids[1:]).any()
            or ids[0] < 0
            or self.vocabulary_size <= ids[-1]
        ):
            raise InvalidOptionError(f"kept ids must ascend within 0..{self.vocabulary_size - 1}")

    def columns_below(self, vocabulary_size: int) -> int:
        """Return how many columns are of ids below ``vocabulary_size``: those come first."""
        return int(np.searchsorted(self.ids, vocabulary_size))

    def make_law(self, logits: Floats, params: SamplingParams, history: Sequence[int] | Ids = ()) -> Law:
        """Do as ``sampling.make_law`` with a row of K logits, or the first of them; all ids are those of the whole.

        The law is made over K entries and only then carried over to ids. Other ids have probability 0; biases, bans
        and penalties of theirs change nothing, though they take their place among the last tokens.
        """
        if params.penalises:
            history = self._columns(np.asarray(history, dtype=np.int64))
        law = make_law(logits, _by_column(self, params) if params.biases or params.banned else params, history)
        if isinstance(law, DenseLaw):
            return SparseLaw(self.ids[: len(law.weights)], law.weights.astype(np.float64) / law.total)
        return SparseLaw(self.ids[law.ids], law.probs)

    def widened(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows over all ids, [n, V], of rows over the kept ones, [n, K]: −inf for the others."""
        wide = np.full((len(rows), self.vocabulary_size), -np.inf, np.float32)
        wide[:, self.ids] = rows
        return wide

    def _columns(self, ids: Ids) -> Ids:
        """Return the columns of ids; K, which is none, for those that have none."""
        at = np.searchsorted(self.ids, ids)
        inside = np.minimum(at, len(self.ids) - 1)
        return np.where(self.ids[inside] == ids, inside, len(self.ids))


@lru_cache(maxsize=16)
def _by_column(kept: KeptIds, params: SamplingParams) -> SamplingParams:
    """Return ``params`` with biases and bans by column, without those of ids that have none."""

    def columns(ids: Sequence[int]) -> list[int]:
        found: list[int] = kept._columns(np.array(ids, dtype=np.int64)).tolist()
        return found

    biases = zip(columns([token for token, _ in params.biases]), (bias for _, bias in params.biases), strict=True)
    return replace(
        params,
        logit_bias={column: bias for column, bias in biases if column < len(kept.ids)},
        banned=tuple(column for column in columns(params.banned) if column < len(kept.ids)),
    )
