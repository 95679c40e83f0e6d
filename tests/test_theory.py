"""The closed forms against the reference values, independent computations and their known directions."""

import doctest
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from localspec.errors import InvalidOptionError
from localspec.theory import (
    batch_throughput,
    best_num_draft_tokens,
    ceiling,
    continuous_optimum,
    expected_tokens,
    near_best,
    speedup,
    speedup_from_tokens,
)

rates = st.floats(0, 1)
inner = st.floats(1e-6, 1 - 1e-6)
gammas = st.integers(0, 20)


def curve(alpha: float, cost: float, limit: int = 12) -> tuple[float, ...]:
    return speedup_from_tokens([expected_tokens(alpha, gamma) for gamma in range(limit + 1)], cost)


class TestReferenceValues:
    def test_alpha_08_cost_01(self):
        best, value = best_num_draft_tokens(0.8, 0.1)
        assert best == 6
        assert value == pytest.approx(2.47, abs=0.005)
        assert continuous_optimum(0.8, 0.1) == pytest.approx(5.756, abs=5e-4)
        assert near_best(curve(0.8, 0.1), 0.03) == (4, 5, 6, 7, 8)

    def test_lower_agreement(self):
        best, value = best_num_draft_tokens(0.6, 0.1)
        assert best == 3
        assert value == pytest.approx(1.67, abs=0.005)
        assert best_num_draft_tokens(0.4, 0.1)[1] == pytest.approx(1.30, abs=0.005)

    def test_free_draft(self):
        assert speedup(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
        assert speedup(0.8, 5, 1e-12) == pytest.approx(speedup(0.8, 5, 0.0))

    def test_expected_tokens_at_the_ends(self):
        assert expected_tokens(1, 7) == 8
        assert expected_tokens(0, 7) == 1
        assert expected_tokens(0.3, 0) == 1
        assert expected_tokens(0.75, 10_000) == pytest.approx(ceiling(0.75)) == pytest.approx(4)
        assert ceiling(1) == math.inf


class TestExpectedTokens:
    @settings(deadline=None)
    @given(rates, gammas)
    def test_is_the_geometric_sum(self, alpha, gamma):
        assert expected_tokens(alpha, gamma) == pytest.approx(math.fsum(alpha**k for k in range(gamma + 1)))

    @settings(deadline=None)
    @given(rates, gammas)
    def test_is_the_mean_of_the_stopping_law(self, alpha, gamma):
        rejected = sum(i * alpha ** (i - 1) * (1 - alpha) for i in range(1, gamma + 1))
        assert expected_tokens(alpha, gamma) == pytest.approx(rejected + (gamma + 1) * alpha**gamma)

    @pytest.mark.parametrize("gap", [1e-16, 1e-13, 1e-10, 1e-6])
    def test_keeps_its_digits_next_to_one(self, gap):
        alpha = 1 - gap
        terms = math.fsum(alpha**k for k in range(13))
        assert expected_tokens(alpha, 12) == pytest.approx(terms, rel=1e-14)

    @settings(deadline=None)
    @given(inner, inner, gammas)
    def test_rises_with_both(self, low, high, gamma):
        low, high = sorted((low, high))
        assert expected_tokens(low, gamma) <= expected_tokens(high, gamma) * (1 + 1e-12)
        assert expected_tokens(low, gamma) <= expected_tokens(low, gamma + 1) * (1 + 1e-12)
        assert expected_tokens(low, gamma) <= ceiling(low) * (1 + 1e-12)


class TestSpeedup:
    @settings(deadline=None)
    @given(rates, rates, gammas)
    def test_falls_with_cost_and_rises_with_agreement(self, alpha, cost, gamma):
        value = speedup(alpha, gamma, cost)
        assert speedup(alpha, gamma, cost / 2) >= value * (1 - 1e-12)
        assert speedup((alpha + 1) / 2, gamma, cost) >= value * (1 - 1e-12)

    @settings(deadline=None)
    @given(rates, rates)
    def test_is_one_without_a_draft(self, alpha, cost):
        assert speedup(alpha, 0, cost) == 1
        assert speedup(alpha, 0, cost, [1.05]) == 1

    def test_pays_for_verification(self):
        assert speedup(0.8, 3, 0.1, [1, 1.4, 2, 2.5]) == pytest.approx(expected_tokens(0.8, 3) / (0.3 + 2.5))
        assert speedup(0.8, 3, 0.1, np.ones(9)) == speedup(0.8, 3, 0.1)

    def test_pays_for_sampling(self):
        assert speedup_from_tokens([1, 1.5], 0.1, [1, 1.2], 0.2) == (1.0, pytest.approx(1.0))


class TestBest:
    @settings(deadline=None)
    @given(rates, rates, st.integers(0, 15))
    def test_is_the_best_of_all(self, alpha, cost, limit):
        best, value = best_num_draft_tokens(alpha, cost, limit)
        assert value == max(speedup(alpha, gamma, cost) for gamma in range(limit + 1))
        assert value == speedup(alpha, best, cost)
        assert value >= 1

    def test_does_not_speculate_where_it_loses(self):
        assert best_num_draft_tokens(0.8, 0.5, 3, [1, 1.6, 2.1, 2.5]) == (0, 1.0)
        assert best_num_draft_tokens(0, 0.0, 3) == (0, 1.0)
        assert best_num_draft_tokens(1, 1, 3) == (0, 1.0)

    def test_takes_all_it_can_get_for_free(self):
        assert best_num_draft_tokens(1, 0.0) == (12, 13.0)

    def test_finds_the_bottom_of_a_step_in_the_curve(self):
        # Four tokens cheaper than three, as kernels that work in fours have it.
        cost = [1.0, 1.83, 2.49, 2.03, 2.7]
        assert best_num_draft_tokens(0.95, 0.05, 4, cost)[0] == 3

    @settings(deadline=None)
    @given(inner, inner, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
    def test_rises_with_agreement_and_falls_with_cost(self, a1, a2, c1, c2):
        (a1, a2), (c1, c2) = sorted((a1, a2)), sorted((c1, c2))
        assert best_num_draft_tokens(a1, c1, 40)[0] <= best_num_draft_tokens(a2, c1, 40)[0]
        assert best_num_draft_tokens(a1, c2, 40)[0] <= best_num_draft_tokens(a1, c1, 40)[0]


class TestContinuousOptimum:
    @settings(deadline=None)
    @given(st.floats(0.05, 0.999), st.floats(1e-3, 0.99))
    def test_is_lamberts_function(self, alpha, cost):
        decay = -math.log(alpha)
        argument = -math.exp(-1 - decay * (1 / cost - 1))
        assume(-1 / math.e + 1e-6 < argument < -1e-300)  # where SciPy's own value is accurate
        textbook = (-lambertw(argument, -1).real - 1) / decay - 1 / cost
        assert continuous_optimum(alpha, cost) == pytest.approx(max(0, textbook), rel=1e-6, abs=1e-6)

    @settings(deadline=None)
    @given(st.floats(1e-9, 1 - 1e-9), st.floats(1e-9, 1 - 1e-9))
    def test_satisfies_stationarity(self, alpha, cost):
        gamma = continuous_optimum(alpha, cost)
        decay = -math.log(alpha)
        slope = math.exp(-decay * (gamma + 1)) * (decay * (cost * gamma + 1) + cost) / cost - 1
        if gamma == 0:
            assert slope <= 1e-9  # already falling at 0
        else:
            assert slope == pytest.approx(0, abs=1e-9)

    @settings(deadline=None)
    @given(st.floats(0.3, 0.98), st.floats(0.01, 0.5))
    def test_brackets_the_best_whole_number(self, alpha, cost):
        gamma = continuous_optimum(alpha, cost)
        best, _ = best_num_draft_tokens(alpha, cost, 400)
        assert math.floor(gamma) <= best <= math.ceil(gamma)

    @settings(deadline=None)
    @given(inner, inner, inner, inner)
    def test_rises_with_agreement_and_falls_with_cost(self, a1, a2, c1, c2):
        (a1, a2), (c1, c2) = sorted((a1, a2)), sorted((c1, c2))
        middle = continuous_optimum(a1, c1)
        assert continuous_optimum(a2, c1) >= middle * (1 - 1e-9)
        assert continuous_optimum(a1, c2) <= middle * (1 + 1e-9)

    @settings(deadline=None)
    @given(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True))
    def test_is_a_length_everywhere(self, alpha, cost):
        assert continuous_optimum(alpha, cost) >= 0

    def test_at_the_ends(self):
        assert continuous_optimum(0, 0) == continuous_optimum(0, 0.5) == 0
        assert continuous_optimum(1, 1) == continuous_optimum(0.9, 1) == 0
        assert continuous_optimum(1, 0.9) == continuous_optimum(0.1, 0) == math.inf
        # For α → 1 the peak tends to √(2·(1/c − 1)/(1 − α)), which a form in 1/c loses to rounding.
        assert continuous_optimum(1 - 1e-15, 0.5) == pytest.approx(math.sqrt(2 / (1 - (1 - 1e-15))), rel=1e-6)
        assert math.isfinite(continuous_optimum(0.5, 5e-324))


class TestBatchThroughput:
    def test_formula(self):
        rate = batch_throughput(0.8, 3, 4, target_pass_s=lambda n: 0.01 * n, draft_pass_s=lambda n: 0.002 * n)
        assert rate == pytest.approx(4 * expected_tokens(0.8, 3) / (0.16 + 3 * 0.008))

    def test_best_draft_shrinks_to_none_as_the_batch_grows(self):
        def best(batch: int) -> int:
            def rate(gamma: int) -> float:
                return batch_throughput(
                    0.8,
                    gamma,
                    batch,
                    target_pass_s=lambda n: max(1.0, n / 8),  # bandwidth first, arithmetic later
                    draft_pass_s=lambda n: 0.1 * max(1.0, n / 8),
                )

            return max(range(13), key=rate)

        lengths = [best(batch) for batch in (1, 2, 4, 8, 16)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > 3
        assert lengths[-1] == 0

    def test_needs_no_draft_time_for_plain_decoding(self):
        assert batch_throughput(0.8, 0, 2, target_pass_s=lambda n: 0.5, draft_pass_s=lambda n: math.nan) == 4

    @pytest.mark.parametrize(("batch", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.nan)])
    def test_refuses(self, batch, seconds):
        with pytest.raises(InvalidOptionError):
            batch_throughput(0.5, 1, batch, target_pass_s=lambda n: seconds, draft_pass_s=lambda n: 0.0)


class TestRefusals:
    @pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan, math.inf, "0.5", None])
    def test_acceptance_rate(self, rate):
        for call in (
            lambda: expected_tokens(rate, 1),
            lambda: speedup(rate, 1, 0.1),
            lambda: best_num_draft_tokens(rate, 0.1),
            lambda: continuous_optimum(rate, 0.1),
            lambda: ceiling(rate),
        ):
            with pytest.raises(InvalidOptionError, match=r"^acceptance_rate is "):
                call()

    @pytest.mark.parametrize("gamma", [-1, 1.0, 1.5, "2", None, True, 10**400])
    def test_num_draft_tokens(self, gamma):
        with pytest.raises(InvalidOptionError, match="num_draft_tokens"):
            expected_tokens(0.5, gamma)
        with pytest.raises(InvalidOptionError, match="max_draft_tokens"):
            best_num_draft_tokens(0.5, 0.1, gamma)

    def test_numpy_numbers_are_numbers(self):
        assert expected_tokens(np.float32(0.5), np.int64(2)) == 1.75

    def test_the_other_convention_of_cost_names_the_inverse(self):
        for call in (lambda: speedup(0.8, 1, 10), lambda: continuous_optimum(0.8, 10)):
            with pytest.raises(InvalidOptionError, match=r"Target / draft = 10 means a cost ratio of 0\.1"):
                call()

    @pytest.mark.parametrize("cost", [-0.1, math.nan, math.inf])
    def test_cost_ratio(self, cost):
        with pytest.raises(InvalidOptionError, match="cost_ratio"):
            speedup(0.8, 1, cost)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ([1, 1.2], "has 2 numbers; drafting 2 tokens needs 3"),
            ([1, 0, 2], r"verify_cost\[1\] is 0"),
            ([1, math.nan, 2], r"verify_cost\[1\] is nan"),
            ([28.6, 44.7, 59.4], r"verify_cost\[0\] is 28\.6; .* Divide"),
            (3.0, "must be a list"),
            ("123", r"verify_cost\[0\]"),
        ],
    )
    def test_verify_cost(self, values, message):
        with pytest.raises(InvalidOptionError, match=message):
            speedup(0.8, 2, 0.1, values)

    def test_tokens_per_step(self):
        for tokens in ([], [1.0, 2.1], [1.0, 0.9], [2.0], [1.0, math.nan]):
            with pytest.raises(InvalidOptionError, match="tokens_per_step"):
                speedup_from_tokens(tokens, 0.1)
        with pytest.raises(InvalidOptionError, match="sampler_cost"):
            speedup_from_tokens([1.0], 0.1, None, -1)

    def test_near_best(self):
        with pytest.raises(InvalidOptionError, match="speedups"):
            near_best([])
        with pytest.raises(InvalidOptionError, match="tolerance"):
            near_best([1.0], 2)


def test_the_examples_in_the_documentation_hold():
    page = Path(__file__).parents[1] / "docs" / "how-it-works.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried > 10
    assert failed == 0
