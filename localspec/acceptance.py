"""How often drafts are accepted: from laws, and from text that the target itself has written.

Counting accepted / drafted tokens is biased, because a rejection ends the step before the positions
that would have been hard. A *transcript* is not: take text sampled from the target at the sampling
settings of interest, score it once with the draft, and keep two numbers for each token, its
probability under the target law and under the draft law. From them the expected number of steps that
speculation would have taken to emit this very text follows exactly, for every draft length and both
rules. ``docs/how-it-works.md`` derives the recursion.

Arrays are float64. N is the number of tokens in a transcript, γ the number of drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localspec.errors import InvalidOptionError

__all__ = [
    "Agreement",
    "AgreementIntervals",
    "Interval",
    "Rule",
    "Transcript",
    "acceptance_rate",
    "agreement",
    "agreement_intervals",
    "step_lengths",
    "step_starts",
    "tokens_per_step",
]

Rule = Literal["token", "block"]

# Float32 softmaxes over large vocabularies sum to 1 only to about this much.
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Transcript:
    """Probabilities of one text's tokens, under the law that wrote it and under the draft's.

    ``p_y`` and ``q_y`` are [N], N ≥ 1, kept as float64. 0 < p ≤ 1: the target cannot have written a
    token it gives no probability; a draft may well give 0. Raises InvalidOptionError otherwise.
    """

    p_y: NDArray[np.float64]
    q_y: NDArray[np.float64]

    def __post_init__(self) -> None:
        p, q = _floats(self.p_y, "p_y"), _floats(self.q_y, "q_y")
        if p.ndim != 1 or p.shape != q.shape or p.size == 0:
            raise InvalidOptionError(
                f"p_y has shape {p.shape} and q_y {q.shape}; both hold one probability per token of one text"
            )
        for name, values in (("p_y", p), ("q_y", q)):
            bad = np.flatnonzero((values < 0) | (values > 1 + _SUM_TOLERANCE))
            if bad.size:
                raise InvalidOptionError(f"{name}[{bad[0]}] is {values[bad[0]]}; a probability is in [0, 1]")
        if not p.all():
            raise InvalidOptionError(
                f"p_y[{np.flatnonzero(p == 0)[0]}] is 0: the target cannot have sampled that token. "
                "Score the text with the law it was sampled from"
            )
        object.__setattr__(self, "p_y", p)
        object.__setattr__(self, "q_y", q)

    def __len__(self) -> int:
        return int(self.p_y.size)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a set of transcripts says about a pair of models."""

    num_tokens: int
    acceptance_rate: float
    """Mean of min(1, q/p) over all tokens: an unbiased estimate of α = Σ min(p, q)."""
    tokens_per_step: tuple[float, ...]
    """For γ = 0, 1, …"""
    accepted_prefix: tuple[float, ...]
    """S_i, the chance that a step at the largest γ accepts its first i drafted tokens; S_0 = 1."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class AgreementIntervals:
    """Confidence intervals of the numbers in :class:`Agreement`."""

    acceptance_rate: Interval
    tokens_per_step: tuple[Interval, ...]


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> float | NDArray[np.float64]:
    """α = Σ min(p, q) = 1 − TV(p, q): the chance that a token drawn from q is accepted against p.

    ``p`` and ``q`` are laws, [V] for one position, which gives a float, or [n, V] for n positions, which
    gives [n] float64, one α each.

    >>> acceptance_rate([0.5, 0.5], [0.75, 0.25])
    0.75
    """
    target, draft = _floats(p, "p"), _floats(q, "q")
    if target.shape != draft.shape or target.ndim not in (1, 2) or target.shape[-1] == 0:
        raise InvalidOptionError(f"p has shape {target.shape} and q {draft.shape}; both must be [V] or both [n, V]")
    for name, laws in (("p", target), ("q", draft)):
        sums = laws.sum(axis=-1)
        if (laws < 0).any() or (np.abs(sums - 1) > _SUM_TOLERANCE).any():
            worst = np.ravel(sums)[np.argmax(np.abs(np.ravel(sums) - 1))]
            raise InvalidOptionError(
                f"{name} is not a probability law: smallest entry {laws.min()}, sum {worst}; "
                "entries are at least 0 and sum to 1"
            )
    rates: NDArray[np.float64] = np.minimum(np.minimum(target, draft).sum(axis=-1), 1.0)
    return float(rates) if rates.ndim == 0 else rates


def tokens_per_step(p_y: ArrayLike, q_y: ArrayLike, num_draft_tokens: int, rule: Rule = "token") -> float:
    """Tokens that a step emits on average while speculation writes this transcript.

    ``p_y`` and ``q_y`` are [N], as in :class:`Transcript`. The result is N / E[steps], where the
    expectation over draft and acceptance is exact given the text. A step that would run past the end
    counts whole, as it does when generation stops there.

    >>> tokens_per_step([0.5, 0.5], [0.5, 0.5], 1)
    2.0
    >>> tokens_per_step([0.5, 0.5], [0.0, 0.0], 1)
    1.0
    """
    transcript = Transcript(_floats(p_y, "p_y"), _floats(q_y, "q_y"))
    lengths = step_lengths(transcript, num_draft_tokens, rule)
    return len(transcript) / sum(step_starts(lengths))


def step_lengths(transcript: Transcript, num_draft_tokens: int, rule: Rule = "token") -> NDArray[np.float64]:
    """[N, γ + 1]: the chance, given the text, that a step which begins at t accepts exactly k drafted tokens.

    Tokens past the end are taken as accepted; nothing begins there.
    """
    return _exactly(_accepted(transcript, _count(num_draft_tokens, "num_draft_tokens"), rule))


def step_starts(lengths: NDArray[np.float64]) -> list[float]:
    """[N]: the chance that a step begins at each position, from ``step_lengths``, which may be of several sorts."""
    n, columns = lengths.shape
    # Plain lists: the recursion is sequential, and numpy's overhead per element would dominate.
    rows = lengths.tolist()
    starts = [0.0] * (n + columns)
    starts[0] = 1.0
    for t, row in enumerate(rows):
        start = starts[t]
        # A step that keeps k tokens moves on by k + 1: the token after them comes from the target.
        for k, chance in enumerate(row, t + 1):
            starts[k] += start * chance
    return starts[:n]


def agreement(transcripts: Sequence[Transcript], max_draft_tokens: int, *, rule: Rule = "token") -> Agreement:
    """Pool transcripts, one per prompt: all tokens over all expected steps, for γ = 0..max.

    S_i is averaged over the places where steps at γ = ``max_draft_tokens`` begin, since these are
    where drafts are made; places with fewer than i tokens to go are left out. It is NaN where no
    transcript is that long.
    """
    parts = _measure(transcripts, max_draft_tokens, rule)
    return Agreement(
        num_tokens=sum(map(len, transcripts)),
        acceptance_rate=float(parts.overlap.sum() / parts.tokens.sum()),
        tokens_per_step=tuple((parts.tokens.sum() / parts.steps.sum(axis=0)).tolist()),
        accepted_prefix=tuple(
            float(hit / tried) if tried else float("nan")
            for hit, tried in zip(parts.prefix_hits.sum(axis=0), parts.prefix_tries.sum(axis=0), strict=True)
        ),
    )


def agreement_intervals(
    transcripts: Sequence[Transcript],
    max_draft_tokens: int,
    *,
    rule: Rule = "token",
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> AgreementIntervals:
    """Percentile bootstrap over whole prompts, as the positions inside one are correlated.

    The same ``seed`` gives the same intervals. At least two transcripts are needed, and with fewer
    than about ten the intervals come out too narrow.
    """
    if len(transcripts) < 2:
        raise InvalidOptionError(
            f"intervals need at least 2 transcripts of different prompts; got {len(transcripts)}"
        )
    if not 0 < confidence < 1:
        raise InvalidOptionError(f"confidence is {confidence!r}; it must be between 0 and 1, both excluded")
    if _count(samples, "samples") == 0:
        raise InvalidOptionError("samples is 0; the bootstrap draws at least one")
    parts = _measure(transcripts, max_draft_tokens, rule)
    count = len(transcripts)
    picks = np.random.default_rng(seed).integers(0, count, size=(samples, count))
    # How often each prompt was drawn, [samples, prompts]: resampled sums are then products.
    weights = np.stack([np.bincount(row, minlength=count) for row in picks]).astype(np.float64)
    tokens = weights @ parts.tokens
    tail = (1 - confidence) / 2

    def interval(values: NDArray[np.float64]) -> Interval:
        low, high = np.quantile(values, [tail, 1 - tail])
        return Interval(float(low), float(high))

    ratios = tokens[:, None] / (weights @ parts.steps)
    return AgreementIntervals(
        acceptance_rate=interval(weights @ parts.overlap / tokens),
        tokens_per_step=tuple(interval(column) for column in ratios.T),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Sums per transcript, from which every pooled number is a ratio."""

    tokens: NDArray[np.float64]  # [prompts]
    overlap: NDArray[np.float64]  # [prompts], Σ min(1, q/p)
    steps: NDArray[np.float64]  # [prompts, γ_max + 1], expected steps for γ = 0..γ_max
    prefix_hits: NDArray[np.float64]  # [prompts, γ_max + 1]
    prefix_tries: NDArray[np.float64]  # [prompts, γ_max + 1]


