"""The sampler chain against a second one, written plainly; its corners by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localspec.errors import InvalidLogitsError, InvalidOptionError
from localspec.sampling import LLAMACPP_DEFAULTS, DenseLaw, RecentTokens, SamplingParams, SparseLaw, law, make_law
from tests.sampling.chain_reference import reference
from tests.strategies import chain_params, logit_rows

PROBS = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
ROW = np.log(PROBS)


@given(
    logits=logit_rows(max_size=700),
    params=chain_params(),
    history=st.lists(st.one_of(st.integers(0, 8), st.integers(-3, 800)), max_size=80),
)
@settings(max_examples=600, deadline=None)
def test_the_chain_matches_the_plain_one(
    logits: NDArray[np.floating], params: SamplingParams, history: list[int]
) -> None:
    assume(any(value > -math.inf for t, value in enumerate(logits) if t not in params.banned))
    expected, slack = reference(logits, params, history)
    single = logits.dtype == np.float32
    scale = max(1.0, float(np.abs(logits[np.isfinite(logits)]).max()))
    assume(slack > (1e-5 if single else 1e-9) * scale)
    got = law(logits, params, history)
    assert got.sum() == pytest.approx(1, abs=1e-6)
    # Exponents are float32 where the logits are: errors about |logit|/T · 2^-24.
    error = 1e-6 * scale * (1 / params.temperature if params.temperature else 1) if single else 1e-9 * scale
    np.testing.assert_allclose(got, expected, rtol=0, atol=min(max(error, 1e-9), 0.02))
    sure = (expected > 1e-30) | (expected == 0)
    assert np.array_equal((got > 0)[sure], (expected > 0)[sure])


@pytest.mark.parametrize("scale", [0.0, 0.2, 1.0, 3.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"typical_p": 0.9},
        {"typical_p": 0.2},
        {"typical_p": 0.99, "top_p": 0.9},
        {"min_p": 0.01},
        {"sampler_order": "huggingface", "temperature": 1.7, "top_p": 0.9, "typical_p": 0.95},
    ],
    ids=str,
)
def test_rows_of_full_size(scale: float, options: dict[str, Any]) -> None:
    """Rows from flat to peaked at a vocabulary of 40,000, where the shortcuts for large rows are taken."""
    rng = np.random.default_rng(int(scale * 10))
    row = (scale * rng.standard_normal(40_000)).astype(np.float32)
    params = SamplingParams(**options)
    expected, _ = reference(row, params)
    got = law(row, params)
    # Sums of tens of thousands of float32 weights: the cut may fall some tokens beside.
    moved = np.flatnonzero((got > 0) != (expected > 0))
    assert expected[moved].sum() + got[moved].sum() < 2e-4
    np.testing.assert_allclose(np.delete(got, moved), np.delete(expected, moved), rtol=5e-4, atol=1e-9)
    if scale == 0:  # equals at the cut: the lower ids stay
        kept = np.count_nonzero(got)
        assert np.flatnonzero(got).tolist() == list(range(kept))


# --- penalties ----------------------------------------------------------------------------------------------------


def logits_after(history: list[int], **options: Any) -> list[float]:
    """Return the changes to logits (2, −2, 0, 0), up to a constant, read off the law."""
    row = np.array([2.0, -2.0, 0.0, 0.0])
    after = np.log(law(row, SamplingParams(**options), history))
    return (after - after[3]).tolist()


def test_penalties_by_hand() -> None:
    assert logits_after([0, 1], repetition_penalty=2) == pytest.approx([1, -4, 0, 0]), "divided, and multiplied"
    assert logits_after([0, 0, 1], frequency_penalty=0.5) == pytest.approx([1, -2.5, 0, 0]), "once per occurrence"
    assert logits_after([0, 0, 1], presence_penalty=0.5) == pytest.approx([1.5, -2.5, 0, 0]), "once"
    together = {"repetition_penalty": 2, "frequency_penalty": 0.25, "presence_penalty": 1}
    assert logits_after([0, 0, 1], **together) == pytest.approx([2 / 2 - 0.5 - 1, -4 - 0.25 - 1, 0, 0])
    assert logits_after([0], repetition_penalty=0.5, presence_penalty=-1) == pytest.approx([5, -2, 0, 0]), "rewards"
    assert logits_after([2, -1, 4, 99], presence_penalty=1) == pytest.approx([2, -2, -1, 0]), "ids outside"


def test_the_last_n_tokens_count() -> None:
    history = [0, 1, 1, 2]
    for last_n, expected in ((1, [2, -2, -1, 0]), (2, [2, -3, -1, 0]), (3, [2, -4, -1, 0]), (4, [1, -4, -1, 0])):
        assert logits_after(history, frequency_penalty=1, penalty_last_n=last_n) == pytest.approx(expected)
    for last_n in (5, 64, None):
        assert logits_after(history, frequency_penalty=1, penalty_last_n=last_n) == pytest.approx([1, -4, -1, 0])
    assert logits_after([], frequency_penalty=1) == pytest.approx([2, -2, 0, 0])


@given(
    history=st.lists(st.integers(0, 5), max_size=12),
    drafted=st.lists(st.integers(0, 5), max_size=5),
    last_n=st.one_of(st.none(), st.integers(1, 9)),
)
def test_drafted_tokens_are_the_last_of_the_history(
    history: list[int], drafted: list[int], last_n: int | None
) -> None:
    row = np.linspace(-2, 2, 6)
    params = SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, penalty_last_n=last_n)
    recent = RecentTokens(params, history)
    for length in range(len(drafted) + 1):
        together = law(row, params, [*history, *drafted[:length]])
        assert make_law(row, params, recent.then(drafted[:length])).dense(6).tolist() == together.tolist()


def test_without_penalties_no_history_is_kept() -> None:
    history = np.arange(10**6)  # would be slow to copy
    assert RecentTokens(SamplingParams(), history).then([1, 2]).size == 0  # type: ignore[arg-type]
    assert RecentTokens(SamplingParams(presence_penalty=1), history).then([]).size == 64  # type: ignore[arg-type]


# --- bias, bans, typical-p, order ---------------------------------------------------------------------------------


def test_bias_and_bans_by_hand() -> None:
    biased = law(ROW, SamplingParams(logit_bias={1: math.log(2), 4: -math.log(2), 99: 5.0}))
    assert biased.tolist() == pytest.approx((np.array([16, 16, 4, 2, 1]) / 39).tolist())
    assert law(ROW, SamplingParams(banned=(0, 3, 99))).tolist() == pytest.approx([0, 4 / 7, 2 / 7, 0, 1 / 7])
    assert law(ROW, SamplingParams(banned=(0,), temperature=0)).tolist() == [0, 1, 0, 0, 0]
    assert law(ROW, SamplingParams(banned=(0,), top_k=1)).tolist() == [0, 1, 0, 0, 0], "before top-k"
    # Bias comes before the penalties: 2 − 3 is negative, and is multiplied.
    after = law(np.array([2.0, 0.0]), SamplingParams(logit_bias={0: -3}, repetition_penalty=2), [0])
    assert math.log(after[0] / after[1]) == pytest.approx(-2)


def test_banning_everything_is_said_so() -> None:
    with pytest.raises(InvalidLogitsError, match="banned tokens leave none"):
        law(ROW, SamplingParams(banned=(0, 1, 2, 3, 4)))
    with pytest.raises(InvalidLogitsError, match="damaged"):
        law(np.full(3, -np.inf), SamplingParams(banned=(0,)))
    with pytest.raises(InvalidLogitsError, match="nan"):
        law(np.array([0.0, math.nan]), SamplingParams(banned=(1,)))
    with pytest.raises(InvalidLogitsError, match="nan"):
        law(np.array([0.0, math.inf]), SamplingParams(banned=(1,)))


def test_typical_by_hand() -> None:
    """Entropy 1.3 nats, so the surprises 0.69, 1.39, 2.08, 2.77, 2.77 lie 0.61, 0.09, 0.78, 1.47, 1.47 from it."""
    assert np.flatnonzero(law(ROW, SamplingParams(typical_p=0.2))).tolist() == [1]
    assert np.flatnonzero(law(ROW, SamplingParams(typical_p=0.3))).tolist() == [0, 1]
    assert np.flatnonzero(law(ROW, SamplingParams(typical_p=0.8))).tolist() == [0, 1, 2]
    assert np.flatnonzero(law(ROW, SamplingParams(typical_p=0.9))).tolist() == [0, 1, 2, 3], "equals: the lower id"
    # typical-p goes on until it is exceeded, top-p until it is reached.
    assert np.count_nonzero(law(np.zeros(2), SamplingParams(typical_p=0.5))) == 2
    assert np.count_nonzero(law(np.zeros(2), SamplingParams(top_p=0.5))) == 1
    # It may cut the likeliest off, and what follows takes the survivors as they are.
    cold = SamplingParams(typical_p=0.2, temperature=0)
    assert law(ROW, cold).tolist() == [0, 1, 0, 0, 0]
    assert np.flatnonzero(law(ROW, SamplingParams(typical_p=0.95, min_p=0.9))).tolist() == [0]
    assert np.flatnonzero(law(ROW, SamplingParams(top_k=2, typical_p=0.3))).tolist() == [0]


def test_temperature_first_is_another_law() -> None:
    """At temperature 0.5 the row is (64, 16, 4, 1, 1)/86: top-p 0.9 then keeps two tokens, and at 1 four."""
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9}
    assert np.flatnonzero(law(ROW, SamplingParams(**options))).tolist() == [0, 1, 2, 3]
    first = law(ROW, SamplingParams(**options, sampler_order="huggingface"))
    assert first.tolist() == pytest.approx([0.8, 0.2, 0, 0, 0])
    # Greedy there means greedy: no cut comes before.
    assert law(ROW, SamplingParams(temperature=0, typical_p=0.2, sampler_order="huggingface"))[0] == 1


def test_the_logits_are_left_alone() -> None:
    row = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    before = row.copy()
    for options in ({"logit_bias": {3: 1.0}}, {"banned": (5,)}, {"repetition_penalty": 1.5}, {"typical_p": 0.5}):
        make_law(row, SamplingParams(**options), [1, 2, 3])  # type: ignore[arg-type]
        make_law(row, SamplingParams(**options, sampler_order="huggingface", temperature=0.3), [1, 2])  # type: ignore[arg-type]
        assert np.array_equal(row, before)


def test_few_survivors_make_a_sparse_law_and_many_a_dense_one() -> None:
    row = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    assert isinstance(make_law(row, LLAMACPP_DEFAULTS), SparseLaw)
    wide = make_law(row, SamplingParams(min_p=0.001))
    assert isinstance(wide, DenseLaw)
    assert (wide.weights == 0).any()
    assert wide.dense(20_000).sum() == pytest.approx(1)


@pytest.mark.parametrize("logits", [[], [[1.0, 2.0]], 1.0, ["a", "b"], [[1.0], [1.0, 2.0]], None, [1j]])
def test_what_is_no_row_of_logits(logits: Any) -> None:
    with pytest.raises(InvalidOptionError, match="logits"):
        law(logits, SamplingParams())


@pytest.mark.parametrize("history", [["a"], [0.5], [[1]], [[1], [1, 2]], 3])
def test_what_is_no_history(history: Any) -> None:
    with pytest.raises(InvalidOptionError, match="history"):
        law([1.0, 2.0], SamplingParams(presence_penalty=1), history)
