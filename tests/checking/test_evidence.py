"""The odds that a check states, and its power: on samples whose law is known."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from localspec.checking.evidence import STAKES, Bet, chi_square_tail, evidence, growth, pearson, smallest_shift

LAW = np.array([0.5, 0.3, 0.15, 0.05])
FAVOURED = np.array([0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize("degrees", [1, 2, 3, 10, 77, 400])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0, 1.7, 3.0])
def test_the_tail_of_chi_square(degrees: int, at: float) -> None:
    assert chi_square_tail(at * degrees, degrees) == pytest.approx(chi2.sf(at * degrees, degrees), rel=1e-9)


def test_capital_is_a_fair_game() -> None:
    """E e^growth = 1 for every stake, whatever f and law: then capital is a martingale, and the odds hold."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        law = rng.dirichlet(np.full(6, 0.3))
        values = rng.normal(size=6) * rng.choice([0.1, 1.0, 30.0])
        assert law @ np.exp(growth(law, values)) == pytest.approx(np.ones(len(STAKES)), rel=1e-9)


def tokens(law: np.ndarray, count: int, seed: int) -> Bet:
    bet = Bet()
    for drawn in np.random.default_rng(seed).choice(len(law), size=count, p=law):
        bet.place(LAW, FAVOURED, int(drawn))
    return bet


def test_a_sound_sequence_makes_nobody_rich() -> None:
    """Capital of 100 is reached with a chance of at most 1 %: 200 sequences give 9 of them or more with 1e-4."""
    rich = sum(evidence([tokens(LAW, 500, seed)]) >= 100 for seed in range(200))
    assert rich < 9


def test_a_shift_of_the_size_named_is_noticed() -> None:
    """At a power of 0.9, 20 of 30 fail to be noticed with a chance below 1e-4."""
    shift = smallest_shift(tokens(LAW, 2000, 0), 1, 1000.0)
    assert 0.01 < shift < 0.1
    shifted = LAW + (FAVOURED - (1 - FAVOURED) * LAW / (LAW @ (1 - FAVOURED))) * shift * np.array([1, 0.5, 1, 0.5])
    assert shifted.sum() == pytest.approx(1)
    assert (shifted - LAW) @ FAVOURED == pytest.approx(shift)
    noticed = sum(evidence([tokens(shifted, 2000, seed)]) >= 1000 for seed in range(30))
    assert noticed >= 20


def test_z_is_standardised() -> None:
    bet = tokens(LAW, 400, 1)
    assert bet.count == 400
    assert bet.variance == pytest.approx(400 * 0.35 * 0.65)
    assert abs(bet.z) < 4


def test_evidence_does_not_overflow() -> None:
    bet = Bet()
    bet.log_capital += 5000.0
    assert evidence([bet]) == math.inf
    assert evidence([Bet(), Bet()]) == pytest.approx(1.0)


def test_pearson_merges_small_cells_and_rejects_the_impossible() -> None:
    law = {"a": 0.6, "b": 0.39, "c": 0.01, "d": 0.0}
    assert pearson(Counter({"a": 60, "b": 39, "c": 1}), law) > 0.9
    assert pearson(Counter({"a": 60, "b": 39, "d": 1}), law) == 0.0
    assert pearson(Counter({"a": 60, "b": 39, "x": 1}), law) == 0.0
    assert pearson(Counter({"a": 20, "b": 79, "c": 1}), law) < 1e-9


def test_the_tail_of_pearson_is_not_understated_more_than_threefold() -> None:
    """Cells that expect 10 and more, at 1e-4: 100,000 samples give the rate to 30 %."""
    probs = np.sort(np.random.default_rng(0).dirichlet(np.full(256, 0.3)))[::-1]
    size = 2000
    kept = probs[size * probs >= 10]
    cells = np.append(kept, 1 - kept.sum())
    samples = np.random.default_rng(1).multinomial(size, cells, size=100_000)
    statistics = ((samples - size * cells) ** 2 / (size * cells)).sum(axis=1)
    assert (statistics >= chi2.isf(1e-4, len(cells) - 1)).mean() < 3e-4
