"""Hypothesis strategies: laws with zeros and ties, rows of logits, sampling parameters."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from localspec.sampling import SamplingParams

# Small integers make ties, zeros and equal laws common; floats make everything else.
_coarse = st.integers(0, 4).map(float)
_fine = st.floats(0, 1, allow_subnormal=False)


@st.composite
def law_rows(draw: st.DrawFn, num_rows: int, size: int) -> NDArray[np.float64]:
    """Return laws, float64 [num_rows, size]."""
    entry = draw(st.sampled_from([_coarse, _fine]))
    flat = draw(st.lists(entry, min_size=num_rows * size, max_size=num_rows * size))
    rows = np.array(flat, dtype=np.float64).reshape(num_rows, size)
    rows[rows.sum(axis=1) < 1e-3] = 1.0
    return rows / rows.sum(axis=1, keepdims=True)


@st.composite
def law_pairs(draw: st.DrawFn, num_target: int, num_draft: int, size: int) -> tuple[NDArray, NDArray]:
    """Return target laws [num_target, size] and draft laws [num_draft, size], now and then the same."""
    p = draw(law_rows(num_target, size))
    kind = draw(st.sampled_from(["free", "equal", "close"]))
    if kind == "free":
        return p, draw(law_rows(num_draft, size))
    q = p[np.arange(num_draft) % num_target]
    if kind == "close":
        q = q * (1 + 1e-9 * np.arange(size))
        q = q / q.sum(axis=1, keepdims=True)
    return p, q


_dtypes = st.sampled_from([np.float32, np.float64])


@st.composite
def logit_rows(draw: st.DrawFn, min_size: int = 1, max_size: int = 2000) -> NDArray[np.floating]:
    """Return one row with something finite: ties, −inf entries, sizes around those that are summed at once."""
    edges = [n for n in (1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 1025) if min_size <= n <= max_size]
    size = draw(st.one_of(st.sampled_from(edges), st.integers(min_size, max_size)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 60.0])) * rng.standard_normal(size)
    if draw(st.booleans()):
        row = np.round(row)  # many ties
    row[rng.random(size) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.99]))] = -np.inf
    if not np.isfinite(row).any():
        row[int(rng.integers(size))] = 1.5
    return (row + draw(st.sampled_from([0.0, -30.0, 1000.0]))).astype(draw(_dtypes))


@st.composite
def sampling_params(draw: st.DrawFn, *, truncating: bool | None = None) -> SamplingParams:
    """Return parameters that are not greedy."""
    temperature = draw(st.one_of(st.sampled_from([1.0, 0.8, 1e-5, 1e6]), st.floats(0.05, 5.0)))
    if truncating is False:
        return SamplingParams(temperature=temperature)
    return SamplingParams(
        temperature=temperature,
        top_k=draw(st.one_of(st.sampled_from([0, 1, 2, 40, 64, 5000]), st.integers(0, 300))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(1e-6, 1.0, exclude_min=True))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
    )


@st.composite
def chain_params(draw: st.DrawFn) -> SamplingParams:
    """Return parameters with any of the chain's options on: bias, bans, penalties, both orders, greedy too."""
    biased = draw(st.sets(st.integers(0, 800), max_size=3))
    banned = draw(st.sets(st.integers(0, 60), max_size=3)) - biased

    def now_and_then(value: st.SearchStrategy[float], off: float) -> float:
        return draw(st.one_of(st.just(off), value))

    return SamplingParams(
        temperature=draw(st.one_of(st.sampled_from([0.0, 1.0, 0.8]), st.floats(0.1, 3.0))),
        top_k=draw(st.one_of(st.just(0), st.sampled_from([1, 2, 40, 5000]), st.integers(0, 300))),
        top_p=now_and_then(st.floats(0.01, 1.0, exclude_min=True), 1.0),
        min_p=now_and_then(st.floats(0.0, 1.0), 0.0),
        typical_p=now_and_then(st.floats(0.01, 1.0, exclude_min=True), 1.0),
        repetition_penalty=now_and_then(st.floats(0.3, 3.0), 1.0),
        frequency_penalty=now_and_then(st.floats(-2, 2), 0.0),
        presence_penalty=now_and_then(st.floats(-2, 2), 0.0),
        penalty_last_n=draw(st.one_of(st.none(), st.integers(1, 90))),
        logit_bias={token: draw(st.floats(-20, 20)) for token in biased},
        banned=tuple(banned),
        sampler_order=draw(st.sampled_from(["llamacpp", "huggingface"])),
    )
