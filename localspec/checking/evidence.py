"""Tests whose false-alarm odds can be stated: a martingale that bets against exactness, and Pearson's test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SHIFTS",
    "STAKES",
    "Bet",
    "chi_square_tail",
    "evidence",
    "growth",
    "moments",
    "pearson",
    "shifts",
    "smallest_shift",
]

Floats = NDArray[np.float64]
_Outcome = TypeVar("_Outcome", bound=Hashable)

STAKES = np.array([sign * stake for stake in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6) for sign in (-1, 1)])
"""λ: each is best against a shift of λ variances; together they cover what 500 to 50,000 tokens can show."""

SHIFTS = (
    "favoured by the draft",
    "likely to the target",
    "likely to the draft",
    "favoured by the draft and early in the vocabulary",
)
"""In words, what the functions f are large for that ``shifts`` returns: where faults of speculation show first."""

_LEAST_EXPECTATION = 10.0
_LEAST_PROB = 1e-4


def shifts(p: Floats, q: Floats) -> tuple[Floats, ...]:
    """Return the functions f to bet on, [n] each: 1{q > p}, log p, q, and 1{q > p} early in the vocabulary.

    They are scaled to vary by about a half. The last one counts only tokens of the lower half of q by
    id: draws go through the ids in order, and a fault in the random numbers favours one end.

    Args:
        p: target probabilities of n tokens.
        q: draft probabilities of the same tokens.
    """
    favoured = (q > p).astype(np.float64)
    early = np.cumsum(q) <= 0.5 * q.sum()
    return favoured, np.log(np.maximum(p, _LEAST_PROB)) / 4, q, favoured * early


def growth(probs: Floats, values: Floats) -> Floats:
    """Return λ·f(x) − log E e^(λ·f) for every token and every stake, [n, stakes].

    Args:
        probs: the law of the token, [n].
        values: f, [n].
    """
    with np.errstate(divide="ignore"):
        exponents = STAKES[:, None] * values
        top = exponents.max(axis=1)
        cumulants = top + np.log(np.exp(exponents - top[:, None]) @ probs)
    grown: Floats = (exponents - cumulants[:, None]).T
    return grown


@dataclass(slots=True)
class Bet:
    """A bet against a sequence of tokens following their laws: f comes out higher, or lower, than it should.

    For each stake λ the capital Π e^(λ·f(y_t)) / E e^(λ·f) is a martingale that begins at 1, as long as y_t has the
    law that the expectation is taken under: whatever f is, however the laws depend on what came before, and whenever
    one stops. So a capital of c or more is reached with a probability of at most 1/c (Ville's inequality); nothing
    is approximated.

    Attributes:
        log_capital: of each stake, [stakes].
        total: Σ (f(y) − E f).
        variance: Σ Var f.
        count: tokens.
    """

    log_capital: Floats = field(default_factory=lambda: np.zeros(len(STAKES)))
    total: float = 0.0
    variance: float = 0.0
    count: int = 0

    def place(self, probs: Floats, values: Floats, drawn: int) -> None:
        """Take the next token: index ``drawn`` of ``probs`` and ``values``, both [n]; probs sum to 1."""
        self.settle(growth(probs, values)[drawn], *moments(probs, values, drawn))

    def settle(self, grown: Floats, excess: float, variance: float) -> None:
        """Take the next token, of which everything is known: see ``growth`` and ``moments``."""
        self.log_capital += grown
        self.total += excess
        self.variance += variance
        self.count += 1

    def joined(self, other: Bet) -> Bet:
        """Return the bet on both sequences, one after the other."""
        return Bet(
            self.log_capital + other.log_capital,
            self.total + other.total,
            self.variance + other.variance,
            self.count + other.count,
        )

    @property
    def z(self) -> float:
        """Σ (f − E f) / √Σ Var: about normal on a sound build, for the eye; the capital decides."""
        return self.total / math.sqrt(self.variance) if self.variance > 0 else 0.0


def moments(probs: Floats, values: Floats, drawn: int) -> tuple[float, float]:
    """Return f(y) − E f, and Var f."""
    mean = float(probs @ values)
    return float(values[drawn]) - mean, float(probs @ (values - mean) ** 2)


def evidence(bets: Sequence[Bet]) -> float:
    """Return the mean capital over all bets and stakes: c or more with a probability of at most 1/c."""
    logs = np.concatenate([bet.log_capital for bet in bets])
    top = float(logs.max())
    return float(np.exp(top) * np.exp(logs - top).mean()) if top < 700 else math.inf


def smallest_shift(bet: Bet, num_bets: int, threshold: float, *, power: float = 0.9) -> float:
    """Return the least difference in the mean of f that ``bet`` lifts ``evidence`` above ``threshold`` for.

    With probability ``power``, if the best stake is among those there are: capital grows as e^(Z²/2).
    """
    if not bet.count:
        return math.inf
    needed = math.sqrt(2 * math.log(threshold * num_bets * len(STAKES))) + NormalDist().inv_cdf(power)
    return needed * math.sqrt(bet.variance) / bet.count


def pearson(counts: Counter[_Outcome], law: Mapping[_Outcome, float]) -> float:
    """Return the p-value of Pearson's statistic; cells with an expectation below 10 are merged.

    An outcome of probability 0 gives 0. The approximation by χ² overstates the odds of a false alarm of 1 in 100,000
    at most threefold with cells this large (``tests/checking/test_evidence.py``).
    """
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return 0.0
    size = counts.total()
    cells, merged = [], np.zeros(2)
    for outcome, prob in law.items():
        cell = np.array([counts[outcome], size * prob])
        if cell[1] < _LEAST_EXPECTATION:
            merged += cell
        else:
            cells.append(cell)
    if merged[1] >= _LEAST_EXPECTATION or not cells:
        cells.append(merged)
    else:
        cells[-1] = cells[-1] + merged
    observed, expected = np.array(cells).T
    if len(cells) < 2:
        return 1.0
    return chi_square_tail(float(((observed - expected) ** 2 / expected).sum()), len(cells) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return P(χ² ≥ statistic), which is a finite sum for whole degrees of freedom.

    >>> round(chi_square_tail(3.841, 1), 4), round(chi_square_tail(18.307, 10), 4)
    (0.05, 0.05)
    """
    if statistic <= 0:
        return 1.0
    half = statistic / 2
    odd = degrees % 2
    powers = [k + odd / 2 for k in range(degrees // 2)]
    terms = [math.exp(power * math.log(half) - half - math.lgamma(power + 1)) for power in powers]
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(half)) if odd else 0.0))
