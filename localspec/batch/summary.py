"""What a run did, and how much faster than one row after the other without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Final

from localspec.generation import Stats

__all__ = ["MIN_SAMPLE_ROWS", "MIN_SAMPLE_TOKENS", "PlainSpeed", "Summary", "Tally", "implied_acceptance"]

MIN_SAMPLE_ROWS: Final = 3
MIN_SAMPLE_TOKENS: Final = 64
"""Less shows no speed: a stall, or the first pass of a cold cache, would be most of it."""

_TIMES: Final = ("prefill_s", "draft_s", "verify_s", "sampling_s", "wall_s")


@dataclass(frozen=True, slots=True)
class PlainSpeed:
    """What plain decoding of one row at a time takes, in seconds: medians over a sample of rows.

    Attributes:
        num_rows: rows of the sample.
        num_tokens: tokens of their answers.
        prompt_token_s: per prompt token read, the answer's first token included.
        token_s: per further token of an answer.
    """

    num_rows: int
    num_tokens: int
    prompt_token_s: float
    token_s: float

    @classmethod
    def of(cls, sample: Sequence[Stats]) -> PlainSpeed | None:
        """Return the speed of a sample; None if it is too small to show one.

        A row counts by the tokens it read or decoded: a prompt that was in the cache but for its last token tells
        what a token takes, and nothing of reading.
        """
        rows = [stats for stats in sample if stats.tokens > 1]
        num_tokens = sum(stats.tokens for stats in rows)
        if len(rows) < MIN_SAMPLE_ROWS or num_tokens < MIN_SAMPLE_TOKENS:
            return None
        read = [_read(stats) for stats in rows]
        return cls(
            num_rows=len(rows),
            num_tokens=num_tokens,
            prompt_token_s=_median([s.prefill_s / n for s, n in zip(rows, read, strict=True)], read),
            token_s=_median([s.wall_s / (s.tokens - 1) for s in rows], [s.tokens - 1 for s in rows]),
        )

    def seconds(self, stats: Stats, num_answers: int) -> float:
        """Return how long so many answers would take, from the first request to the last token.

        Of prompts only what was read is charged: one that shares its beginning with another is not read whole there
        either.
        """
        return _read(stats) * self.prompt_token_s + (stats.tokens - num_answers) * self.token_s


def _read(stats: Stats) -> int:
    return stats.prompt_tokens - stats.reused_tokens


def _median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the least value that, with those below it, has half of the weight."""
    pairs = sorted(zip(values, weights, strict=True))
    below = accumulate(weight for _, weight in pairs)
    return next(value for (value, _), so_far in zip(pairs, below, strict=True) if 2 * so_far >= sum(weights))


@dataclass(slots=True)
class Tally:
    """The rows that have their line on disk.

    Attributes:
        total: rows of the prompt file; None where only its end will tell.
        resumed: rows that earlier runs did.
        answers: rows answered in this run.
        errors: rows of this run that ended in an error.
        stats: of all answers of this run together.
        elapsed_s: from the first request to now.
    """

    total: int | None
    resumed: int = 0
    answers: int = 0
    errors: int = 0
    stats: Stats = field(default_factory=Stats)
    elapsed_s: float = 0.0

    def add(self, stats: Stats) -> None:
        """Count an answer."""
        self.answers += 1
        total = self.stats
        for name in ("prompt_tokens", "reused_tokens", "tokens", "steps", "drafted", "accepted", *_TIMES):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for mine, theirs in ((total.drafted_at, stats.drafted_at), (total.accepted_at, stats.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for i, count in enumerate(theirs):
                mine[i] += count

    @property
    def done(self) -> int:
        """Rows that have their line, whichever run wrote it."""
        return self.resumed + self.answers + self.errors

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second, reading prompts included."""
        return self.stats.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def accepted_per_step(self) -> float:
        """Drafted tokens accepted, per step of a sequence."""
        return self.stats.accepted / self.stats.steps if self.stats.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run as ``--summary`` writes it.

    Attributes:
        complete: whether every row has its line.
        rows: lines of the prompt file; None if its end was not reached and the number not known.
        resumed: of these, done by earlier runs.
        answers: answered in this run.
        errors: errors of this run.
        all_errors: errors in the whole output.
        prompt_tokens: tokens of the prompts answered.
        tokens: emitted.
        elapsed_s: from the first request to the last answer, loading excluded.
        tokens_per_s: emitted tokens per second of it.
        rows_per_s: answers per second.
        tokens_per_step: emitted per target pass and sequence.
        accepted_per_step: of these drafted.
        acceptance_rate: α, see ``implied_acceptance``; None if nothing was drafted.
        parallel: B, the sequences that ran together; None if that is not known.
        num_draft_tokens: γ, tokens drafted per step and sequence, on average.
        plain_tokens_per_s: of plain decoding, one row at a time, for rows like these; None if it was not measured.
        speedup_over_plain: how many times longer that would have taken, reading prompts included on both sides.
        sample_rows: how many rows were decoded plainly to know that.
        sample_tokens: tokens of their answers.
        no_speedup_because: why there is no ``speedup_over_plain``; None if there is.
    """

    complete: bool
    rows: int | None
    resumed: int
    answers: int
    errors: int
    all_errors: int
    prompt_tokens: int
    tokens: int
    elapsed_s: float
    tokens_per_s: float
    rows_per_s: float
    tokens_per_step: float
    accepted_per_step: float
    acceptance_rate: float | None
    parallel: int | None
    num_draft_tokens: float
    plain_tokens_per_s: float | None
    speedup_over_plain: float | None
    sample_rows: int
    sample_tokens: int
    no_speedup_because: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def implied_acceptance(drafted_at: Sequence[int], accepted_at: Sequence[int]) -> float | None:
    """Return the α that would make as many tokens stand as did, if all positions were alike.

    A token at position i of a step stands with probability α^i, so α solves
    Σ_i drafted_at[i]·α^i = Σ_i accepted_at[i]. Accepted over drafted is less than α: it counts tokens behind a
    rejected one.

    >>> round(implied_acceptance([100, 100], [80, 64]), 6)
    0.8
    """
    accepted = sum(accepted_at)
    if not sum(drafted_at):
        return None
    low, high = 0.0, 1.0
    for _ in range(53):
        alpha = (low + high) / 2
        expected = sum(count * alpha**i for i, count in enumerate(drafted_at, 1))
        low, high = (alpha, high) if expected < accepted else (low, alpha)
    return (low + high) / 2
