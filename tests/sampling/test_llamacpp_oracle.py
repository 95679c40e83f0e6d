"""Our laws against llama.cpp's own sampler chain, on rows recorded from real models.

Both get the same logits and the same history. What must agree: every probability to 1e-5, and which tokens have
one at all. llama.cpp sums in float32, one after the other, and cuts equals in no particular order; so where the
two supports differ, the cut must be closer to a boundary than the rounding of that sum, which is worked out for the
row, and such cases must be rare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as native
import numpy as np
import pytest
from numpy.typing import NDArray

from localspec.backend import Span
from localspec.backend.llamacpp import LlamaContext, LlamaModel
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams, law
from tests.sampling.chain_reference import reference

pytestmark = pytest.mark.model

TEXTS = (
    "The harbour lay in fog when the first boats came home, and nobody on the quay could say how many there were.",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot = items[0]\n    rest = items\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946, 17711",
    "Dear Sir or Madam, I am writing to you about the noise, the noise, the noise, the noise, the noise, the noise",
)
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1000, "temperature": 0.7},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.3},
    {"min_p": 0.05},
    {"min_p": 0.001, "temperature": 1.2},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"typical_p": 0.5, "temperature": 0.0},
    {"top_k": 40, "typical_p": 0.7},
    {"top_k": 100, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    {"typical_p": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 1.3, "penalty_last_n": 16, "temperature": 0.0},
    {"repetition_penalty": 0.8, "top_k": 50},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 0.6, "top_p": 0.9},
    {"frequency_penalty": -0.3, "presence_penalty": -0.5, "min_p": 0.05},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1, "penalty_last_n": 5, "top_k": 20},
    {"logit_bias": {11: 3.5, 284: -2.0, 1000: 8.0}},
    {"logit_bias": {13: 2.0}, "banned": (0, 198, 28), "top_k": 40, "top_p": 0.9},
    {"logit_bias": {30: -4.0}, "repetition_penalty": 1.15, "typical_p": 0.8, "top_k": 64},
    {
        "temperature": 0.7,
        "top_k": 40,
        "typical_p": 0.97,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.05,
        "logit_bias": {16: 1.0},
        "banned": (2,),
    },
)


class Chain:
    """llama.cpp's samplers in the order of its own tools, made for one setting."""

    def __init__(self, params: SamplingParams, size: int) -> None:
        self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
        pairs = [*params.biases, *((token, -np.inf) for token in params.banned)]
        biases = (native.llama_logit_bias * len(pairs))(*pairs)
        last_n = 1 << 20 if params.penalty_last_n is None else params.penalty_last_n
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for sampler in (
            native.llama_sampler_init_logit_bias(size, len(pairs), biases),
            native.llama_sampler_init_penalties(size, last_n, *penalties),
            native.llama_sampler_init_top_k(params.top_k),
            native.llama_sampler_init_typical(params.typical_p, 0),
            native.llama_sampler_init_top_p(params.top_p, 0),
            native.llama_sampler_init_min_p(params.min_p, 0),
            native.llama_sampler_init_temp(params.temperature),
            native.llama_sampler_init_dist(1),
        ):
            native.llama_sampler_chain_add(self._chain, sampler)

    def law(self, logits: NDArray[np.float32], history: list[int]) -> NDArray[np.float64]:
        """Return the probabilities that the last sampler of the chain draws from, [V]."""
        native.llama_sampler_reset(self._chain)
        for token in history:
            native.llama_sampler_accept(self._chain, token)
        candidates = np.zeros(len(logits), CANDIDATE)
        candidates["id"] = np.arange(len(logits))
        candidates["logit"] = logits
        pointer = candidates.ctypes.data_as(ctypes.POINTER(native.llama_token_data))
        array = native.llama_token_data_array(data=pointer, size=len(logits), selected=-1, sorted=False)
        native.llama_sampler_apply(self._chain, ctypes.byref(array))
        left = candidates[: array.size]
        out = np.zeros(len(logits))
        out[left["id"]] = left["p"]
        assert 0 <= array.selected < array.size
        return out

    def close(self) -> None:
        native.llama_sampler_free(self._chain)


def rows_of(path: Path, num_rows: int) -> Iterator[tuple[NDArray[np.float32], list[int]]]:
    """Yield ``num_rows`` rows of logits and, for each, the tokens before it."""
    model = LlamaModel(path)
    context = LlamaContext(model, capacity=256)
    try:
        for text in TEXTS:
            tokens = model.vocabulary.tokenize(text)[: num_rows // len(TEXTS)]
            tokens += tokens[: num_rows // len(TEXTS) - len(tokens)]
            context.truncate(0, 0)
            rows = context.decode([Span(0, tokens, len(tokens))]).copy()
            for i, row in enumerate(rows):
                yield row, tokens[: i + 1]
    finally:
        context.close()
        model.close()


def drift(row: NDArray[np.float32]) -> float:
    """Return the relative error of adding up the row's weights in float32, one after the other."""
    weights = np.exp(row - row.max())
    return abs(float(np.cumsum(weights)[-1]) / float(weights.astype(np.float64).sum()) - 1)


@pytest.mark.parametrize(("name", "num_rows"), [("smollm2_path", 152), ("qwen_draft_path", 64)])
def test_every_law_is_that_of_llamacpp(name: str, num_rows: int, request: pytest.FixtureRequest) -> None:
    rows = list(rows_of(request.getfixturevalue(name), num_rows))
    assert len(rows) == num_rows
    size = len(rows[0][0])
    cases = differing = 0
    worst = 0.0
    for options in SETTINGS:
        params = SamplingParams(**options)
        chain = Chain(params, size)
        for row, history in rows:
            ours, theirs = law(row, params, history), chain.law(row, history)
            theirs /= theirs.sum()
            cases += 1
            # What exp cannot tell from 0 in float32 is no matter of the cuts.
            moved = np.flatnonzero(((ours > 0) != (theirs > 0)) & (np.maximum(ours, theirs) > 1e-30))
            if moved.size:
                differing += 1
                assert reference(row, params, history)[1] < 1e-5 + 2 * drift(row), (options, moved)
            else:
                error = float(np.abs(ours - theirs).max())
                worst = max(worst, error)
                assert error < 1e-5, (options, error)
        chain.close()
    print(f"{cases} laws, {differing} cut elsewhere within rounding, largest error {worst:.1e}")
    assert cases >= 30 * num_rows
    assert differing <= cases // 100


def test_the_settings_are_those_of_users() -> None:
    assert len(SETTINGS) >= 30
    assert LLAMACPP_DEFAULTS in [SamplingParams(**options) for options in SETTINGS]
