"""Lookup: the index finds what is there and forgets what is cut; copied drafts leave the output's law alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.adaptive import UNCALIBRATED, AdaptivePolicy
from localspec.averages import ForgettingRatio
from localspec.drafters import Draft, Drafter, DraftRequest, ModelDrafter
from localspec.engine import Engine
from localspec.errors import EvaluationError
from localspec.generation import Generation, Request
from localspec.guard import Guard
from localspec.lookup import LookupDrafter, LookupOrModel, Match, MatchRecord, Repeats
from localspec.policy import FixedPolicy
from localspec.sampling import SamplingParams, SparseLaw, StepNoise, Stream, law, verification_law
from tests.fakes import Failure, FakeContext, MarkovModel
from tests.stats import g_test, holm_rejects

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams()
PENALISED = SamplingParams(
    temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, penalty_last_n=3
)
COPY = FixedPolicy(0, 4)


def never(token: int) -> bool:
    return False


def lookup(ends: Callable[[int], bool] = never) -> LookupDrafter:
    return LookupDrafter(ends_generation=ends)


def request(history: Sequence[int], plan: Any = COPY, *, limit: int = 9, sequence: int = 0) -> DraftRequest:
    return DraftRequest(sequence, list(history), limit, plan, PLAIN, StepNoise(1, len(history), Stream.DRAFT))


def drafted(history: Sequence[int], plan: Any = COPY, **options: Any) -> list[int]:
    (draft,) = lookup().draft([request(history, plan, **options)])
    assert [law.prob(token) for law, token in zip(draft.laws, draft.tokens, strict=True)] == [1.0] * len(draft.tokens)
    return draft.tokens


# --- the index ------------------------------------------------------------------------------------------------


def longest(tokens: Sequence[int]) -> int:
    """Return the length of the longest match of the end, found by trying everything; 0 below two tokens."""
    ends = range(1, len(tokens))
    lengths = [n for end in ends for n in range(2, end + 1) if list(tokens[end - n : end]) == list(tokens[-n:])]
    return min(32, max(lengths, default=0))


texts = st.lists(st.integers(0, 3), max_size=40)


@given(texts)
def test_the_longest_match_is_found(tokens: list[int]) -> None:
    repeats = Repeats()
    repeats.extend(tokens)
    match = repeats.match()
    if match is None:
        assert longest(tokens) == 0
    else:
        # At most 32 places are tried, and there are no more.
        assert match.length == longest(tokens)
        assert tokens[match.source - match.length : match.source] == tokens[len(tokens) - match.length :]
        assert 0 < match.source < len(tokens)


@given(st.lists(st.tuples(texts, st.integers(0, 50)), max_size=5))
def test_what_is_cut_leaves_no_trace(changes: list[tuple[list[int], int]]) -> None:
    repeats, tokens = Repeats(), list[int]()
    for added, length in changes:
        repeats.extend(added)
        tokens = (tokens + added)[:length]
        repeats.cut(length)
        fresh = Repeats()
        fresh.extend(tokens)
        assert repeats.tokens == tokens
        assert (repeats._latest, repeats._before) == (fresh._latest, fresh._before)


def test_among_equals_the_latest_or_the_one_that_goes_on() -> None:
    repeats = Repeats()
    repeats.extend([1, 2, 5, 1, 2, 6, 1, 2])
    assert repeats.match() == Match(5, 2)
    # The copy of "8 9 1 2" goes on with 7, though "1 2" alone was followed by something else since.
    repeats = Repeats()
    repeats.extend([0, 8, 9, 1, 2, 7, 4, 3, 1, 2, 6, 0, 8, 9])
    assert repeats.match() == Match(3, 3)
    repeats.extend([5, 1, 2])
    assert repeats.match() == Match(10, 2)
    repeats.extend([7, 4])
    assert repeats.match() == Match(7, 4)


def test_a_common_pair_does_not_hide_the_place_that_is_being_copied() -> None:
    """Two tokens that occur more often than places are tried: the copy goes on where it was."""
    given_text = [50, 51, 1, 2, 60, 61, 62, *itertools.chain.from_iterable([1, 2, 70 + i] for i in range(40)), 99]
    repeats = Repeats()
    repeats.extend([*given_text, 50, 51])
    assert repeats.match() == Match(2, 2)
    repeats.extend([1, 2])
    assert repeats.match() == Match(4, 4)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_text_that_repeats_itself_goes_on_so(count: int) -> None:
    repeats = Repeats()
    repeats.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    match = repeats.match()
    assert match == Match(6, 5)
    assert repeats.following(match, count) == ([3, 1, 2] * 4)[:count]


def test_text_that_never_repeats_has_no_match() -> None:
    repeats = Repeats()
    for token in range(500):
        repeats.extend([token])
        assert repeats.match() is None


# --- the drafter ----------------------------------------------------------------------------------------------

HISTORY = [1, 2, 3, 4, 5, 1, 2]


@dataclass(slots=True)
class Asked:
    """A plan that takes a number of tokens, and notes the chances it is told."""

    count: int
    limit: int = 0
    lookup_limit: int = 6
    seen: list[list[float]] = field(default_factory=list)

    def copies(self, chances: Sequence[float]) -> int:
        self.seen.append(list(chances))
        return min(self.count, len(chances))

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = 128) -> bool:
        return True

    def draws(self, confidence: Callable[[], float]) -> bool:
        return True


def test_what_followed_is_copied() -> None:
    assert drafted(HISTORY) == [3, 4, 5, 1]
    assert drafted(HISTORY, limit=2) == [3, 4]
    assert drafted(HISTORY, FixedPolicy(0, 6)) == [3, 4, 5, 1, 2, 3]
    assert drafted(HISTORY, FixedPolicy(4, 0)) == []
    for history in ([1], [1, 2], [1, 2, 3, 2, 1]):
        assert drafted(history) == []


def test_the_plan_decides_how_much() -> None:
    for count in range(7):
        plan = Asked(count)
        assert drafted(HISTORY, plan) == [3, 4, 5, 1, 2, 3][:count]
        (chances,) = plan.seen
        assert len(chances) == 6
        assert all(0 < chance < 1 for chance in chances)
    plan = Asked(3)
    assert drafted([1, 2, 3], plan) == []
    assert plan.seen == [], "without a match there is nothing to decide"


def test_nothing_is_copied_past_an_end() -> None:
    (draft,) = lookup(lambda token: token == 4).draft([request(HISTORY)])
    assert draft.tokens == [3, 4]
    assert [law.confidence for law in draft.laws] == [1.0, 1.0]


def test_sequences_are_independent() -> None:
    histories = [HISTORY, [1, 2, 6, 1, 2], [1, 2, 3]]
    drafts = lookup().draft([request(history, sequence=s) for s, history in enumerate(histories)])
    assert [draft.tokens for draft in drafts] == [drafted(history) for history in histories]


def test_what_is_cut_is_not_copied() -> None:
    """As the engine does it: a rejected draft was never part of the history, and another prompt may share little."""
    drafter = lookup()
    drafter.draft([request(HISTORY)])
    for history in ([1, 2, 3, 7, 7, 2, 3], [1, 2, 3, 7, 9, 3, 7], [5, 6, 5, 6]):
        shared = next((i for i, (a, b) in enumerate(zip(HISTORY, history, strict=False)) if a != b), 0)
        drafter.keep(0, shared)
        (draft,) = drafter.draft([request(history)])
        assert draft.tokens == drafted(history)
        drafter.keep(0, shared)
        (draft,) = drafter.draft([request(HISTORY)])
        assert draft.tokens == drafted(HISTORY)


@pytest.mark.parametrize("method", ["extend", "cut"])
def test_a_text_that_is_half_changed_is_read_anew(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may arrive between any two lines, and the drafter is used again for the next answer."""
    drafter = lookup()
    drafter.draft([request(HISTORY)])

    def interrupted(text: Repeats, _change: object) -> None:
        text.tokens.append(3)  # and not the rest of what belongs to it
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Repeats, method, interrupted)
        with pytest.raises(KeyboardInterrupt):  # one of the two changes the text
            (drafter.keep(0, 4), drafter.draft([request([*HISTORY, 3])]))
    for history in (HISTORY, [1, 2, 3, 7, 7, 2, 3], [5, 6, 5, 6]):
        drafter.keep(0, 0)
        (draft,) = drafter.draft([request(history)])
        assert draft.tokens == drafted(history)


