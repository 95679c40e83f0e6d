"""Sampled speculation on real models: the same tokens where that is promised, the same laws everywhere."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from localspec.backend import Span
from localspec.backend.native import NativeContext
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.generation import Generation, Request
from localspec.policy import FixedPolicy
from localspec.sampling import (
    Law,
    Rule,
    SamplingParams,
    StepNoise,
    Stream,
    law,
    make_law,
    verification_law,
    verify_laws,
)
from tests.backends import open_model
from tests.replays import check_same, race, read
from tests.stats import g_test, holm_rejects

pytestmark = pytest.mark.model

PROMPTS = (
    "The lighthouse keeper had not spoken to anyone for three weeks when",
    "def is_prime(n):\n",
    "Here is a short list of things one needs on a long walk:",
    "It was raining in the harbour, and",
)
NUM_SEQUENCES = 10
CAPACITY = 128
GAMMA = 3


@pytest.fixture(scope="module")
def contexts(smollm2_path: Path, smollm2_q4_0_path: Path) -> Iterator[tuple[NativeContext, NativeContext]]:
    models = [open_model(path) for path in (smollm2_path, smollm2_q4_0_path)]
    made = [NativeContext(model, capacity=CAPACITY, num_sequences=NUM_SEQUENCES) for model in models]
    yield made[0], made[1]
    for context, model in zip(made, models, strict=True):
        context.close()
        model.close()


def engine(contexts: tuple[NativeContext, NativeContext]) -> Engine:
    target, draft = contexts
    for context, sequence in itertools.product(contexts, range(NUM_SEQUENCES)):
        context.truncate(sequence, 0)
    drafter = ModelDrafter(draft, vocabulary_size=target.vocabulary_size, ends_generation=lambda token: False)
    return Engine(target, drafter, ends_generation=lambda token: False)


def run(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Run the requests, NUM_SEQUENCES at a time."""
    done = []
    for at in range(0, len(requests), NUM_SEQUENCES):
        batch = [engine.start(request, i) for i, request in enumerate(requests[at : at + NUM_SEQUENCES])]
        while running := [g for g in batch if g.finish_reason is None]:
            engine.step(running)
        done += batch
    return done


# --- the coupled rule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, temperature=1.0),
    ],
    ids=["temperature 0.8", "penalties"],
)
def test_coupled_text_is_plain_text(contexts: tuple[NativeContext, NativeContext], params: SamplingParams) -> None:
    """1,000 tokens at each setting, ten sequences in a batch, every one what plain decoding gives at the same seed.

    Near-ties aside, which tests/replays.py measures; what follows one is checked against the rule itself.
    """
    shared = engine(contexts)
    vocabulary = contexts[0].model.vocabulary
    reader = NativeContext(contexts[0].model, capacity=CAPACITY)
    prompts = [vocabulary.tokenize(PROMPTS[seed % len(PROMPTS)]) for seed in range(20)]

    def texts(gamma: int) -> list[Generation]:
        how = {"params": params, "max_tokens": 50, "rule": "coupled", "policy": FixedPolicy(gamma)}
        return run(shared, [Request(prompt=prompt, seed=seed, **how) for seed, prompt in enumerate(prompts)])  # type: ignore[arg-type]

    accepted = 0
    for plain, drafted in zip(texts(0), texts(GAMMA), strict=True):
        assert len(drafted.tokens) == 50
        check_same(reader, plain.request.prompt, plain.tokens, drafted.tokens, race(params, plain.request.seed))
        accepted += drafted.stats.accepted
    reader.close()
    assert accepted > 300


# --- sampling -----------------------------------------------------------------------------------------------------


def test_speculative_samples_have_the_targets_law(contexts: tuple[NativeContext, NativeContext]) -> None:
    """G-tests on SmolLM2 and its Q4_0 draft against the enumerated law; false alarm 1e-3 over all of them.

    Three tokens are all that can come, which is cut nowhere, so that the noise of kernels moves chances only a
    little; the draft is colder, so that much of what it drafts is rejected. The first token of a generation is never
    drafted: compared are the second token, and the second to fourth together, in 600 generations under each rule. A
    difference of 0.12 in total variation would be noticed with a probability above 0.9.
    """
    target, _draft = contexts
    shared = engine(contexts)
    prompt = target.model.vocabulary.tokenize(PROMPTS[0])
    reader = NativeContext(target.model, capacity=CAPACITY)
    likeliest = np.argsort(read(reader, prompt, 1)[0])[-3:].tolist()
    params = SamplingParams(temperature=1.2, logit_bias=dict.fromkeys(likeliest, 60.0), presence_penalty=0.5)
    colder = replace(params, temperature=0.5)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        after = {prefix: law(read(reader, [*prompt, *prefix], 1)[0], params, [*prompt, *prefix]) for prefix in joint}
        joint = {(*prefix, t): p * float(after[prefix][t]) for prefix, p in joint.items() for t in likeliest}
    reader.close()
    assert sum(joint.values()) == pytest.approx(1, abs=1e-6)

    p_values, drafted, accepted = {}, 0, 0
    for number, rule in enumerate(get_args(Rule)):
        how = {"params": params, "draft_params": colder, "max_tokens": 4, "rule": rule, "policy": FixedPolicy(2)}
        done = run(shared, [Request(prompt=prompt, seed=1000 * number + i, **how) for i in range(600)])
        for name, part in {"second": slice(1, 2), "second to fourth": slice(1, 4)}.items():
            expected: Counter[Hashable] = Counter()
            for tokens, chance in joint.items():
                expected[tokens[part]] += chance  # type: ignore[assignment]
            p_values[f"{rule}, {name}"] = g_test([tuple(g.tokens[part]) for g in done], expected)
        drafted += sum(g.stats.drafted for g in done)
        accepted += sum(g.stats.accepted for g in done)
    print(f"{accepted} of {drafted} accepted", {name: round(p, 4) for name, p in p_values.items()})
    assert holm_rejects(p_values, 1e-3) == []


