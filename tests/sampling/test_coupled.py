"""The coupled rule: the noise is what it claims to be, a race is an exact draw, and drafts change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest, chi2, kstest

from localspec.errors import InvalidOptionError
from localspec.sampling import (
    DenseLaw,
    Law,
    PositionNoise,
    SamplingParams,
    SparseLaw,
    Verification,
    make_law,
    verification_law,
    verify,
    verify_coupled,
)
from localspec.sampling.noise import GROUP
from tests.stats import holm_rejects
from tests.strategies import law_rows, logit_rows

Floats = NDArray[np.float64]


# --- the noise ----------------------------------------------------------------------------------------------------


def test_values_are_pinned() -> None:
    """A seed a user wrote down must keep its meaning; these numbers change only on purpose."""
    noise = PositionNoise(42, 17)
    assert noise.at(np.array([0, 1, 63, 64, 151_935])).tolist() == pytest.approx(PINNED, rel=1e-14)


PINNED = [3.3947105605540133, 2.5406787626138367, 0.5562114012017761, 0.8025978838855936, 0.3181313914456389]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64, 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    values = PositionNoise(seed, 3).at(np.arange(200))
    assert ((values > 0) & np.isfinite(values)).all()
    assert np.array_equal(values, PositionNoise(seed % 2**64, 3).at(np.arange(200)))


def test_the_noise_of_a_token_depends_on_no_other() -> None:
    noise = PositionNoise(7, 7)
    everything = noise.at(np.arange(1000))
    rng = np.random.default_rng(0)
    for size in (1, 2, 50):
        ids = np.sort(rng.choice(1000, size, replace=False))
        assert np.array_equal(noise.at(ids), everything[ids])


def test_groups_know_their_least() -> None:
    noise = PositionNoise(5, 9)
    values = noise.at(np.arange(300 * GROUP)).reshape(300, GROUP)
    least, owners = noise.least(np.arange(300))
    assert np.array_equal(values.min(axis=1), least)
    assert np.array_equal(values.argmin(axis=1) + GROUP * np.arange(300), owners)
    assert len(np.unique(owners % GROUP)) > 55, "any of a group may be first"


def test_the_noise_is_exponential() -> None:
    """Kolmogorov-Smirnov tests of 20,000 values each, by id, position, seed and place; false alarm 1e-3 over all."""
    n = 20_000
    ids = np.arange(n)
    samples = {
        "ids": PositionNoise(1, 1).at(ids),
        "ids of one place in the group": PositionNoise(2, 1).at(ids * GROUP + 5),
        "positions": np.array([PositionNoise(1, position).at(np.array([77]))[0] for position in range(n)]),
        "seeds": np.array([PositionNoise(seed, 9).at(np.array([77]))[0] for seed in range(n)]),
        "least": PositionNoise(3, 1).least(ids)[0] * GROUP,
    }
    p_values = {name: float(kstest(values, "expon").pvalue) for name, values in samples.items()}
    assert holm_rejects(p_values, 1e-3) == []


def test_the_noise_is_independent() -> None:
    """Chi-square on 8 × 8 cells of pairs, ids of one group among them; false alarm 1e-3 over all."""
    n = 20_000

    def at(seed: int, position: int, ids: NDArray[np.int64]) -> Floats:
        return np.exp(-PositionNoise(seed, position).at(ids))

    ids = np.arange(n)
    of_a_group = ids * GROUP
    pairs = {
        "neighbours in a group": (at(1, 1, of_a_group + 4), at(1, 1, of_a_group + 5)),
        "ends of a group": (at(1, 1, of_a_group), at(1, 1, of_a_group + GROUP - 1)),
        "across groups": (at(1, 1, of_a_group + GROUP - 1), at(1, 1, of_a_group + GROUP)),
        "positions": (at(1, 1, ids), at(1, 2, ids)),
        "seeds": (at(1, 1, ids), at(2, 1, ids)),
    }
    p_values = {}
    for name, (left, right) in pairs.items():
        cells = (left * 8).astype(int) * 8 + (right * 8).astype(int)
        counts = np.bincount(cells, minlength=64)
        p_values[name] = float(chi2.sf(((counts - n / 64) ** 2 / (n / 64)).sum(), 63))
    assert holm_rejects(p_values, 1e-3) == []


# --- races --------------------------------------------------------------------------------------------------------


@given(logits=logit_rows(), seed=st.integers(0, 2**32), cut=st.sampled_from([{}, {"min_p": 0.01}, {"top_k": 5}]))
@settings(max_examples=300, deadline=None)
def test_a_race_is_won_by_the_least_quotient(logits: NDArray[np.floating], seed: int, cut: dict[str, float]) -> None:
    """The shortcut over groups finds what trying every token finds."""
    params = SamplingParams(**cut)  # type: ignore[arg-type]
    made = make_law(logits, params)
    noise = PositionNoise(seed, 3)
    ids = np.arange(len(logits))
    weights = made.weights.astype(np.float64) if isinstance(made, DenseLaw) else made.dense(len(logits))
    with np.errstate(divide="ignore", over="ignore"):
        assert made.race(noise) == int((noise.at(ids) / weights).argmin())


def test_races_of_full_size() -> None:
    rng = np.random.default_rng(0)
    size = 151_936
    ids = np.arange(size)
    for scale in (0.0, 0.5, 3.0, 6.0):
        made = make_law((scale * rng.standard_normal(size)).astype(np.float32), SamplingParams())
        assert isinstance(made, DenseLaw)
        for position in range(10):
            noise = PositionNoise(1, position)
            expected = int((noise.at(ids) / made.weights.astype(np.float64)).argmin())
            assert made.race(noise) == expected


def test_a_race_draws_from_the_law() -> None:
    """Chi-square of 20,000 races of a dense and of a sparse law; false alarm 1e-3 over both."""
    p = np.random.default_rng(3).dirichlet(np.ones(40))
    forms: dict[str, Law] = {"dense": DenseLaw.of(p), "sparse": SparseLaw.of(np.arange(40), p)}
    p_values = {}
    for name, made in forms.items():
        counts = np.bincount([made.race(PositionNoise(11, i)) for i in range(20_000)], minlength=40)
        expected = 20_000 * p
        large = expected >= 5
        statistic = ((counts - expected)[large] ** 2 / expected[large]).sum()
        p_values[name] = float(chi2.sf(statistic, large.sum() - 1))
    assert holm_rejects(p_values, 1e-3) == []


def test_tokens_of_probability_zero_never_win() -> None:
    weights = np.zeros(1000, np.float32)
    weights[[5, 999]] = [1e-30, 1e-38]
    made = DenseLaw.of(weights)
    assert {made.race(PositionNoise(0, i)) for i in range(200)} <= {5, 999}
    sparse = SparseLaw.of(np.arange(4), np.array([0.0, 0.5, 0.5, 0.0]))
    assert {sparse.race(PositionNoise(0, i)) for i in range(100)} == {1, 2}


def test_truncation_does_not_shift_the_noise() -> None:
    """Where a law's own winner survives a cut, it wins there too."""
    rng = np.random.default_rng(8)
    for position in range(200):
        row = 2 * rng.standard_normal(300)
        noise = PositionNoise(1, position)
        winner = make_law(row, SamplingParams()).race(noise)
        cut = make_law(row, SamplingParams(top_k=20))
        assert cut.prob(winner) == 0 or cut.race(noise) == winner


