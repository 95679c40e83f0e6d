"""Acceptance from confidence: the fit, and what a policy asks of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from localspec.calibration.confidence import fit_confidence, isotonic_fit
from localspec.confidence import ConfidenceModel
from localspec.errors import InvalidOptionError

pairs = st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0.5, 10, width=32)), min_size=1, max_size=40)


@given(pairs)
def test_isotonic_fit_is_the_least_squares_one(points):
    values, weights = np.array(points).T
    np.testing.assert_allclose(
        isotonic_fit(values, weights), isotonic_regression(values, weights=weights).x, atol=1e-9
    )


def truth(confidence):
    return np.clip(1.3 * confidence**2 - 0.1, 0, 1)


class TestFit:
    def test_finds_a_known_relation(self):
        # Noise of 0.2 in groups of 100 and more: an error of 0.1 is five standard errors, and the curve itself
        # moves by less than 0.03 within a group.
        rng = np.random.default_rng(1)
        x = rng.beta(2, 1, 8000)
        y = truth(x) + rng.normal(0, 0.2, x.size)
        model = fit_confidence(x, y, min_weight=100)
        for confidence in np.linspace(0.2, 0.99, 40):
            assert model.predict(confidence) == pytest.approx(truth(confidence), abs=0.1)

    def test_a_lucky_position_is_no_step_of_its_own(self):
        x = np.linspace(0, 1, 101)
        y = np.where(x < 1, 0.5, 1.0)
        assert fit_confidence(x, y, min_weight=20).predict(1.0) < 0.6
        assert fit_confidence(x, y, min_weight=1).predict(1.0) == 1.0

    def test_a_falling_relation_is_fitted_by_a_constant(self):
        model = fit_confidence([0.1, 0.5, 0.9], [1.0, 0.6, 0.2], min_weight=1)
        assert model.predict(0.0) == model.predict(0.7) == pytest.approx(0.6)

    def test_a_level_is_level_up_to_its_end(self):
        model = fit_confidence([0.1, 0.3, 0.5, 0.9], [0.5, 0.2, 0.2, 0.8], min_weight=1)
        assert model.thresholds == (0.1, 0.5, 0.9)
        assert model.predict(0.5) == pytest.approx(0.3)
        assert model.predict(0.7) == pytest.approx(0.55)

    def test_equal_confidences(self):
        model = fit_confidence([1.0] * 50, [1.0, 0.0] * 25)
        assert model.predict(0.3) == model.predict(1.0) == 0.5

    def test_fewer_positions_than_a_group_wants(self):
        assert fit_confidence([0.2, 0.8], [0.0, 1.0]).predict(0.2) == 0.5

    def test_typical_predictions_average_to_the_acceptance(self):
        rng = np.random.default_rng(2)
        x = rng.random(4000)
        model = fit_confidence(x, truth(x))
        assert np.mean(model.typical) == pytest.approx(truth(x).mean(), abs=0.01)

    @given(pairs)
    def test_predictions_are_probabilities_that_do_not_fall(self, points):
        x, y = np.array(points).T
        model = fit_confidence(x, np.minimum(y, 1), min_weight=2)
        found = [model.predict(c) for c in np.linspace(0, 1, 50)]
        assert min(found) >= 0
        assert max(found) <= 1
        assert np.diff(found).min() >= -1e-12

    def test_refuses(self):
        with pytest.raises(InvalidOptionError, match="one number per position"):
            fit_confidence([], [])
        with pytest.raises(InvalidOptionError, match="one number per position"):
            fit_confidence([0.5], [0.5, 0.5])
        with pytest.raises(InvalidOptionError, match="min_weight is 0"):
            fit_confidence([0.5], [0.5], min_weight=0)


class TestModel:
    model = ConfidenceModel(thresholds=(0.2, 0.6), acceptance=(0.1, 0.9), typical=(0.1, 0.5, 0.9))

    @pytest.mark.parametrize(("confidence", "expected"), [(0, 0.1), (0.2, 0.1), (0.4, 0.5), (0.6, 0.9), (1, 0.9)])
    def test_interpolates(self, confidence, expected):
        assert self.model.predict(confidence) == pytest.approx(expected)

    def test_expected_gain(self):
        assert self.model.expected_gain(0.5, 0.2) == pytest.approx((0 + 0.05 + 0.25) / 3)
        assert self.model.expected_gain(1, 0) == pytest.approx(0.5)
        assert self.model.expected_gain(1, 0.9) == 0

    @pytest.mark.parametrize(
        ("thresholds", "acceptance", "typical"),
        [((), (), (0.5,)), ((0.5,), (0.5,), ()), ((0.5,), (0.5, 0.6), (0.5,)), ((0.6, 0.5), (0.5, 0.6), (0.5,)),
         ((0.5, 0.6), (0.6, 0.5), (0.5,)), ((0.5,), (1.5,), (0.5,)), ((float("nan"),), (0.5,), (0.5,))],
    )  # fmt: skip
    def test_refuses(self, thresholds, acceptance, typical):
        with pytest.raises(InvalidOptionError):
            ConfidenceModel(thresholds, acceptance, typical)
