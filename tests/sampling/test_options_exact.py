"""Exactness with every option switched on: the joint law of what comes out, enumerated.

The laws are made as the engine makes them: penalties look at the emitted history and at the drafted prefix of the
step. What must come out is the law of plain decoding, where each token is drawn given the tokens before it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import InvalidLogitsError, InvalidOptionError
from localspec.generation import Generation, Request
from localspec.policy import FixedPolicy
from localspec.sampling import RecentTokens, SamplingParams, law, make_law, verification_law
from tests.fakes import FakeContext, MarkovModel
from tests.stats import g_test, holm_rejects

Path = tuple[int, ...]
Floats = NDArray[np.float64]

SIZE, LENGTH = 3, 4
PROMPT = (2, 1)
TARGET = MarkovModel([[0.1, 0.2, 0.7], [0.05, 0.5, 0.45], [0.4, 0.4, 0.2]])
DRAFT = MarkovModel([[0.3, 0.1, 0.6], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]])
TOLERANCE = 1e-12

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "typical-p": {"typical_p": 0.6},
    "bias": {"logit_bias": {0: 1.0, 2: -0.5}},
    "ban": {"banned": (1,)},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 0.9},
    "the last two": {"frequency_penalty": 1.1, "penalty_last_n": 2},
    "the last one": {"repetition_penalty": 2.5, "penalty_last_n": 1},
    "whole history": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "penalty_last_n": None},
    "rewards": {"frequency_penalty": -0.7},
    "everything": {
        "temperature": 0.7,
        "top_k": 2,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.4,
        "logit_bias": {1: 0.3},
    },
    "temperature first": {
        "sampler_order": "huggingface",
        "temperature": 1.6,
        "top_p": 0.8,
        "repetition_penalty": 1.5,
    },
}

LawAfter = Callable[[Path, Path], Floats]
"""From emitted tokens (the prompt's first) and the drafted prefix: the next law."""


def law_after(model: MarkovModel, params: SamplingParams) -> LawAfter:
    """Return laws made as engine and drafter make them."""

    def after(emitted: Path, drafted: Path) -> Floats:
        recent = RecentTokens(params, emitted).then(drafted)
        return make_law(model.logits([*emitted, *drafted]).astype(np.float64), params, recent).dense(SIZE)

    return after


def joint_of_steps(p_after: LawAfter, q_after: LawAfter, rule: str, num_draft_tokens: int) -> dict[Path, float]:
    """Return the joint law of LENGTH tokens, emitted by as many steps as that takes."""

    @functools.cache
    def step(emitted: Path) -> dict[Path, float]:
        out: dict[Path, float] = defaultdict(float)
        for drafted in itertools.product(range(SIZE), repeat=num_draft_tokens):
            q = np.array([q_after(emitted, drafted[:i]) for i in range(num_draft_tokens)])
            chance = math.prod(float(q[i, token]) for i, token in enumerate(drafted))
            if chance == 0:
                continue
            p = np.array([p_after(emitted, drafted[:i]) for i in range(num_draft_tokens + 1)])
            probs, laws = verification_law(p, q, drafted, rule)
            for num_accepted, prob in enumerate(probs):
                for token in range(SIZE):
                    out[(*drafted[:num_accepted], token)] += chance * float(prob) * float(laws[num_accepted, token])
        return out

    joint: dict[Path, float] = defaultdict(float)

    def extend(path: Path, weight: float) -> None:
        if len(path) >= LENGTH:
            joint[path[:LENGTH]] += weight
            return
        for emitted, prob in step((*PROMPT, *path)).items():
            if prob > 0:
                extend(path + emitted, weight * prob)

    extend((), 1.0)
    return joint


def joint_of_plain(params: SamplingParams) -> dict[Path, float]:
    """Return the joint law of plain decoding: every token drawn given all before it."""
    joint: dict[Path, float] = {}
    for path in itertools.product(range(SIZE), repeat=LENGTH):
        weight = 1.0
        for i, token in enumerate(path):
            before = [*PROMPT, *path[:i]]
            weight *= float(law(TARGET.logits(before).astype(np.float64), params, before)[token])
        joint[path] = weight
    return joint


def error(
    params: SamplingParams, rule: str, *, draft: dict[str, Any] | None = None, p_after: LawAfter | None = None
) -> float:
    q_after = law_after(DRAFT, replace(params, **(draft or {})))
    joint = joint_of_steps(p_after or law_after(TARGET, params), q_after, rule, 2)
    expected = joint_of_plain(params)
    assert sum(expected.values()) == pytest.approx(1)
    return max(abs(joint[path] - expected[path]) for path in expected)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_leaves_the_law_of_plain_decoding(name: str, rule: str) -> None:
    assert error(SamplingParams(**OPTIONS[name]), rule) < TOLERANCE


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "draft",
    [
        {"temperature": 0.4},
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0},
    ],
    ids=str,
)
def test_the_drafts_own_settings_change_nothing(draft: dict[str, Any], rule: str) -> None:
    assert error(SamplingParams(**OPTIONS["everything"]), rule, draft=draft) < TOLERANCE