# --- the rule -----------------------------------------------------------------------------------------------------


def agreement(p: Floats, q: Floats) -> float:
    """Return Σₓ 1 / Σ_y max(p_y/pₓ, q_y/qₓ), the chance that both draw the same."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return math.fsum(1 / float(np.maximum(p / p[x], q / q[x]).sum()) for x in both)


@pytest.mark.parametrize("toy", range(6))
def test_acceptance_is_the_formula(toy: int) -> None:
    """5,000 positions for each of six pairs of laws; false alarm 1e-4 each."""
    rng = np.random.default_rng(toy)
    p, q = rng.dirichlet(np.ones(4), 2)
    if toy >= 3:  # with zeros
        p[toy - 3] = 0
        p /= p.sum()
        q[3] = 0
        q /= q.sum()
    p_law, q_law = DenseLaw.of(p), SparseLaw.of(np.arange(4), q)
    accepted = 0
    for position in range(5_000):
        drafted = q_law.race(PositionNoise(toy, position))
        verification = verify_coupled([p_law, p_law], [drafted], seed=toy, position=position)
        assert verification.num_accepted == (p_law.race(PositionNoise(toy, position)) == drafted)
        accepted += verification.num_accepted
    expected = agreement(p, q)
    variation = 0.5 * np.abs(p - q).sum()
    assert (1 - variation) / (1 + variation) - 1e-12 <= expected <= 1 - variation + 1e-12
    assert binomtest(accepted, 5_000, expected).pvalue > 1e-4


@given(rows=law_rows(5, 6), drafted=st.lists(st.integers(0, 5), max_size=4), seed=st.integers(0, 2**32))
def test_what_comes_out_is_what_the_target_draws(rows: Floats, drafted: list[int], seed: int) -> None:
    laws: list[Law] = [DenseLaw.of(row) for row in rows]
    own = [law.race(PositionNoise(seed, 10 + i)) for i, law in enumerate(laws)]
    verification = verify_coupled(laws[: len(drafted) + 1], drafted, seed=seed, position=10)
    emitted = [*drafted[: verification.num_accepted], verification.next_token]
    assert emitted == own[: len(emitted)]
    agrees = next((i for i, token in enumerate(drafted) if token != own[i]), len(drafted))
    assert verification == Verification(agrees, own[agrees])


def test_rows_past_a_disagreement_are_not_asked_for() -> None:
    class Laws(Sequence[Law]):
        asked: list[int]

        def __init__(self) -> None:
            self.asked = []

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Law:  # type: ignore[override]
            self.asked.append(index)
            return SparseLaw.point(index)

    laws = Laws()
    assert verify_coupled(laws, [0, 9, 2], seed=0, position=0) == Verification(1, 1)
    assert laws.asked == [0, 1]


def test_it_has_no_law_to_verify_from() -> None:
    """``verify`` and ``verification_law`` take laws and uniforms, which this rule does not use."""
    p, q = np.full((2, 2), 0.5), np.full((1, 2), 0.5)
    with pytest.raises(InvalidOptionError, match="coupled"):
        verification_law(p, q, [0], "coupled")
    with pytest.raises(InvalidOptionError, match="coupled"):
        verify(p, q, [0], "coupled", np.random.default_rng(0))
