"""What a run did, and how much faster than one row after the other without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from localspec.generation import Stats

__all__ = ["PlainSpeed", "Summary", "Tally", "implied_acceptance"]

_TIMES: Final = ("prefill_s", "draft_s", "verify_s", "sampling_s", "wall_s")


@dataclass(frozen=True, slots=True)
class PlainSpeed:
    """What plain decoding of one row at a time took, on a sample: seconds.

    Attributes:
        num_rows: size of the sample.
        prompt_token_s: per prompt token.
        token_s: per token of an answer.
    """

    num_rows: int
    prompt_token_s: float
    token_s: float

    @classmethod
    def of(cls, sample: Sequence[Stats]) -> PlainSpeed | None:
        """Return the speed of a sample; None if it shows none."""
        read = sum(stats.prompt_tokens - stats.reused_tokens for stats in sample)
        decoded = sum(stats.tokens - 1 for stats in sample)
        if not read or decoded <= 0:
            return None
        prefill_s, decode_s = sum(s.prefill_s for s in sample), sum(s.wall_s for s in sample)
        return cls(len(sample), prefill_s / read, decode_s / decoded)

    def seconds(self, stats: Stats) -> float:
        """Return how long answers like these would take; of a prompt that shares its beginning, only the rest."""
        read = stats.prompt_tokens - stats.reused_tokens
        return read * self.prompt_token_s + stats.tokens * self.token_s


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
        speedup_over_plain: how many times longer that would have taken.
        sample_rows: how many rows were decoded plainly to know that.
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
