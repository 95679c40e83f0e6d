"""The contract between the engine and a model with its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from localspec.errors import RollbackError

if TYPE_CHECKING:  # what only reads headers does without numpy
    import numpy as np
    from numpy.typing import NDArray

    from localspec.sampling import KeptIds

__all__ = ["Context", "FlashAttention", "Span", "can_roll_back"]

FlashAttention = Literal["auto", "on", "off"]
"""Which attention kernel; "auto" leaves the choice to llama.cpp."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to append to one sequence.

    Attributes:
        sequence: which sequence of the context.
        tokens: ids, appended after the ``length(sequence)`` tokens already there.
        rows: how many of the last tokens get a row of logits; 0 for none. A row costs a product with the whole
            output head, so ask for no more than needed.
        padding: how many tokens at the end only fill the pass up; the rows are those of the tokens before them.
            They enter the cache like any others, and who asked for them takes them out again.
    """

    sequence: int
    tokens: Sequence[int]
    rows: int
    padding: int = 0


class Context(Protocol):
    """One model with its KV cache, holding several sequences.

    Attributes:
        vocabulary_size: V, the width of a row of logits.
        kept_ids: which ids the columns of a row are of, if the model has a cut vocabulary; it reads the others
            nonetheless. None if column i is of the id i.
        capacity: the most tokens a sequence can hold.
        num_sequences: sequences are numbered from 0 below this.
        chunk: tokens evaluated in one go; the granularity at which an interrupt is noticed.
    """

    @property
    def vocabulary_size(self) -> int: ...  # noqa: D102 — described above
    @property
    def kept_ids(self) -> KeptIds | None: ...  # noqa: D102
    @property
    def capacity(self) -> int: ...  # noqa: D102
    @property
    def num_sequences(self) -> int: ...  # noqa: D102
    @property
    def chunk(self) -> int: ...  # noqa: D102

    def length(self, sequence: int) -> int:
        """Return how many tokens the cache holds for ``sequence``; true after any failure or interrupt."""

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        """Append every span's tokens in one pass.

        Returns:
            Logits, float32 [sum of rows, V], in the order of the spans: a view, valid until the next decode.

        Raises:
            EvaluationError: the pass failed; ``length`` says what the cache still holds.
        """

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of ``sequence``; no effect when it holds no more.

        Raises:
            RollbackError: this cache cannot forget a part of a sequence.
        """

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let ``sequence``, which is emptied, hold the first ``length`` tokens of ``source`` as well.

        Nothing is evaluated; afterwards the two are independent of each other.

        Raises:
            RollbackError: this cache cannot copy a part of a sequence; ``sequence`` is empty then.
        """


def can_roll_back(context: Context, tokens: Sequence[int]) -> bool:
    """Whether forgetting the end of a sequence and going on differently gives what a fresh start gives.

    Recurrent states and sliding windows may refuse, or accept and be wrong; so it is tried, on three ``tokens``
    in sequence 0, which must be empty and is left empty. The logits of two passes over the same prefix differ by
    kernel noise, measured up to a fifth of their standard deviation; after other tokens they differ by twice that
    deviation and more.
    """
    first, second, other = tokens
    try:
        fresh: NDArray[Any] = context.decode([Span(0, [first, second], 1)])[0].copy()
        context.truncate(0, 1)
        context.decode([Span(0, [other, other], 0)])
        context.truncate(0, 1)
        again = context.decode([Span(0, [second], 1)])[0]
        difference = float(abs(again - fresh).max())
        return difference <= 0.5 * float(fresh.std())
    except RollbackError:
        return False
    finally:
        context.truncate(0, 0)