def test_what_follows_a_match_teaches_whether_to_copy() -> None:
    """Whether anything was drafted or not; up to the first token that was not the copied one."""
    for plan in (Asked(0), Asked(4)):
        drafter, expected = lookup(), MatchRecord()
        drafter.draft([request(HISTORY, plan)])
        history = [*HISTORY, 3, 4, 8, 1, 2]
        drafter.keep(0, len(history) - 1)
        drafter.draft([request(history, plan)])
        for length, right in ((2, True), (3, True), (4, False)):
            expected.add(length, right)
        assert drafter.record.chances(2, 30) == expected.chances(2, 30)
        assert plan.seen[0] == MatchRecord().chances(2, 6)
        assert plan.seen[1] == expected.chances(2, 6)


def test_a_step_tried_again_teaches_once() -> None:
    drafter, expected = lookup(), MatchRecord()
    for history in (HISTORY, HISTORY, [*HISTORY, 3], [*HISTORY, 3]):
        drafter.keep(0, len(history) - 1)
        drafter.draft([request(history)])
    expected.add(2, True)
    assert drafter.record.chances(2, 9) == expected.chances(2, 9)


def test_chances_follow_what_was_seen() -> None:
    record = MatchRecord()
    before = record.chances(2, 40)
    assert before == sorted(before), "a longer match is surer, until experience says otherwise"
    for _ in range(300):
        record.add(2, False)
        record.add(40, True)
    after = record.chances(2, 40)
    assert after[0] < 0.05
    assert after[-1] > 0.98
    assert after[1] == before[1]


