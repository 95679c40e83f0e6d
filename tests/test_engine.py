"""The engine on models whose law is known: exact, greedy as plain, honest about what it did, sound after failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from localspec.drafters import Drafter, ModelDrafter
from localspec.engine import Engine
from localspec.errors import (
    ContextOverflowError,
    EvaluationError,
    InvalidLogitsError,
    InvalidOptionError,
    RollbackError,
)
from localspec.generation import Generation, Request, Stats
from localspec.policy import FixedPolicy, StepOutcome
from localspec.sampling import SamplingParams, SparseLaw, law
from tests import fakes
from tests.fakes import Failure, FakeContext, MarkovModel
from tests.stats import g_test, holm_rejects

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams()
END = 4
TARGET = MarkovModel.random(1, never=[END])
DRAFT = MarkovModel.random(2, never=[END])
PROMPT = [1, 2, 3, 0, 2, 1, 3]

DrafterOf = Callable[[MarkovModel], Drafter]


def model_drafter(draft: MarkovModel = DRAFT, *, failure: Failure | None = None, **options: Any) -> ModelDrafter:
    context = FakeContext(draft, failure=failure, **options)
    return ModelDrafter(context, vocabulary_size=5, ends_generation=lambda token: token == END)


def engine(
    target: MarkovModel = TARGET, drafter: Drafter | None = None, *, failure: Failure | None = None, **options: Any
) -> Engine:
    return Engine(
        FakeContext(target, failure=failure, **options), drafter, ends_generation=lambda token: token == END
    )


def request(prompt: Sequence[int] = PROMPT, *, num_draft_tokens: int = 4, **options: Any) -> Request:
    options = {"params": GREEDY, "max_tokens": 20, "seed": 7, **options}
    return Request(prompt=prompt, policy=FixedPolicy(num_draft_tokens), **options)


def run(engine: Engine, generation: Generation) -> list[int]:
    """Step to the end; return the tokens, checked against every account the engine gives of them."""
    tokens: list[int] = []
    accepted = 0
    while generation.finish_reason is None:
        (step,) = engine.step([generation])
        assert len(step.tokens) >= 1
        assert len(step.tokens) - 1 <= step.num_accepted <= len(step.tokens)
        tokens += step.tokens
        accepted += step.num_accepted
    assert tokens == generation.tokens
    check_stats(generation.stats, len(tokens))
    assert generation.stats.accepted == accepted
    return tokens


def check_stats(stats: Stats, num_tokens: int) -> None:
    assert stats.tokens == num_tokens
    assert stats.accepted == sum(stats.accepted_at)
    assert stats.drafted == sum(stats.drafted_at)
    assert stats.accepted <= stats.drafted
    # Every step emits its accepted tokens and one more, unless an end was among the accepted ones.
    assert stats.accepted <= stats.tokens <= stats.accepted + stats.steps <= stats.tokens + 1
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert all(a >= b for a, b in itertools.pairwise(stats.drafted_at))
    assert all(a >= b for a, b in itertools.pairwise(stats.accepted_at))
    times = (stats.prefill_s, stats.draft_s, stats.verify_s, stats.sampling_s, stats.wall_s)
    assert all(time >= 0 for time in times)


def generate(drafter: Drafter | None = None, *, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    fresh = engine(drafter=drafter)
    return run(fresh, fresh.start(request(prompt, **options)))


# --- exactness ----------------------------------------------------------------------------------------------

SMALL = MarkovModel([[0.1, 0.2, 0.7], [0.05, 0.5, 0.45], [0.4, 0.4, 0.2]])
SMALL_DRAFT = MarkovModel([[0.3, 0.1, 0.6], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]])
WIDE_LAW = SparseLaw.of(np.array([-1, 0, 1, 2, 5]), np.array([1.0, 2, 2, 2, 1]))


def small_drafters() -> Iterator[tuple[str, int, Callable[[], Drafter]]]:
    def small() -> Drafter:
        return ModelDrafter(FakeContext(SMALL_DRAFT, chunk=1), vocabulary_size=3, ends_generation=lambda token: False)

    for num_draft_tokens in (1, 2, 4):
        yield "model", num_draft_tokens, small
    yield "cut", 3, lambda: model_drafter(SMALL_DRAFT, kept=[0, 2])
    # Point masses, and laws that reach past the vocabulary: honest, if useless.
    yield "oracle", 2, lambda: fakes.oracle(SMALL)
    yield "wrong", 2, lambda: fakes.always_wrong(SMALL)
    yield "wide", 4, lambda: fakes.drawing(lambda prefix: WIDE_LAW)
    yield "out of range at 1", 4, lambda: fakes.token_at_offset(SMALL, 1, 99)


def outcomes(
    drafter: Drafter, num_runs: int, *, end: int | None = None, num_tokens: int = 4, **options: Any
) -> Iterator[tuple[int, ...]]:
    """Yield the tokens after the first one, which is never drafted, of runs with different seeds."""
    context = FakeContext(SMALL)
    shared = Engine(context, drafter, ends_generation=lambda token: token == end)
    for seed in range(num_runs):
        generation = shared.start(request([2, 1], params=PLAIN, max_tokens=num_tokens, seed=seed, **options))
        while generation.finish_reason is None:
            shared.step([generation])
        yield tuple(generation.tokens)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_joint_law_of_what_is_emitted(rule: str) -> None:
    """G-tests of four tokens (81 cells) against the exact law, 8 drafters, 2,500 seeds each; false alarm 1e-3.

    A law off by a total variation of 0.05 would be noticed with a probability above 0.9.
    """
    expected = SMALL.joint([2, 1], 4)
    p_values = {
        f"{name}, {num}": g_test(outcomes(make(), 2500, num_draft_tokens=num, rule=rule), expected)
        for name, num, make in small_drafters()
    }
    assert holm_rejects(p_values, 1e-3) == []


def test_the_joint_law_test_notices_a_dishonest_draft() -> None:
    """The same test, with laws that are not those the tokens were drawn from: 2,500 seeds are enough to see it."""

    def lying(request: Any, prefix: list[int], position: int) -> tuple[int, SparseLaw]:
        honest = SparseLaw.of(np.arange(3), SMALL_DRAFT.law(prefix).copy())
        return honest.draw(request.noise.next()), SparseLaw.of(np.arange(3), np.ones(3))

    drawn = outcomes(fakes.ScriptedDrafter(lying), 2500, num_draft_tokens=2, rule="block")
    assert g_test(drawn, SMALL.joint([2, 1], 4)) < 1e-6


def test_joint_law_up_to_an_end() -> None:
    """The same with an end-of-generation token inside the blocks, for both rules; false alarm 1e-3."""
    expected = SMALL.joint([2, 1], 4, end=1)
    p_values = {}
    for rule, num_draft_tokens in itertools.product(("token", "block"), (1, 3)):
        drafter = ModelDrafter(FakeContext(SMALL_DRAFT), vocabulary_size=3, ends_generation=lambda token: token == 1)
        drawn = outcomes(drafter, 2500, end=1, num_draft_tokens=num_draft_tokens, rule=rule)
        p_values[f"{rule} {num_draft_tokens}"] = g_test(drawn, expected)
    assert holm_rejects(p_values, 1e-3) == []


def test_joint_law_with_truncation_and_another_draft_temperature() -> None:
    """Top-k and temperature shape p, other parameters shape q, and the output follows p; false alarm 1e-3."""
    params = SamplingParams(temperature=0.7, top_k=2)
    shaped = MarkovModel([law(SMALL.logits([token]), params) for token in range(3)])
    p_values = {}
    for rule, draft_params in itertools.product(("token", "block"), (None, PLAIN, GREEDY, SamplingParams(top_p=0.6))):
        drafter = ModelDrafter(FakeContext(SMALL_DRAFT), vocabulary_size=3, ends_generation=lambda token: False)
        context = Engine(FakeContext(SMALL), drafter, ends_generation=lambda token: False)
        drawn = []
        for seed in range(1200):
            options: dict[str, Any] = {"rule": rule, "draft_params": draft_params, "max_tokens": 3, "seed": seed}
            generation = context.start(request([2, 1], params=params, num_draft_tokens=2, **options))
            while generation.finish_reason is None:
                context.step([generation])
            drawn.append(tuple(generation.tokens))
        p_values[f"{rule} {draft_params}"] = g_test(drawn, shaped.joint([2, 1], 3))
    assert holm_rejects(p_values, 1e-3) == []


# --- greedy -------------------------------------------------------------------------------------------------

GREEDY_DRAFTERS: dict[str, DrafterOf] = {
    "model": lambda target: model_drafter(),
    "itself": model_drafter,
    "oracle": fakes.oracle,
    "always wrong": fakes.always_wrong,
    **{f"first {j} right": (lambda target, j=j: fakes.first_right(target, j)) for j in (1, 2, 3, 7)},
    **{f"end at {j}": (lambda target, j=j: fakes.token_at_offset(target, j, END)) for j in (0, 1, 3, 7)},
    **{f"−1 at {j}": (lambda target, j=j: fakes.token_at_offset(target, j, -1)) for j in (0, 1, 7)},
    **{f"V at {j}": (lambda target, j=j: fakes.token_at_offset(target, j, 5)) for j in (0, 3)},
    "far out of range": lambda target: fakes.scripted(lambda prefix, position: 2**40),
}


@pytest.mark.parametrize("name", GREEDY_DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 8])
def test_greedy_is_plain_greedy(name: str, num_draft_tokens: int) -> None:
    tokens = generate(GREEDY_DRAFTERS[name](TARGET), num_draft_tokens=num_draft_tokens)
    assert tokens == TARGET.greedy_path(PROMPT, 20)


@pytest.mark.parametrize("name", GREEDY_DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 8])
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_exactly_as_many_tokens_as_asked(name: str, num_draft_tokens: int, max_tokens: int) -> None:
    fresh = engine(drafter=GREEDY_DRAFTERS[name](TARGET))
    generation = fresh.start(request(max_tokens=max_tokens, num_draft_tokens=num_draft_tokens))
    assert run(fresh, generation) == TARGET.greedy_path(PROMPT, max_tokens)
    assert generation.finish_reason == "length"


def test_an_oracle_is_always_accepted() -> None:
    fresh = engine(drafter=fakes.oracle(TARGET))
    generation = fresh.start(request(max_tokens=21, num_draft_tokens=4))
    run(fresh, generation)
    stats = generation.stats
    assert (stats.steps, stats.drafted, stats.accepted) == (5, 16, 16)  # 1, then 4 × (4 + 1)
    assert stats.drafted_at == stats.accepted_at == [4, 4, 4, 4]
    assert stats.tokens_per_step == 21 / 5


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    for params in (GREEDY, PLAIN, SamplingParams(top_k=3, temperature=0.7)):
        for rule in ("token", "block"):
            fresh = engine(drafter=model_drafter(TARGET))
            generation = fresh.start(request(params=params, rule=rule, max_tokens=21))
            run(fresh, generation)
            assert generation.stats.accepted == generation.stats.drafted == 16


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, 4])
def test_rejection_at_every_position(num_right: int) -> None:
    fresh = engine(drafter=fakes.first_right(TARGET, num_right))
    generation = fresh.start(request(max_tokens=1 + 3 * (num_right + 1), num_draft_tokens=4))
    steps = []
    while generation.finish_reason is None:
        steps += fresh.step([generation])
    assert [step.num_accepted for step in steps] == [0, *[num_right] * 3]
    assert [len(step.tokens) for step in steps] == [1, *[num_right + 1] * 3]


def test_equal_logits_give_the_lowest_id() -> None:
    flat = MarkovModel(np.full((3, 3), 1 / 3))
    fresh = engine(flat, ModelDrafter(FakeContext(flat), vocabulary_size=3, ends_generation=lambda token: False))
    assert run(fresh, fresh.start(request([2], max_tokens=6))) == [0] * 6


# --- ends ---------------------------------------------------------------------------------------------------


def ending_after(num_tokens: int) -> MarkovModel:
    """Return a model that counts 0, 1, 2, … and says END after ``num_tokens`` of them; the vocabulary has 16 ids."""
    successors = [*range(1, 16), 0]
    successors[num_tokens] = END_16
    return MarkovModel(np.eye(16)[successors])


END_16 = 15


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("num_before", range(1, 12))
@pytest.mark.parametrize("drafter_stops", [True, False])
def test_an_end_at_every_offset(num_draft_tokens: int, num_before: int, drafter_stops: bool) -> None:
    model = ending_after(num_before)
    drafter = (
        ModelDrafter(FakeContext(model), vocabulary_size=16, ends_generation=lambda token: token == END_16)
        if drafter_stops
        else fakes.oracle(model)  # drafts on, past the end
    )
    fresh = Engine(FakeContext(model), drafter, ends_generation=lambda token: token == END_16)
    generation = fresh.start(request([0], num_draft_tokens=num_draft_tokens))
    tokens = run(fresh, generation)
    assert tokens == [*range(1, num_before + 1), END_16]
    assert generation.finish_reason == "stop"
    assert generation.stats.accepted <= len(tokens)
    if num_draft_tokens:
        assert generation.stats.accepted == generation.stats.drafted, "what lay past the end is no evidence"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("stop_at", range(1, 11))
def test_a_watcher_stops_at_every_offset(num_draft_tokens: int, stop_at: int) -> None:
    seen: list[int] = []

    def watch(token: int) -> bool:
        seen.append(token)
        return len(seen) == stop_at

    fresh = engine(drafter=fakes.oracle(TARGET))
    generation = fresh.start(request(watch=watch, num_draft_tokens=num_draft_tokens))
    assert run(fresh, generation) == seen == TARGET.greedy_path(PROMPT, stop_at)
    assert generation.finish_reason == "stop"
    assert generation.stats.accepted == generation.stats.drafted


def test_a_watcher_that_fails_leaves_nothing_half_emitted() -> None:
    def watch(token: int) -> bool:
        calls.append(token)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return False

    calls: list[int] = []
    fresh = engine(drafter=fakes.oracle(TARGET))
    generation = fresh.start(request(watch=watch, max_tokens=12))
    fresh.step([generation])
    with pytest.raises(KeyboardInterrupt):
        fresh.step([generation])
    check_stats(generation.stats, len(generation.tokens))
    while generation.finish_reason is None:
        fresh.step([generation])
    assert generation.tokens == TARGET.greedy_path(PROMPT, 12)
    check_stats(generation.stats, 12)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 8])
@pytest.mark.parametrize("room", range(1, 15))
@pytest.mark.parametrize("name", ["model", "oracle", "always wrong", "V at 0"])
def test_the_context_ends_at_every_offset(num_draft_tokens: int, room: int, name: str) -> None:
    capacity = len(PROMPT) + room
    drafter = model_drafter(capacity=capacity) if name == "model" else GREEDY_DRAFTERS[name](TARGET)
    fresh = engine(drafter=drafter, capacity=capacity)
    generation = fresh.start(request(max_tokens=100, num_draft_tokens=num_draft_tokens))
    assert run(fresh, generation) == TARGET.greedy_path(PROMPT, room)
    assert generation.finish_reason == "context"


def test_an_end_wins_over_a_limit() -> None:
    model = ending_after(2)
    for capacity, max_tokens in ((64, 3), (4, 100)):
        fresh = Engine(FakeContext(model, capacity=capacity), None, ends_generation=lambda token: token == END_16)
        generation = fresh.start(request([0], max_tokens=max_tokens))
        run(fresh, generation)
        assert generation.finish_reason == "stop"


def test_nothing_is_drafted_where_only_one_token_fits() -> None:
    drafter = fakes.oracle(TARGET)
    fresh = engine(drafter=drafter)
    run(fresh, fresh.start(request(max_tokens=2, num_draft_tokens=8)))
    assert drafter.draws == 0


# --- several sequences --------------------------------------------------------------------------------------

PARTS = [
    {"prompt": [1, 2, 3], "num_draft_tokens": 0, "max_tokens": 9, "params": GREEDY},
    {"prompt": PROMPT, "num_draft_tokens": 4, "max_tokens": 14, "params": PLAIN, "rule": "token", "seed": 3},
    {"prompt": [0] * 11, "num_draft_tokens": 1, "max_tokens": 5, "params": SamplingParams(top_k=3), "seed": 4},
    {"prompt": [2], "num_draft_tokens": 8, "max_tokens": 20, "params": PLAIN, "rule": "block", "seed": 5},
]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1], [2, 0, 3, 1]])
def test_sequences_together_are_as_each_alone(order: list[int]) -> None:
    """Different lengths, drafts, parameters; sequences start and finish at different steps."""
    alone = []
    for part in PARTS:
        fresh = engine(drafter=model_drafter())
        alone.append(run(fresh, fresh.start(request(**part))))

    target = FakeContext(TARGET, num_sequences=4)
    together = Engine(target, model_drafter(num_sequences=4), ends_generation=lambda token: token == END)
    running: list[tuple[int, Generation]] = []
    waiting = list(order)
    passes = 0
    while waiting or running:
        if waiting:
            part = waiting.pop(0)
            running.append((part, together.start(request(**PARTS[part]), sequence=part)))
        before = target.passes
        together.step([generation for _, generation in running])
        passes += target.passes - before
        for part, generation in running:
            if generation.finish_reason:
                assert generation.tokens == alone[part]
                check_stats(generation.stats, len(alone[part]))
        running = [(part, generation) for part, generation in running if generation.finish_reason is None]
    assert passes < sum(len(tokens) for tokens in alone)


def test_one_pass_serves_all() -> None:
    target = FakeContext(TARGET, num_sequences=3, chunk=16)
    draft = FakeContext(DRAFT, num_sequences=3, chunk=16)
    drafter = ModelDrafter(draft, vocabulary_size=5, ends_generation=lambda token: token == END)
    together = Engine(target, drafter, ends_generation=lambda token: token == END)
    generations = [together.start(request([s, 1]), sequence=s) for s in range(3)]
    together.step(generations)
    assert (target.passes, draft.passes) == (1, 0)
    together.step(generations)
    assert (target.passes, target.rows) == (2, 3 + 3 * 5)
    assert draft.passes <= 3 + 4  # at most a prefill each, and then four passes for all


def test_rows_are_asked_for_only_where_they_are_needed() -> None:
    fresh = engine(drafter=None)
    generation = fresh.start(request([1] * 30, max_tokens=5))
    run(fresh, generation)
    target = fresh.target
    assert isinstance(target, FakeContext)
    assert (target.rows, target.tokens_read) == (5, 34)


def test_a_prompt_is_read_a_chunk_at_a_time_beside_others() -> None:
    target, draft = (FakeContext(model, num_sequences=2, chunk=4) for model in (TARGET, DRAFT))
    drafter = ModelDrafter(draft, vocabulary_size=5, ends_generation=lambda token: token == END)
    together = Engine(target, drafter, ends_generation=lambda token: token == END)
    first = together.start(request([1, 2], num_draft_tokens=0))
    together.step([first])
    second = together.start(request([3] * 13, num_draft_tokens=2), sequence=1)
    steps, lengths = [], []
    while second.stats.steps == 0:
        passes = target.passes
        steps.append(together.step([first, second]))
        assert target.passes == passes + 1
        lengths.append((target.length(1), draft.length(1)))
    assert lengths == [(3, 4), (6, 8), (9, 12), (12, 12), (13, 12)]
    assert [len(step.tokens) for _, step in steps] == [0, 0, 0, 0, 1]
    assert all(len(step.tokens) == 1 for step, _ in steps)
    assert second.stats.prefill_s > 0
    passes = draft.passes
    together.step([first, second])
    assert draft.passes == passes + 2


def test_prompts_together_are_a_chunk_of_a_pass() -> None:
    target = FakeContext(TARGET, num_sequences=3, chunk=8)
    together = Engine(target, None, ends_generation=lambda token: token == END)
    prompts = ([1] * 11, [2] * 9, [3] * 3)
    running = [together.start(request(prompt, max_tokens=1), sequence) for sequence, prompt in enumerate(prompts)]
    sizes = []
    while running:
        before = target.tokens_read
        together.step(running)
        sizes.append(target.tokens_read - before)
        running = [g for g in running if g.finish_reason is None]
    assert max(sizes) <= 8
    assert sum(sizes) == sum(map(len, prompts))


def test_a_bad_row_ends_its_own_sequence_only() -> None:
    bad = [1, 1, 2]
    target = FakeContext(
        TARGET,
        num_sequences=3,
        chunk=16,
        spoil=lambda prefix: np.nan if prefix[:3] == bad and len(prefix) > 5 else None,
    )
    drafter = model_drafter(num_sequences=3)
    together = Engine(target, drafter, ends_generation=lambda token: token == END)
    prompts = ([1, 2, 3], bad, [3, 0])
    running = [together.start(request(prompt), sequence) for sequence, prompt in enumerate(prompts)]
    errors = []
    while running:
        steps = together.step(running)
        errors += [(g, step) for g, step in zip(running, steps, strict=True) if step.error]
        running = [g for g, step in zip(running, steps, strict=True) if not step.error and g.finish_reason is None]
    ((failed, step),) = errors
    assert isinstance(step.error, InvalidLogitsError)
    assert (step.tokens, failed.sequence) == ([], 1)
    for sequence in (0, 2):
        assert together._held[sequence] == [*prompts[sequence], *TARGET.greedy_path(prompts[sequence], 20)]


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("rollback", ["sound", "refused"])
def test_what_another_sequence_has_read_is_copied(
    params: SamplingParams, num_draft_tokens: int, rollback: Any
) -> None:
    """And changes nothing: also where a cache cannot, and reads instead."""
    num_draft_tokens = num_draft_tokens if rollback == "sound" else 0
    target, draft = (FakeContext(model, num_sequences=3, rollback=rollback) for model in (TARGET, DRAFT))
    drafter = ModelDrafter(draft, vocabulary_size=5, ends_generation=lambda token: token == END)
    together = Engine(target, drafter, ends_generation=lambda token: token == END)
    first = together.start(request(PROMPT, num_draft_tokens=num_draft_tokens, max_tokens=9, params=params))
    run(together, first)
    for sequence, prompt in (
        (1, [*PROMPT, *first.tokens[:4], (first.tokens[4] + 1) % 4, 2]),
        (2, [*PROMPT[:5], 0, 0]),
        (1, [3, 3]),
    ):
        asked = request(prompt, num_draft_tokens=num_draft_tokens, params=params, seed=9)
        before = target.copied
        generation = together.start(asked, sequence)
        shared = {1: len(PROMPT) + 4, 2: 5}[sequence] if len(prompt) > 2 and rollback == "sound" else 0
        assert generation.stats.reused_tokens == target.copied - before == shared
        assert draft.length(sequence) <= shared
        alone = engine(drafter=model_drafter())
        assert run(together, generation) == run(alone, alone.start(asked))


def test_a_released_sequence_holds_nothing() -> None:
    together = engine(drafter=model_drafter(num_sequences=2), num_sequences=2)
    generation = together.start(request())
    together.step([generation])
    together.release(0)
    assert together.target.length(0) == 0
    with pytest.raises(InvalidOptionError, match="sequence 0"):
        together.step([generation])
    assert together.start(request(), sequence=1).stats.reused_tokens == 0


# --- caches -------------------------------------------------------------------------------------------------

CONTINUATIONS = {
    "the same": lambda tokens: PROMPT,
    "the answer and more": lambda tokens: [*PROMPT, *tokens, 1, 2],
    "half the answer": lambda tokens: [*PROMPT, *tokens[:5], 3],
    "a prefix": lambda tokens: PROMPT[:4],
    "one token": lambda tokens: PROMPT[:1],
    "something else": lambda tokens: [3, 3, 3, 3],
    "the answer and one wrong token": lambda tokens: [*PROMPT, *tokens[:-1], (tokens[-1] + 1) % 4, 2],
}


@pytest.mark.parametrize("name", CONTINUATIONS)
@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_warm_cache_changes_nothing(name: str, params: SamplingParams, num_draft_tokens: int) -> None:
    warm = engine(drafter=model_drafter())
    first = run(warm, warm.start(request(params=params, max_tokens=10, num_draft_tokens=4)))
    prompt = CONTINUATIONS[name](first)
    cold = engine(drafter=model_drafter())
    second = request(prompt, params=params, seed=9, num_draft_tokens=num_draft_tokens)
    generation = warm.start(second)
    evaluated = [*PROMPT, *first[:-1]]
    shared = next(i for i in range(len(prompt)) if i == len(prompt) - 1 or evaluated[: i + 1] != prompt[: i + 1])
    assert generation.stats.reused_tokens == shared
    assert run(warm, generation) == run(cold, cold.start(second))


def test_reuse_saves_reading() -> None:
    warm = engine(drafter=model_drafter())
    run(warm, warm.start(request(max_tokens=10)))
    target = warm.target
    assert isinstance(target, FakeContext)
    before = target.tokens_read
    warm.step([warm.start(request())])
    assert target.tokens_read == before + 1


def test_progress_is_told_while_the_prompt_is_read() -> None:
    told: list[tuple[int, int]] = []
    fresh = engine()
    run(fresh, fresh.start(request([1] * 14, progress=lambda read, wanted: told.append((read, wanted)))))
    # By quarters of a chunk of 4; the last one belongs to the pass that gives the first token.
    assert told == [(read, 13) for read in range(1, 14)]


@pytest.mark.parametrize("reads", [[1, 2, 3, 4, 5], [*range(1, 14), 1, 2, 3, 4]], ids=["target", "draft"])
def test_progress_that_raises_stops_the_reading_of_either_model(reads: list[int]) -> None:
    told: list[int] = []

    def progress(read: int, wanted: int) -> None:
        told.append(read)
        if len(told) == len(reads):
            raise KeyboardInterrupt

    fresh = engine(drafter=model_drafter())
    generation = fresh.start(request([1] * 14, progress=progress))
    with pytest.raises(KeyboardInterrupt):
        run(fresh, generation)
    assert told == reads
    assert len(generation.history) == 14 + generation.stats.tokens


# --- failures -----------------------------------------------------------------------------------------------

FAILURES = [(EvaluationError("the pass failed"), "none"), (EvaluationError("the pass failed"), "half")]
INTERRUPTS = [(KeyboardInterrupt(), "none"), (KeyboardInterrupt(), "all")]


def passes_of(params: SamplingParams) -> tuple[int, int]:
    """Return how many passes target and draft take for the request that the tests of failures use."""
    drafter = model_drafter()
    fresh = engine(drafter=drafter)
    run(fresh, fresh.start(request(params=params)))
    assert isinstance(fresh.target, FakeContext)
    assert isinstance(drafter.context, FakeContext)
    return fresh.target.passes, drafter.context.passes


@pytest.mark.parametrize(("error", "kept"), FAILURES + INTERRUPTS, ids=str)
@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_a_failure_at_any_pass_leaves_caches_sound(
    error: BaseException, kept: Any, side: str, params: SamplingParams
) -> None:
    """After it the same step again, the same prompt again, or another one give what a fresh engine gives."""
    other = request([1, 2, 0, 0, 1], params=params, seed=8)
    expected = generate(model_drafter(), params=params)
    fresh = engine(drafter=model_drafter())
    expected_other = run(fresh, fresh.start(other))
    num_passes = passes_of(params)[side == "draft"]
    assert num_passes > 5
    for at, then in itertools.product(range(1, num_passes + 1), ("retry", "restart", "another")):
        failure = Failure(at, error, kept)
        hurt = engine(
            drafter=model_drafter(failure=failure if side == "draft" else None),
            failure=failure if side == "target" else None,
        )
        generation = hurt.start(request(params=params))
        with pytest.raises(type(error)):
            run(hurt, generation)
        check_stats(generation.stats, len(generation.tokens))
        assert generation.tokens == expected[: len(generation.tokens)]
        if then == "retry":
            while generation.finish_reason is None:
                hurt.step([generation])
            assert generation.tokens == expected
            check_stats(generation.stats, len(expected))
        elif then == "restart":
            assert run(hurt, hurt.start(request(params=params))) == expected
        else:
            assert run(hurt, hurt.start(other)) == expected_other


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("num_drafted", [0, 1, 3])
def test_a_bad_draft_row_ends_drafting(value: float, num_drafted: int) -> None:
    bad = model_drafter(TARGET)
    assert isinstance(bad.context, FakeContext)
    bad.context.spoil = lambda prefix: value if len(prefix) == len(PROMPT) + 1 + num_drafted else None
    fresh = engine(drafter=bad)
    generation = fresh.start(request(num_draft_tokens=8))
    fresh.step([generation])
    fresh.step([generation])
    assert generation.stats.drafted == num_drafted
    while generation.finish_reason is None:
        fresh.step([generation])
    assert generation.tokens == TARGET.greedy_path(PROMPT, 20)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("num_before", range(6))
@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_a_bad_target_row_is_an_error(value: float, num_before: int, params: SamplingParams) -> None:
    fresh = engine(
        drafter=model_drafter(),
        spoil=lambda prefix: value if len(prefix) == len(PROMPT) + num_before else None,
    )
    generation = fresh.start(request(params=params))
    with pytest.raises(InvalidLogitsError):
        run(fresh, generation)
    assert len(generation.tokens) <= num_before
    check_stats(generation.stats, len(generation.tokens))


def test_a_bad_row_that_no_decision_needs_is_no_error() -> None:
    """The rule stops before it, so it never becomes a law."""
    fresh = engine(
        drafter=fakes.always_wrong(TARGET), spoil=lambda p: np.nan if p[-1] != TARGET.greedy(p[:-1]) else None
    )
    assert run(fresh, fresh.start(request([1, TARGET.greedy([1])]))) == TARGET.greedy_path(
        [1, TARGET.greedy([1])], 20
    )


# --- caches that cannot forget ------------------------------------------------------------------------------


def test_a_refused_rollback_is_an_error() -> None:
    for drafter, options in (
        (fakes.always_wrong(TARGET), {"rollback": "refused"}),
        (model_drafter(rollback="refused"), {}),
    ):
        fresh = engine(drafter=drafter, **options)
        generation = fresh.start(request())
        with pytest.raises(RollbackError):
            run(fresh, generation)
        assert generation.tokens == TARGET.greedy_path(PROMPT, len(generation.tokens))


def test_plain_decoding_needs_no_rollback() -> None:
    """Also in a second generation, whose prompt begins like the first: what cannot be cut is read again."""
    fresh = engine(rollback="refused")
    for prompt in (PROMPT, [*PROMPT[:4], 0, 0], PROMPT, [3]):
        generation = fresh.start(request(prompt, num_draft_tokens=0))
        assert run(fresh, generation) == TARGET.greedy_path(prompt, 20)
    longer = [*generation.history, 1]
    generation = fresh.start(request(longer, num_draft_tokens=0))
    assert generation.stats.reused_tokens == len(longer) - 2, "nothing to cut, so nothing is lost"


# --- arguments ----------------------------------------------------------------------------------------------


def test_bad_requests() -> None:
    fresh = engine(capacity=8)
    with pytest.raises(InvalidOptionError, match="empty"):
        fresh.start(request([]))
    for max_tokens in (0, -3):
        with pytest.raises(InvalidOptionError, match=f"max_tokens is {max_tokens}"):
            fresh.start(request(max_tokens=max_tokens))
    for length in (8, 9, 100):
        with pytest.raises(ContextOverflowError, match=f"{length} tokens.*holds 8"):
            fresh.start(request([1] * length))
    assert run(fresh, fresh.start(request([1] * 7))) == TARGET.greedy_path([1] * 7, 1)


@pytest.mark.parametrize("sequence", [-1, 2, 99])
def test_a_sequence_the_context_does_not_have(sequence: int) -> None:
    fresh = engine(num_sequences=2)
    with pytest.raises(InvalidOptionError, match=f"sequence is {sequence}"):
        fresh.start(request(), sequence=sequence)


def test_a_generation_whose_sequence_was_given_away() -> None:
    """Its cache is gone: going on would emit tokens of another text."""
    fresh = engine(drafter=model_drafter())
    first = fresh.start(request())
    fresh.step([first])
    second = fresh.start(request([3, 3]))
    with pytest.raises(InvalidOptionError, match="sequence 0"):
        fresh.step([first])
    assert run(fresh, second) == TARGET.greedy_path([3, 3], 20)


def test_the_policy_is_told_what_came_of_it() -> None:
    class Observed(FixedPolicy):
        __slots__ = ()

        def observe(self, outcome: StepOutcome) -> None:
            seen.append(outcome)

    seen: list[StepOutcome] = []
    fresh = engine(drafter=fakes.first_right(TARGET, 2))
    asked = Request(prompt=PROMPT, params=GREEDY, max_tokens=7, seed=1, policy=Observed(4))
    generation = fresh.start(asked)
    run(fresh, generation)
    numbers = [(o.num_drafted, o.num_accepted, o.num_emitted, o.depth) for o in seen]
    # Not of the first pass: it read the prompt, and its time says nothing about decoding.
    assert numbers == [(4, 2, 3, 8), (2, 2, 3, 11)]
    assert all(min(o.draft_s, o.verify_s, o.sampling_s) >= 0 for o in seen)


def test_the_same_seed_gives_the_same_tokens() -> None:
    runs = [generate(model_drafter(), params=PLAIN, seed=seed) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