def _measure(transcripts: Sequence[Transcript], max_draft_tokens: int, rule: Rule) -> _Parts:
    if not transcripts:
        raise InvalidOptionError("there are no transcripts; agreement is measured on at least one")
    limit = _count(max_draft_tokens, "max_draft_tokens")
    steps, hits, tries = (np.zeros((len(transcripts), limit + 1)) for _ in range(3))
    for row, transcript in enumerate(transcripts):
        accepted = _accepted(transcript, limit, rule)
        steps[row, :limit] = [sum(step_starts(_exactly(accepted[:, : gamma + 1]))) for gamma in range(limit)]
        starts = np.asarray(step_starts(_exactly(accepted)))
        steps[row, limit] = starts.sum()
        for i in range(min(limit, len(transcript)) + 1):
            inside = starts[: len(transcript) - max(0, i - 1)]
            hits[row, i] = inside @ accepted[: inside.size, i]
            tries[row, i] = inside.sum()
    return _Parts(
        tokens=np.array([len(t) for t in transcripts], dtype=np.float64),
        overlap=np.array([(np.minimum(t.p_y, t.q_y) / t.p_y).sum() for t in transcripts]),
        steps=steps,
        prefix_hits=hits,
        prefix_tries=tries,
    )


def _accepted(transcript: Transcript, gamma: int, rule: Rule) -> NDArray[np.float64]:
    """[N, γ + 1]: the chance, given the text, that a step at t drafts its next k tokens and keeps them.

    Column 0 is 1. Tokens past the end are taken as accepted; the recursion never asks about them.
    """
    if rule not in ("token", "block"):
        raise InvalidOptionError(f"rule is {rule!r}; it must be 'token' or 'block'")
    n = len(transcript)
    # Logarithms, because a product of ratios q/p overflows before a later q = 0 makes it 0.
    with np.errstate(divide="ignore"):
        log_ratio = np.log(transcript.q_y) - np.log(transcript.p_y)
    padded = np.concatenate([log_ratio, np.zeros(gamma)])
    log_accepted = np.zeros((n, gamma + 1))
    product = np.zeros(n)
    for k in range(1, gamma + 1):
        ratio = padded[k - 1 : k - 1 + n]
        if rule == "token":
            log_accepted[:, k] = log_accepted[:, k - 1] + np.minimum(0.0, ratio)
        else:
            product = product + ratio
            log_accepted[:, k] = np.minimum(log_accepted[:, k - 1], product)
    return np.exp(log_accepted)


def _exactly(accepted: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, γ + 1]: from the chances of k tokens or more to those of exactly k."""
    exactly = accepted.copy()
    exactly[:, :-1] -= accepted[:, 1:]
    return exactly


def _floats(values: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"{name} is not an array of numbers: {error}") from None
    if not np.isfinite(array).all():
        raise InvalidOptionError(f"{name} holds NaN or an infinity; probabilities are finite")
    return array


def _count(value: int, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise InvalidOptionError(f"{name} is {value!r}; it must be a whole number, at least 0")
    return int(value)