def test_half_of_what_was_learned_holds_for_another_text() -> None:
    """And all of it where the text goes on, or a step is tried again."""
    drafter, fresh = lookup(), MatchRecord()
    drafter.draft([request(HISTORY)])
    for _ in range(50):
        drafter.record.add(3, True)
    learned = drafter.record.chances(3, 1)
    assert learned[0] > 0.9
    drafter.keep(0, len(HISTORY) - 1)
    assert drafter.record.chances(3, 1) == learned
    drafter.keep(0, 2)
    assert drafter.record.chances(3, 1) == pytest.approx([(learned[0] + fresh.chances(3, 1)[0]) / 2])
    for _ in range(3):
        drafter.record.add(3, False)
    assert drafter.record.chances(3, 1)[0] < 0.5


# --- exactness ------------------------------------------------------------------------------------------------

SMALL = MarkovModel([[0.1, 0.2, 0.7], [0.05, 0.5, 0.45], [0.4, 0.4, 0.2]])
PROMPT = [2, 1, 0, 2, 1]


def law_after(prefix: Sequence[int], params: SamplingParams) -> np.ndarray:
    return law(SMALL.logits(prefix).astype(np.float64), params, prefix)


def enumerated(
    rule: str, params: SamplingParams, length: int, plan: Callable[[], Any]
) -> dict[tuple[int, ...], float]:
    """Return the joint law of what lookup steps emit, summed over every outcome of every step.

    A drafter learns from the steps before, so that each path is walked again from its first step.
    """
    joint: dict[tuple[int, ...], float] = {}

    def walk(steps: list[list[int]], weight: float) -> None:
        drafter = lookup()
        for history in steps:
            drafter.keep(0, len(history) - 1)
            (draft,) = drafter.draft([request(history, plan(), limit=3)])
        history = steps[-1]
        prefixes = [[*history, *draft.tokens[:i]] for i in range(len(draft.tokens) + 1)]
        p = [law_after(prefix, params) for prefix in prefixes]
        q = [one.dense(3) for one in draft.laws]
        probs, laws = verification_law(p, q if q else np.empty((0, 3)), draft.tokens, rule)
        for accepted, token in itertools.product(range(len(probs)), range(3)):
            chance = weight * float(probs[accepted] * laws[accepted][token])
            emitted = [*history, *draft.tokens[:accepted], token]
            if chance == 0:
                continue
            if len(emitted) < len(PROMPT) + length:
                walk([*steps, emitted], chance)
            else:
                path = tuple(emitted[len(PROMPT) : len(PROMPT) + length])
                joint[path] = joint.get(path, 0.0) + chance

    walk([PROMPT], 1.0)
    return joint


