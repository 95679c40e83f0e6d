"""Laws against slow references written independently, in float64 and by sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localspec.errors import InvalidLogitsError
from localspec.sampling import LLAMACPP_DEFAULTS, DenseLaw, SamplingParams, SparseLaw, law, make_law, residual
from localspec.sampling.chain import _top_ids
from tests.strategies import law_rows, logit_rows, sampling_params

ALMOST_ONE = 1 - 2.0**-53


def reference(logits: NDArray[np.floating], params: SamplingParams) -> tuple[NDArray[np.float64], float]:
    """Return the law by llama.cpp's order (top-k, top-p, min-p, temperature), and how close a cut was to rounding.

    A cut is where one token is kept and the next is not; the second number is the smallest distance, relative,
    of a cumulative probability or a logit to the threshold it is compared with.
    """
    row = [(float(value), token) for token, value in enumerate(logits) if value > -math.inf]
    row.sort(key=lambda pair: (-pair[0], pair[1]))
    top = row[0][0]
    slack = math.inf
    if params.top_k > 0:
        row = row[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(value - top) for value, _ in row)
        below, kept = 0.0, []
        for pair in row:
            kept.append(pair)
            below += math.exp(pair[0] - top)
            slack = min(slack, abs(below / total - params.top_p) / params.top_p)
            if below >= params.top_p * total:
                break
        row = kept
    if params.min_p > 0:
        floor = top + math.log(params.min_p)
        slack = min(slack, min(abs(value - floor) for value, _ in row))
        row = [pair for pair in row if pair[0] >= floor]
    out = np.zeros(len(logits))
    for value, token in row:
        out[token] = math.exp((value - top) / params.temperature)
    return out / math.fsum(out), slack


@given(logits=logit_rows(), params=sampling_params())
@settings(max_examples=300, deadline=None)
def test_laws_match_the_reference(logits: NDArray[np.floating], params: SamplingParams) -> None:
    expected, slack = reference(logits, params)
    single = logits.dtype == np.float32
    exact = params.min_p in (0.0, 1.0) and params.top_p == 1  # then no cut depends on rounding
    assume(exact or slack > (1e-5 if single else 1e-9))
    got = law(logits, params)
    assert got.dtype == np.float64
    assert got.sum() == pytest.approx(1, abs=1e-6)
    tolerance = 1e-9
    if single and not params.truncates:  # exponents in float32: relative error about |logit|/T · 2^-24
        tolerance = 1e-6
    np.testing.assert_allclose(got, expected, rtol=2e-5 if single else 1e-9, atol=tolerance)
    if params.truncates:
        assert np.array_equal(got > 0, expected > 0)


@given(logits=logit_rows(), k=st.one_of(st.integers(1, 40), st.integers(1, 3000)))
@settings(max_examples=300, deadline=None)
def test_top_ids_are_the_sorted_ones(logits: NDArray[np.floating], k: int) -> None:
    """Largest first, the lower id first among equals, nothing of −inf; on both sides of the shortcut by chunks."""
    order = sorted((token for token in range(len(logits)) if logits[token] > -np.inf), key=lambda t: (-logits[t], t))
    assert _top_ids(logits, k).tolist() == order[:k]


@pytest.mark.parametrize("size", [1, 64, 128, 129, 151_936])
@pytest.mark.parametrize("kind", ["equal", "two values", "descending", "ascending"])
def test_top_ids_of_extreme_rows(size: int, kind: str) -> None:
    rows = {
        "equal": np.zeros(size),
        "two values": np.arange(size) % 7 == 3,
        "descending": -np.arange(size),
        "ascending": np.arange(size),
    }
    row = np.asarray(rows[kind], dtype=np.float32)
    order = np.argsort(-row, kind="stable")
    for k in (1, 2, 40, size // 64 - 1, size // 64, size // 64 + 1, size - 1, size, size + 1):
        if k >= 1:
            assert np.array_equal(_top_ids(row, k), order[:k])


def test_default_chain_by_hand() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    row = np.log(probs)
    assert law(row, SamplingParams(top_k=2)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])
    assert law(row, SamplingParams(top_p=0.6)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])
    assert law(row, SamplingParams(min_p=0.2)).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0, 0])
    # top-p looks at what top-k left (4/7 < 0.6), and temperature comes last.
    both = SamplingParams(top_k=3, top_p=0.6, temperature=0.5)
    assert law(row, both).tolist() == pytest.approx([4 / 5, 1 / 5, 0, 0, 0])
    assert law(row, SamplingParams(top_p=0.55, temperature=100)).tolist() == pytest.approx(
        [0.50173, 0.49827, 0, 0, 0], abs=1e-4
    )
    assert law(row, LLAMACPP_DEFAULTS)[3] > 0
    # Of equal tokens at a cut the lower id stays.
    assert law(row, SamplingParams(top_k=4))[3:].tolist() == pytest.approx([1 / 15, 0])


def test_switched_off_is_the_plain_softmax() -> None:
    row = np.random.default_rng(0).standard_normal(700)
    plain = np.exp(row) / np.exp(row).sum()
    for params in (
        SamplingParams(),
        SamplingParams(top_k=700),
        SamplingParams(top_k=9999),
        SamplingParams(min_p=1e-300),
    ):
        np.testing.assert_allclose(law(row, params), plain, rtol=1e-12)


# --- temperature ------------------------------------------------------------------------------------------------


def test_temperature_zero_is_the_first_of_the_likeliest() -> None:
    assert law(np.array([1.0, 3.0, 3.0, 2.0]), SamplingParams(temperature=0)).tolist() == [0, 1, 0, 0]
    greedy = make_law(np.array([-np.inf, -5.0], np.float32), SamplingParams(temperature=0, top_k=1, top_p=0.1))
    assert isinstance(greedy, SparseLaw)
    assert greedy.prob(1) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_temperatures(dtype: type) -> None:
    row = np.array([2.0, 1.0, -np.inf, 2.0, -1e4], dtype)
    assert law(row, SamplingParams(temperature=1e-5)).tolist() == [0.5, 0, 0, 0.5, 0]
    hot = law(row, SamplingParams(temperature=1e6))
    np.testing.assert_allclose(hot, np.array([1, 1, 0, 1, math.exp(-0.01)]) / (3 + math.exp(-0.01)), rtol=1e-5)
    for params in (SamplingParams(temperature=1e-5, top_k=3), SamplingParams(temperature=1e6, min_p=0.01)):
        assert np.isfinite(law(row, params)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1e-5, 0.8, 1.0])
def test_the_lowest_finite_logit_is_no_accident(dtype: type, temperature: float) -> None:
    """Some models mask tokens with the lowest finite number instead of −inf."""
    row = np.array([np.finfo(dtype).min, 20.0, np.finfo(dtype).min, 20.0], dtype)
    for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        assert law(row, params).tolist() == [0, 0.5, 0, 0.5]


# --- rows that are no laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), LLAMACPP_DEFAULTS], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "row",
    [
        [0.0, math.nan, 1.0],
        [math.nan] * 3,
        [0.0, math.inf, 1.0],
        [math.inf, -math.inf, math.nan],
        [-math.inf] * 3,
    ],
    ids=str,
)
def test_a_row_no_law_can_be_made_of(row: list[float], dtype: type, params: SamplingParams) -> None:
    with pytest.raises(InvalidLogitsError, match="maximum"):
        law(np.array(row, dtype), params)


def test_integers_and_half_precision_are_taken() -> None:
    for dtype in (np.int64, np.float16):
        assert law(np.array([0, 1], dtype), SamplingParams()).tolist() == pytest.approx([0.26894, 0.73106], abs=1e-5)


def test_the_logits_are_left_alone() -> None:
    row = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    before = row.copy()
    for params in (SamplingParams(temperature=0.5), LLAMACPP_DEFAULTS, SamplingParams(top_p=0.5)):
        made = make_law(row, params)
        probs = made.dense(600)
        row[:] = np.nan  # the view changes with the next pass
        assert np.array_equal(made.dense(600), probs)
        row[:] = before


# --- drawing ------------------------------------------------------------------------------------------------------


@given(
    size=st.one_of(st.sampled_from([1, 2, 511, 512, 513, 1024, 1537]), st.integers(1, 2000)),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    single=st.booleans(),
    uniform=st.one_of(st.sampled_from([0.0, 2.0**-53, 0.5, ALMOST_ONE]), st.floats(0, ALMOST_ONE)),
)
@settings(max_examples=400, deadline=None)
def test_a_draw_inverts_the_cumulative_law(size: int, seed: int, zeros: float, single: bool, uniform: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=size) ** 3
    weights[rng.random(size) < zeros] = 0
    weights[rng.integers(size)] = 2.0
    if single:
        weights = weights.astype(np.float32)
    exact = weights.astype(np.float64)
    edges = np.cumsum(exact) / exact.sum()
    tolerance = 1e-6 if single else 1e-13
    ids = np.flatnonzero(weights)
    for made in (DenseLaw.of(weights), SparseLaw.of(ids, exact[ids])):
        token = made.draw(uniform)
        assert weights[token] > 0
        assert edges[token] - exact[token] / exact.sum() - tolerance <= uniform <= edges[token] + tolerance
        near_an_edge = np.abs(edges - uniform).min() < tolerance
        assert near_an_edge or token == np.searchsorted(edges, uniform, side="right")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("support", [(0,), (511,), (512,), (700,), (1535,), (600, 601), (0, 1535), (511, 512)])
def test_no_draw_of_probability_zero(support: tuple[int, ...], dtype: type) -> None:
    """Zero chunks at both ends and between, and the extreme uniforms."""
    weights = np.zeros(1536, dtype)
    weights[list(support)] = np.linspace(0.1, 0.3, len(support))
    law_of = DenseLaw.of(weights)
    sparse = SparseLaw.of(np.arange(1536), weights.astype(np.float64))  # zeros inside the support, as residuals have
    for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, ALMOST_ONE):
        assert law_of.draw(uniform) in support
        assert sparse.draw(uniform) in support
    assert law_of.draw(0.0) == sparse.draw(0.0) == support[0]
    assert law_of.draw(ALMOST_ONE) == sparse.draw(ALMOST_ONE) == support[-1]


@given(weights=st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=1200))
@example(weights=[0.0, 0.1] * 600)
@settings(max_examples=100, deadline=None)
def test_rounding_at_the_far_end_gives_no_zero(weights: list[float]) -> None:
    row = np.array(weights, np.float32)
    assume(row.sum() > 0)
    for uniform in (0.0, ALMOST_ONE, 1 - 2.0**-24):
        assert row[DenseLaw.of(row).draw(uniform)] > 0


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_probabilities_by_token(form: str) -> None:
    row = np.array([0.0, 0.25, 0.75, 0.0])
    made = DenseLaw.of(row * 4) if form == "dense" else SparseLaw.of(np.array([1, 2]), np.array([1.0, 3.0]))
    assert [made.prob(token) for token in (-5, -1, 0, 1, 2, 3, 4, 10**9)] == [0, 0, 0, 0.25, 0.75, 0, 0, 0]
    assert made.probs_at(np.array([-1, 2, 1, 4, 99])).tolist() == [0, 0.75, 0.25, 0, 0]
    assert made.confidence == 0.75
    assert made.dense(4).tolist() == row.tolist()
    assert made.dense(6).tolist() == [*row, 0, 0]


def test_point_masses() -> None:
    point = SparseLaw.point(7)
    assert [point.draw(u) for u in (0.0, 0.5, ALMOST_ONE)] == [7, 7, 7]
    assert point.confidence == 1
    assert (point.prob(7), point.prob(6), point.prob(8)) == (1, 0, 0)


# --- residuals ----------------------------------------------------------------------------------------------------


@given(rows=law_rows(2, 5), scale=st.floats(0, 1))
def test_residual_is_the_positive_part(rows: NDArray[np.float64], scale: float) -> None:
    p, q = rows
    expected = np.maximum(scale * p - q, 0)
    for left in (DenseLaw.of(p), _sparse(p)):
        for right in (DenseLaw.of(q * 3), _sparse(q)):
            rest = residual(left, right, scale)
            if expected.sum() > 1e-9:
                assert rest is not None
                assert rest[1] == pytest.approx(expected.sum(), abs=1e-13)
                np.testing.assert_allclose(rest[0].dense(5) * rest[1], expected, rtol=0, atol=1e-13)
            elif rest is not None:
                assert rest[1] < 1e-8


def test_no_residual_of_equal_laws() -> None:
    row = np.random.default_rng(0).random(700)
    for form in (DenseLaw.of(row), DenseLaw.of(row.astype(np.float32)), _sparse(row)):
        assert residual(form, form) is None
        assert residual(form, form, 0.5) is None


def test_a_residual_leaves_its_laws_alone() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    laws = DenseLaw.of(p), DenseLaw.of(q)
    residual(*laws)
    assert p.tolist() == [0.5, 0.5]
    assert q.tolist() == [0.9, 0.1]


def _sparse(row: NDArray[np.float64]) -> SparseLaw:
    ids = np.flatnonzero(row)
    return SparseLaw.of(ids, row[ids])
