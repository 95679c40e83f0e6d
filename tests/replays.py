"""Whether a text is what a model says: read once more, every token is the best of its row, or a near-tie there.

Passes of one token and of several run different kernels, and what they leave in the cache differs as well. So a text
is read both ways. Either reading may have its way, and where neither agrees with the text, the noise of that very row
decides: how far the two readings differ over its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.sampling import PositionNoise, SamplingParams, law

Row = NDArray[np.floating[Any]]
Score = Callable[[Row, Sequence[int]], Row]
"""From a row of logits and all that stands before it, what the emitted token is the best of; in units of logits."""

LIKELIEST = 50
LIMIT = 5.0
"""Standard deviations of a row's noise, which are 3.5 of the difference of two tokens: were that normal, a sound
build would go beyond at one near-tie in 4,000."""


def logits(row: Row, before: Sequence[int]) -> Row:
    """The score of greedy decoding."""
    return row


def race(params: SamplingParams, seed: int) -> Score:
    """The score of the coupled rule: a race against the noise of the seed."""

    def score(row: Row, before: Sequence[int]) -> Row:
        with np.errstate(divide="ignore"):
            chances = np.log(law(row, params, before))
        return params.temperature * (chances - np.log(PositionNoise(seed, len(before)).at(np.arange(len(row)))))

    return score


@dataclass(frozen=True, slots=True)
class NearTie:
    """A token that is not the best of its row.

    Attributes:
        at: which of the text.
        behind: the best, in the reading that is kinder to it.
        noise: standard deviation between the two readings.
    """

    at: int
    behind: float
    noise: float

    @property
    def excuses(self) -> bool:
        return self.behind <= LIMIT * self.noise

    @classmethod
    def of(cls, at: int, token: int, readings: Sequence[Row]) -> NearTie:
        behind = min(float(reading.max() - reading[token]) for reading in readings)
        one, other = readings
        likeliest = np.argpartition(one, -LIKELIEST)[-LIKELIEST:]
        return cls(at, behind, float((one[likeliest] - other[likeliest]).std()))


def read(context: Context, text: Sequence[int], num_rows: int, *, singly_from: int | None = None) -> list[Row]:
    """Return the last rows of a text that is read in one pass, or from there on one token at a time."""
    context.truncate(0, 0)
    if singly_from is None:
        rows = context.decode([Span(0, text, num_rows)]).copy()
    else:
        if singly_from:
            context.decode([Span(0, text[:singly_from], 0)])
        rows = np.array([context.decode([Span(0, [token], 1)])[0] for token in text[singly_from:]])
    context.truncate(0, 0)
    return list(rows[-num_rows:])


def check_replay(
    context: Context,
    prompt: Sequence[int],
    tokens: Sequence[int],
    score: Score = logits,
    *,
    prompt_singly: bool = False,
) -> list[NearTie]:
    """Assert that every token is the best of its row, near-ties aside; return these.

    Args:
        context: of the target, that nothing else uses; it is left empty.
        prompt: what the text follows.
        tokens: the text.
        score: what is best.
        prompt_singly: whether the prompt may have come token by token as well, as earlier answers do.
    """

    def scored(rows: Sequence[Row], at: int) -> Row:
        return score(rows[at], [*prompt, *tokens[:at]])

    text = [*prompt, *tokens[:-1]]
    rows = read(context, text, len(tokens))
    others = [at for at, token in enumerate(tokens) if scored(rows, at).argmax() != token]
    if not others:
        return []
    singly_from = 0 if prompt_singly else len(prompt) - 1
    again = read(context, text[: len(prompt) + others[-1]], others[-1] + 1, singly_from=singly_from)
    ties = [NearTie.of(at, tokens[at], [scored(rows, at), scored(again, at)]) for at in others]
    for tie in ties:
        assert tie.excuses, f"token {tie.at} of {len(tokens)} is not what the model says: {tie}"
    return ties


def check_same(
    context: Context, prompt: Sequence[int], plain: Sequence[int], tokens: Sequence[int], score: Score = logits
) -> list[NearTie]:
    """Assert that two texts are the same, or that where they part each is as good; return the near-ties.

    What follows the first difference is checked as well, which comparing could not.
    """
    if list(plain) == list(tokens):
        return []
    at = next((i for i, (a, b) in enumerate(zip(plain, tokens, strict=False)) if a != b), None)
    assert at is not None, "one text is the beginning of the other"
    return check_replay(context, prompt, plain[: at + 1], score) + check_replay(context, prompt, tokens, score)