def without_the_drafted_prefix(params: SamplingParams) -> LawAfter:
    """Penalties that see only what was emitted before the step."""
    return lambda emitted, drafted: make_law(
        TARGET.logits([*emitted, *drafted]).astype(np.float64), params, emitted
    ).dense(SIZE)


def with_a_token_that_was_rejected(params: SamplingParams) -> LawAfter:
    """Penalties that see one drafted token too many."""
    after = law_after(TARGET, params)
    return lambda emitted, drafted: (
        make_law(TARGET.logits([*emitted, *drafted]).astype(np.float64), params, [*emitted, *drafted, 0]).dense(SIZE)
        if drafted
        else after(emitted, drafted)
    )


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mutant", [without_the_drafted_prefix, with_a_token_that_was_rejected])
def test_enumeration_notices_a_wrong_history(mutant: Callable[[SamplingParams], LawAfter], rule: str) -> None:
    params = SamplingParams(**OPTIONS["frequency"])
    assert error(params, rule, p_after=mutant(params)) > 1e-3


# --- the same through the engine ----------------------------------------------------------------------------------


def outcomes(params: SamplingParams, rule: str, num_runs: int, draft: SamplingParams | None) -> list[Path]:
    drafter = ModelDrafter(FakeContext(DRAFT), vocabulary_size=SIZE, ends_generation=lambda token: False)
    engine = Engine(FakeContext(TARGET), drafter, ends_generation=lambda token: False)
    drawn = []
    for seed in range(num_runs):
        options: dict[str, Any] = {"rule": rule, "seed": seed, "draft_params": draft, "max_tokens": LENGTH}
        request = Request(prompt=PROMPT, params=params, policy=FixedPolicy(3), **options)
        generation = engine.start(request)
        while generation.finish_reason is None:
            engine.step([generation])
        drawn.append(tuple(generation.tokens))
    return drawn


def test_the_engine_draws_from_these_laws() -> None:
    """G-tests of four tokens, 1,000 seeds for each option and rule; false alarm 1e-3 over all.

    A history wrong by one token moves the joint law by a total variation of 0.1 and more: noticed with a probability
    above 0.9.
    """
    p_values = {}
    names: Sequence[str] = ("frequency", "the last two", "everything", "temperature first")
    for name, rule in itertools.product(names, ("token", "block", "coupled")):
        params = SamplingParams(**OPTIONS[name])
        draft = replace(params, temperature=1.5) if name == "everything" else None
        p_values[f"{name}, {rule}"] = g_test(outcomes(params, rule, 1000, draft), joint_of_plain(params))
    assert holm_rejects(p_values, 1e-3) == []


def test_settings_no_law_can_be_made_with() -> None:
    """Unknown ids are refused at once; bans that leave nothing fail the target, and only end a draft."""

    def started(params: SamplingParams, draft: SamplingParams | None = None) -> tuple[Engine, Generation]:
        drafter = ModelDrafter(FakeContext(DRAFT), vocabulary_size=SIZE, ends_generation=lambda token: False)
        engine = Engine(FakeContext(TARGET), drafter, ends_generation=lambda token: False)
        request = Request(
            prompt=PROMPT, params=params, max_tokens=6, seed=1, policy=FixedPolicy(2), draft_params=draft
        )
        return engine, engine.start(request)

    with pytest.raises(InvalidOptionError, match="token 3 cannot be biased or banned"):
        started(SamplingParams(banned=(3,)))
    nothing = SamplingParams(banned=(0, 1, 2))
    engine, generation = started(nothing)
    with pytest.raises(InvalidLogitsError, match="banned tokens leave none"):
        engine.step([generation])
    engine, generation = started(SamplingParams(), nothing)
    while generation.finish_reason is None:
        engine.step([generation])
    assert (generation.stats.tokens, generation.stats.drafted) == (6, 0)