# --- a replay of recorded rows ------------------------------------------------------------------------------------

REPLAYS = int(os.environ.get("LOCALSPEC_REPLAYS", "60000"))
DEPTH = 3
REPLAYED = SamplingParams(temperature=1.0, top_k=4)

Laws = Mapping[tuple[int, ...], Law]


def recorded(path: Path, text: str, continuations: Laws | None, depth: int) -> Laws:
    """Return a model's laws after ``text`` and every continuation, up to ``depth`` tokens of ``continuations``."""
    model = open_model(path)
    context = NativeContext(model, capacity=64)
    prompt = model.vocabulary.tokenize(text)
    laws: dict[tuple[int, ...], Law] = {}

    def record(prefix: tuple[int, ...]) -> None:
        context.truncate(0, min(context.length(0), len(prompt) - 1))
        missing = [*prompt, *prefix][context.length(0) :]
        laws[prefix] = make_law(context.decode([Span(0, missing, 1)])[-1], REPLAYED)
        if len(prefix) < depth:
            for token in support((continuations or laws)[prefix]):
                record((*prefix, token))

    record(())
    context.close()
    model.close()
    return laws


def support(one: Law) -> list[int]:
    return [int(token) for token in np.flatnonzero(one.dense(200_000))]


def enumerated(p: Laws, q: Laws, rule: str) -> dict[tuple[int, ...], float]:
    """Return the exact law of what one step emits."""
    ids = sorted({token for one in (*p.values(), *q.values()) for token in support(one)})
    place = {token: i for i, token in enumerate(ids)}
    small = {name: {k: v.probs_at(np.array(ids)) for k, v in laws.items()} for name, laws in (("p", p), ("q", q))}
    out: Counter[tuple[int, ...]] = Counter()
    for drafted in itertools.product(ids, repeat=DEPTH):
        prefixes = [drafted[:i] for i in range(DEPTH + 1)]
        if any(prefix not in q for prefix in prefixes[:-1]) or prefixes[-1] not in p:
            continue
        q_rows = np.array([small["q"][prefix] for prefix in prefixes[:-1]])
        p_rows = np.array([small["p"][prefix] for prefix in prefixes])
        chance = math.prod(q_rows[i, place[token]] for i, token in enumerate(drafted))
        probs, laws = verification_law(p_rows, q_rows, [place[token] for token in drafted], rule)
        for num_accepted, prob in enumerate(probs):
            for i in np.flatnonzero(laws[num_accepted] * prob):
                out[(*drafted[:num_accepted], ids[i])] += chance * float(prob) * float(laws[num_accepted, i])
    return dict(out)


def replay(p: Laws, q: Laws, rule: str, num_runs: int) -> Iterator[tuple[int, ...]]:
    """Yield what steps emit that draft and verify as the engine does, one at every position."""
    for position in range(num_runs):
        noise = StepNoise(2024, position, Stream.DRAFT)
        drafted: list[int] = []
        for _ in range(DEPTH):
            drafted.append(q[tuple(drafted)].draw(noise.next()))
        prefixes = [tuple(drafted[:i]) for i in range(DEPTH + 1)]
        verification = verify_laws(
            [p[prefix] for prefix in prefixes],
            [q[prefix] for prefix in prefixes[:-1]],
            drafted,
            rule=rule,
            uniforms=StepNoise(2024, position, Stream.VERIFY),
        )
        yield (*drafted[: verification.num_accepted], verification.next_token)


def test_a_replay_of_real_rows_follows_the_enumeration(qwen_target_path: Path, qwen_draft_path: Path) -> None:
    """G-tests of whole steps of the default pair, top-k 4 and three drafted tokens; false alarm 1e-3 over both rules.

    LOCALSPEC_REPLAYS sets how many steps each rule replays. At 60,000 a total variation of 0.03 would be noticed
    with a probability above 0.9.
    """
    q = recorded(qwen_draft_path, PROMPTS[2], None, DEPTH - 1)
    paths = dict(q)
    p = recorded(qwen_target_path, PROMPTS[2], paths, DEPTH)
    assert len(q) == 1 + 4 + 16
    assert len(p) == 1 + 4 + 16 + 64
    p_values = {}
    for rule in ("token", "block"):
        expected = enumerated(p, q, rule)
        assert sum(expected.values()) == pytest.approx(1, abs=1e-9)
        for token in support(p[()]):  # what was to be shown: the first token has the target's law
            first = sum(prob for emitted, prob in expected.items() if emitted[0] == token)
            assert first == pytest.approx(p[()].prob(token), abs=1e-9)
        p_values[rule] = g_test(replay(p, q, rule, REPLAYS), expected)
    print(REPLAYS, p_values)
    assert holm_rejects(p_values, 1e-3) == []