def plainly(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    joint = {(): 1.0}
    for _ in range(length):
        joint = {
            (*path, token): weight * float(chance)
            for path, weight in joint.items()
            for token, chance in enumerate(law_after([*PROMPT, *path], params))
            if chance > 0
        }
    return joint


@dataclass(slots=True)
class Eager(Asked):
    """A plan that takes more where the record is better: what it takes depends on the path."""

    def copies(self, chances: Sequence[float]) -> int:
        return round(len(chances) * chances[0] * 2)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("params", [PLAIN, PENALISED, SamplingParams(temperature=0.7, top_k=2)], ids=str)
@pytest.mark.parametrize("plan", [lambda: FixedPolicy(0, 3), lambda: Eager(0)], ids=["fixed", "by the record"])
def test_the_joint_law_is_the_targets(rule: str, params: SamplingParams, plan: Callable[[], Any]) -> None:
    """Not by sampling: every outcome of every step, weighed with its probability, to rounding."""
    expected = plainly(params, 4)
    joint = enumerated(rule, params, 4, plan)
    assert joint.keys() == expected.keys()
    for path, weight in expected.items():
        assert joint[path] == pytest.approx(weight, abs=1e-12)


def test_token_and_block_rule_are_the_same_for_copies() -> None:
    p = [SMALL.law([0]), SMALL.law([1]), SMALL.law([2])]
    q = [SparseLaw.point(token).dense(3) for token in (1, 2)]
    for got, expected in zip(*(verification_law(p, q, [1, 2], rule) for rule in ("token", "block")), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-15)


def engine(drafter: Drafter | None, target: MarkovModel = SMALL, **options: Any) -> Engine:
    return Engine(FakeContext(target, **options), drafter, ends_generation=never)


def run(engine: Engine, prompt: Sequence[int], *, policy: Any = COPY, **options: Any) -> Generation:
    options = {"params": PLAIN, "max_tokens": 40, "seed": 1, **options}
    generation = engine.start(Request(prompt=prompt, policy=policy, **options))
    return finish(engine, generation)


def finish(engine: Engine, generation: Generation) -> Generation:
    while generation.finish_reason is None:
        engine.step([generation])
    return generation


@pytest.mark.parametrize("params", [PLAIN, PENALISED], ids=["plain", "penalties"])
def test_joint_law_through_the_engine(params: SamplingParams) -> None:
    """G-tests of four tokens, 2,500 seeds each, for both rules; false alarm 1e-3. The first one is never drafted."""
    p_values = {}
    for rule in ("token", "block"):
        shared = engine(lookup())
        drawn = []
        for seed in range(2500):
            generation = run(shared, PROMPT, rule=rule, params=params, max_tokens=4, seed=seed)
            drawn.append(tuple(generation.tokens))
        assert generation.stats.drafted > 0
        p_values[rule] = g_test(drawn, plainly(params, 4))
    assert holm_rejects(p_values, 1e-3) == []


TARGET = MarkovModel.random(5, 6)
PROMPTS = [[1, 2, 3, 1, 2], [0, 0, 0], [4], [1, 2, 3, 4, 5, 0, 1, 2, 3]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
def test_greedy_is_plain_greedy(prompt: list[int], num: int) -> None:
    generation = run(engine(lookup(), TARGET), prompt, params=GREEDY, policy=FixedPolicy(0, num))
    assert generation.tokens == TARGET.greedy_path(prompt, 40)
    assert generation.stats.accepted > 0, "what is greedy falls into a cycle"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("params", [PLAIN, PENALISED, GREEDY], ids=["sampled", "penalties", "greedy"])
def test_the_coupled_rule_gives_the_very_text_of_plain_decoding(prompt: list[int], params: SamplingParams) -> None:
    model = MarkovModel.random(5, 6, spread=2.5)
    total = 0
    for seed in range(10):
        plain = run(engine(None, model), prompt, params=params, rule="coupled", seed=seed)
        generation = run(engine(lookup(), model), prompt, params=params, rule="coupled", seed=seed)
        assert generation.tokens == plain.tokens
        total += generation.stats.accepted
    assert total > 0


def test_text_without_repeats_is_decoded_plainly() -> None:
    model = MarkovModel(np.eye(60)[[*range(1, 60), 0]])
    generation = run(engine(lookup(), model), [0], params=GREEDY, max_tokens=55)
    assert (generation.stats.steps, generation.stats.drafted) == (55, 0)


@pytest.mark.parametrize("room", range(1, 12))
def test_no_more_than_there_is_room_for(room: int) -> None:
    prompt = [1, 2, 3] * 4
    for options in ({"max_tokens": room}, {"capacity": len(prompt) + room}):
        capacity = options.pop("capacity", 64)
        generation = run(engine(lookup(), TARGET, capacity=capacity), prompt, params=GREEDY, **options)
        assert generation.tokens == TARGET.greedy_path(prompt, min(room, 40))


@pytest.mark.parametrize("error", [EvaluationError("the pass failed"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("kept", ["none", "half", "all"])
def test_after_a_failure_the_step_can_be_tried_again(error: BaseException, kept: Any) -> None:
    expected = run(engine(lookup(), TARGET), PROMPTS[0]).tokens
    for at in range(1, 15):
        hurt = engine(lookup(), TARGET, failure=Failure(at, error, kept))
        generation = hurt.start(Request(prompt=PROMPTS[0], policy=COPY, params=PLAIN, max_tokens=40, seed=1))
        with pytest.raises(type(error)):
            finish(hurt, generation)
        assert finish(hurt, generation).tokens == expected


def test_what_earlier_generations_left_changes_nothing() -> None:
    shared = engine(lookup(), TARGET)
    for prompt in [*PROMPTS, [*PROMPTS[0], 3, 1], PROMPTS[0][:2], *PROMPTS]:
        assert run(shared, prompt, seed=3).tokens == run(engine(lookup(), TARGET), prompt, seed=3).tokens


# --- with a model ---------------------------------------------------------------------------------------------


def both(draft: MarkovModel = TARGET, **options: Any) -> LookupOrModel:
    model = ModelDrafter(FakeContext(draft, **options), vocabulary_size=draft.vocabulary_size, ends_generation=never)
    return LookupOrModel(lookup(), model)


def test_the_model_drafts_where_nothing_is_copied() -> None:
    drafter = both(num_sequences=5)
    context = drafter.model.context
    assert isinstance(context, FakeContext)
    plans = [FixedPolicy(2, 3), FixedPolicy(2, 3), FixedPolicy(2, 0), FixedPolicy(0, 3), Asked(0, limit=2)]
    histories = [HISTORY, [1, 2, 3], HISTORY, [1, 2, 3], HISTORY]
    asked = [request(h, plan, sequence=s) for s, (h, plan) in enumerate(zip(histories, plans, strict=True))]
    drafts = drafter.draft(asked)
    expected = [[3, 4, 5], *(TARGET.greedy_path(h, 2) for h in histories[1:3]), [], TARGET.greedy_path(HISTORY, 2)]
    for draft, want, one in zip(drafts, expected, asked, strict=True):
        assert len(draft.tokens) == len(want)
        if one.plan.limit == 0 or one.sequence == 0:
            assert draft.tokens == want
    assert [bool(context.length(s)) for s in range(5)] == [False, True, True, False, True], "copies read no prompt"


def test_both_forget_what_is_cut() -> None:
    drafter = both()
    drafter.draft([request([1, 2, 3], FixedPolicy(2, 3))])
    drafter.keep(0, 2)
    assert drafter.model.context.length(0) == 2
    assert drafter.lookup._texts[0].tokens == [1, 2]
    assert drafter.draft([]) == list[Draft]()


@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_joint_law_of_copies_and_a_model(rule: str, params: SamplingParams) -> None:
    """G-test of four tokens, 2,500 seeds; false alarm 1e-3 (greedy: the very tokens)."""
    draft = MarkovModel([[0.3, 0.1, 0.6], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]])
    shared = engine(both(draft))
    policy = FixedPolicy(2, 3)
    drawn = [
        tuple(run(shared, PROMPT, rule=rule, params=params, max_tokens=4, seed=seed, policy=policy).tokens)
        for seed in range(2500)
    ]
    if params.greedy:
        assert set(drawn) == {tuple(SMALL.greedy_path(PROMPT, 4))}
    else:
        assert g_test(drawn, plainly(params, 4)) > 1e-3


@dataclass(frozen=True)
class Costs:
    """Verification that is all but free, and a draft model at a tenth of a pass; the clock is not asked."""

    max_draft_tokens: int = 4
    max_lookup_tokens: int = 8

    def verify_s(self, num_tokens: int, depth: int) -> float:
        return 1.0 + 0.02 * num_tokens

    def draft_s(self, num_tokens: int, depth: int) -> float:
        return 0.1


def test_auto_copies_where_the_text_repeats_itself_and_asks_the_model_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target that counts: the first half of what it says stands in the prompt, the second is new."""
    counting = MarkovModel(np.eye(60)[[*range(1, 60), 0]])
    drafter = both(counting, capacity=200)
    context = drafter.model.context
    assert isinstance(context, FakeContext)
    policy = AdaptivePolicy(Costs(), UNCALIBRATED, lookup=True)
    # Passes of a fake take no time that means anything.
    policy.guard.credit = policy.lookup_guard.credit = 1e9
    monkeypatch.setattr(Guard, "pace", 1.0)
    policy._verify_clock = policy._draft_clock = ForgettingRatio(1e9, 1e9, keep=1.0)
    for _ in range(40):  # a record that trusts matches
        for length in range(2, 33):
            drafter.lookup.record.add(length, True)
    shared = engine(drafter, counting, capacity=200)
    prompt = [*range(30), 0, 1]
    request = Request(prompt=prompt, policy=policy, params=GREEDY, max_tokens=57, seed=1)
    generation = shared.start(request)
    passes = {"repeats": 0, "new": 0}
    while generation.finish_reason is None:
        where = "repeats" if generation.history[-1] < 25 else "new"
        before = context.passes
        shared.step([generation])
        passes[where] += context.passes - before
    assert generation.tokens == counting.greedy_path(prompt, 57)
    assert passes["repeats"] == 0
    assert passes["new"] > 0
    assert generation.stats.steps < 20, "copies and the model's drafts are right"
