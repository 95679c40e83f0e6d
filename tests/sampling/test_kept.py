"""Laws over kept ids: those of a row in which all other ids are impossible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import InvalidLogitsError, InvalidOptionError
from localspec.sampling import DenseLaw, KeptIds, PositionNoise, SamplingParams, SparseLaw, law, make_law, verify_laws
from localspec.sampling.laws import residual

V = 60
KEPT = KeptIds(np.sort(np.random.default_rng(0).choice(V, 23, replace=False)), V)
OUTSIDE = np.setdiff1d(np.arange(V), KEPT.ids)
INSIDE = KEPT.ids
ROW = (3 * np.random.default_rng(1).standard_normal(V)).astype(np.float32)

CHAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "greedy": {"temperature": 0},
    "top-k": {"top_k": 7},
    "top-k of all": {"top_k": 50},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1, "temperature": 0.6},
    "typical": {"typical_p": 0.6},
    "huggingface": {"top_k": 12, "top_p": 0.8, "temperature": 1.3, "sampler_order": "huggingface"},
    "bias": {"logit_bias": {int(INSIDE[3]): 4.0, int(OUTSIDE[2]): 9.0, int(INSIDE[-1]): -3.0}},
    "bans": {"banned": (int(INSIDE[0]), int(OUTSIDE[0]), int(INSIDE[5]))},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.5},
    "the last five": {"presence_penalty": 2.0, "penalty_last_n": 5, "top_k": 9},
    "greedy with all": {"temperature": 0, "repetition_penalty": 3.0, "logit_bias": {int(INSIDE[1]): 1.0}},
}
HISTORY = [int(token) for token in np.random.default_rng(2).integers(0, V, 40)]


def masked(row: np.ndarray = ROW) -> np.ndarray:
    out = np.full(V, -np.inf, np.float32)
    out[KEPT.ids] = row[KEPT.ids]
    return out


@pytest.mark.parametrize("name", CHAINS)
def test_the_law_is_that_of_the_masked_row(name: str) -> None:
    params = SamplingParams(**CHAINS[name])
    found = KEPT.make_law(ROW[KEPT.ids], params, HISTORY)
    assert isinstance(found, SparseLaw)
    assert (np.diff(found.ids) > 0).all()
    np.testing.assert_allclose(found.dense(V), law(masked(), params, HISTORY), rtol=1e-5, atol=1e-9)
    assert found.dense(V)[OUTSIDE].max() == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    history=st.lists(st.integers(0, V - 1), max_size=30),
    last=st.integers(1, 12),
    top_k=st.sampled_from([0, 3, 11]),
)
def test_penalties_see_the_same_tokens(seed: int, history: list[int], last: int, top_k: int) -> None:
    """Tokens that are not kept are not penalised, but count among the last ones."""
    row = np.random.default_rng(seed).standard_normal(V).astype(np.float32)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, penalty_last_n=last, top_k=top_k)
    found = KEPT.make_law(row[KEPT.ids], params, history)
    np.testing.assert_allclose(found.dense(V), law(masked(row), params, history), rtol=1e-5, atol=1e-9)


def test_draws_by_shared_noise_are_those_of_the_masked_row() -> None:
    found = KEPT.make_law(ROW[KEPT.ids], SamplingParams())
    whole = make_law(masked(), SamplingParams())
    for position in range(200):
        assert found.race(PositionNoise(3, position)) == whole.race(PositionNoise(3, position))


def test_a_prefix_of_the_columns() -> None:
    width = KEPT.columns_below(30)
    assert (KEPT.ids[:width] < 30).all()
    assert (KEPT.ids[width:] >= 30).all()
    found = KEPT.make_law(ROW[KEPT.ids][:width], SamplingParams())
    assert found.dense(V)[30:].max() == 0
    assert found.dense(V).sum() == pytest.approx(1)


def test_nothing_left() -> None:
    with pytest.raises(InvalidLogitsError):
        KEPT.make_law(ROW[KEPT.ids], SamplingParams(banned=tuple(map(int, KEPT.ids))))


@pytest.mark.parametrize("ids", [[], [3, 2], [1, 1], [-1, 2], [2, V]])
def test_ids_that_are_none(ids: list[int]) -> None:
    with pytest.raises(InvalidOptionError, match="must ascend"):
        KeptIds(np.array(ids, np.int64), V)


def test_widened() -> None:
    wide = KEPT.widened(np.stack([ROW[KEPT.ids]] * 2))
    assert wide.shape == (2, V)
    np.testing.assert_array_equal(wide[1], masked())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=10)])
def test_what_the_cut_costs_is_bounded(params: SamplingParams) -> None:
    """α' ≥ α − Σ min(p, q) over the ids cut off: what is left of q only grows."""
    lost = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        p_row, q_row = (2 * rng.standard_normal((2, V))).astype(np.float32)
        p, q = law(p_row, params), law(q_row, params)
        cut = KEPT.make_law(q_row[KEPT.ids], params).dense(V)
        before, after = np.minimum(p, q).sum(), np.minimum(p, cut).sum()
        assert after >= before - np.minimum(p, q)[OUTSIDE].sum() - 1e-6
        lost.append(before - after)
    assert max(lost) > 0.05  # it does cost something


@pytest.mark.parametrize(
    ("params", "kept_probs", "others"),
    [
        (SamplingParams(top_p=0.63), [0.6, 0.05], [0.01] * 35),
        (SamplingParams(min_p=0.3), [0.2, *[0.065] * 7], [0.3]),
    ],
)
def test_shares_of_the_whole_may_cost_more(
    params: SamplingParams, kept_probs: list[float], others: list[float]
) -> None:
    """What top-p and min-p keep of q depends on the ids that are gone: for them that bound does not hold."""
    row = np.log([*kept_probs, *others]).astype(np.float32)
    kept = KeptIds(np.arange(len(kept_probs)), len(row))
    q = law(row, params)  # and p is the same
    cut = kept.make_law(row[: len(kept_probs)], params).dense(len(row))
    assert np.minimum(q, cut).sum() < q[kept.ids].sum() - 0.05


@pytest.mark.parametrize("sparse_target", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_step_through_a_cut_draft_has_the_targets_law(rule: str, sparse_target: bool) -> None:
    """By enumeration over uniforms: dense and sparse p of the whole vocabulary, q on the kept ids only."""
    params = SamplingParams(top_k=9) if sparse_target else SamplingParams()
    rng = np.random.default_rng(5)
    p = [make_law(row, params) for row in (2 * rng.standard_normal((2, V))).astype(np.float32)]
    q = KEPT.make_law(ROW[KEPT.ids], SamplingParams(temperature=1.5))
    assert isinstance(p[0], SparseLaw if sparse_target else DenseLaw)
    emitted = np.zeros(V)
    for token in KEPT.ids.tolist():
        accepts = min(1.0, p[0].prob(token) / q.prob(token))
        for uniform, accepted in ((accepts * (1 - 1e-9), 1), (accepts * (1 + 1e-9), 0)):
            if not (accepts == 0 and accepted) and not (accepts >= 1 and not accepted):
                step = verify_laws(p, [q], [token], rule=rule, uniforms=_Given([uniform, 0.5]))
                assert step.num_accepted == accepted
        emitted[token] += q.prob(token) * accepts
    rest = residual(p[0], q)
    assert rest is not None
    emitted += (1 - emitted.sum()) * rest[0].dense(V)
    np.testing.assert_allclose(emitted, p[0].dense(V), atol=1e-6)


class _Given:
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def random(self, size: int, /) -> np.ndarray:
        return np.array(self.values[:size])
