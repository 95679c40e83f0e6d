"""Agreement on models whose laws are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localspec.acceptance import Interval, Transcript
from localspec.acceptance import tokens_per_step as exact_tokens_per_step
from localspec.calibration import agreement
from localspec.calibration.agreement import (
    DRAFT_SCALES,
    AgreementPlan,
    Observation,
    best_draft_temperatures,
    default_temperatures,
    draft_confidence,
    observe,
    summarise,
)
from localspec.calibration.profiles import fitted_confidence
from localspec.calibration.prompts import POOLED, CalibrationPrompt
from localspec.calibration.runner import say_undraftable
from localspec.engine import Engine
from localspec.errors import ContextOverflowError, InvalidLogitsError, InvalidOptionError
from localspec.generation import Request
from localspec.sampling import SamplingParams, make_law
from localspec.theory import expected_tokens
from tests.fakes import Failure, FakeContext, MarkovModel

PLAIN = SamplingParams()
TARGET = MarkovModel.random(1, spread=1.5)
DRAFT = MarkovModel.random(2, spread=1.0)


def never(token):
    return False


def same_everywhere(law):
    return MarkovModel(np.tile(law, (len(law), 1)))


def flattened(model, exponent):
    weights = model.laws**exponent
    return MarkovModel(weights / weights.sum(-1, keepdims=True))


def wrong_everywhere(model):
    """Return a model that never says what the other's greedy choice is."""
    laws = np.roll(np.eye(model.vocabulary_size)[model.laws.argmax(-1)], 1, axis=-1)
    return MarkovModel(laws)


def prompts(count, kinds=("a", "b"), *, seed=0, vocabulary_size=5):
    """Return prompts whose content is token ids already, in the order in which they are read: kinds alternate."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        tokens = rng.integers(0, vocabulary_size, 6).tolist()
        made.append(CalibrationPrompt(kinds[i % len(kinds)], tokens))
    return made


def watch(target, draft, asked, *, capacity=128, num_sequences=1, ends=lambda token: False, **plan):
    contexts = [FakeContext(model, capacity=capacity, num_sequences=num_sequences) for model in (target, draft)]
    found = list(
        observe(
            *contexts,
            asked,
            AgreementPlan(**{"params": PLAIN, "temperatures": (1.0,), "tokens_per_prompt": 20} | plan),
            encode=lambda content: content,
            ends_generation=ends,
        )
    )
    for context in contexts:
        assert not any(context.held)
    return found


def expected_overlap(target, draft, prompt, length):
    """Return the mean of Σ min(p, q) over the next ``length`` tokens of the target's, by following all paths."""
    states = {tuple(prompt[-2:]): 1.0}
    total = 0.0
    for _ in range(length):
        after: dict[tuple[int, ...], float] = {}
        for state, weight in states.items():
            p, q = target.law(state), draft.law(state)
            total += weight * np.minimum(p, q).sum()
            for token, chance in enumerate(p):
                following = (state[-1], token)
                after[following] = after.get(following, 0.0) + weight * chance
        states = after
    return total / length


class TestEstimates:
    """Fixed seeds; the stated chances are those with which another seed would fail a correct program."""

    def test_acceptance_rate_is_unbiased(self):
        # Five standard errors: 6e-7.
        asked = prompts(300)
        found = watch(TARGET, DRAFT, asked)
        truth = np.mean([expected_overlap(TARGET, DRAFT, prompt.content, 20) for prompt in asked])
        means = np.array([o.overlap.mean() for o in found])
        estimate = summarise(found, max_draft_tokens=2)[-1].acceptance_rate
        assert estimate == pytest.approx(means.mean())
        assert abs(estimate - truth) < 5 * means.std() / np.sqrt(len(found))
        # The cheaper estimate from the tokens alone means the same.
        singles = np.array([np.minimum(1, o.transcript.q_y / o.transcript.p_y).mean() for o in found])
        assert abs(singles.mean() - truth) < 5 * singles.std() / np.sqrt(len(found))

    def test_intervals_cover_the_truth(self):
        # A percentile bootstrap over 12 prompts covers about 91 %; fewer than 43 of 60: 1e-5.
        asked = prompts(720)
        found = watch(TARGET, DRAFT, asked, tokens_per_prompt=8)
        covered = 0
        for at in range(0, len(asked), 12):
            truth = np.mean([expected_overlap(TARGET, DRAFT, p.content, 8) for p in asked[at : at + 12]])
            interval = summarise(found[at : at + 12], max_draft_tokens=1)[-1].acceptance_interval
            covered += interval.low <= truth <= interval.high
        assert covered >= 43

    def test_tokens_per_step_of_laws_that_never_change(self):
        # Known α = 0.7, independent of what came before: the textbook formula holds under the token rule. At 12,000
        # tokens the standard error of α is 0.004 at most, of tokens per step 0.03: four of them, 6e-5 for each γ.
        p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.4, 0.4])
        asked = prompts(120, vocabulary_size=3)
        found = watch(same_everywhere(p), same_everywhere(q), asked, capacity=256, tokens_per_prompt=100)
        pooled = summarise(found, max_draft_tokens=4)[-1]
        assert pooled.acceptance_rate == pytest.approx(0.7)
        textbook = [expected_tokens(0.7, gamma) for gamma in range(5)]
        assert pooled.iid_tokens_per_step == pytest.approx(textbook)
        assert pooled.token.tokens_per_step == pytest.approx(textbook, abs=0.12)
        assert pooled.token.accepted_prefix == pytest.approx([0.7**i for i in range(5)], abs=0.03)
        # The block rule is the same for one token, and accepts more of several.
        assert pooled.block.tokens_per_step[1] == pytest.approx(pooled.token.tokens_per_step[1])
        assert pooled.block.tokens_per_step[4] > pooled.token.tokens_per_step[4] + 0.03

    def test_summary_is_the_recursion_over_the_transcripts(self):
        found = watch(TARGET, DRAFT, prompts(1))
        p_y, q_y = found[0].transcript.p_y, found[0].transcript.q_y
        (summary, pooled) = summarise(found, max_draft_tokens=3)
        for rule in ("token", "block"):
            expected = [exact_tokens_per_step(p_y, q_y, gamma, rule) for gamma in range(4)]
            assert summary.under(rule).tokens_per_step == pytest.approx(expected)
            assert summary.under(rule).intervals is None
        assert summary.acceptance_interval is None
        assert pooled == replace(summary, kind=POOLED)

    def test_every_token_counts_the_same(self):
        found = watch(TARGET, DRAFT, prompts(20), ends=lambda token: token == 2)
        overlaps = [o.overlap for o in found]
        assert len(set(map(len, overlaps))) > 2
        pooled = summarise(found, max_draft_tokens=1)[-1]
        assert pooled.num_tokens == sum(map(len, overlaps))
        assert pooled.acceptance_rate == pytest.approx(np.concatenate(overlaps).mean())

    def test_prefixes_end_where_transcripts_do(self):
        found = watch(TARGET, DRAFT, prompts(3), tokens_per_prompt=2)
        assert len(summarise(found, max_draft_tokens=5)[0].token.accepted_prefix) == 3


class TestExtremes:
    def test_a_draft_that_is_the_target(self):
        found = watch(TARGET, TARGET, prompts(6), temperatures=(0.0, 0.5, 1.0))
        for summary in summarise(found, max_draft_tokens=4):
            assert summary.acceptance_rate == pytest.approx(1)
            assert summary.token.accepted_prefix == pytest.approx((1,) * 5)
            # 20 tokens in steps of 5.
            assert summary.block.tokens_per_step == pytest.approx((1, 2, 20 / 7, 4, 5))

    def test_a_draft_that_is_always_wrong(self):
        greedy = MarkovModel(np.eye(5)[TARGET.laws.argmax(-1)])
        found = watch(greedy, wrong_everywhere(TARGET), prompts(6), temperatures=(0.0, 1.0))
        for summary in summarise(found, max_draft_tokens=4):
            assert summary.acceptance_rate == 0
            assert summary.token.tokens_per_step == summary.block.tokens_per_step == (1,) * 5
            assert summary.acceptance_interval == Interval(0, 0)

    def test_greedy_is_agreement_of_the_likeliest(self):
        asked = prompts(4)
        found = watch(TARGET, DRAFT, asked, temperatures=(0.0,))
        for observation, prompt in zip(found, asked, strict=True):
            path = TARGET.greedy_path(prompt.content, 20)
            agree = [float(DRAFT.greedy([*prompt.content, *path[:i]]) == path[i]) for i in range(20)]
            assert observation.transcript.p_y.tolist() == [1.0] * 20
            assert observation.transcript.q_y.tolist() == observation.overlap.tolist() == agree
            assert observation.rescaled_overlap.size == 0
            # A point mass would always be sure of itself.
            sure = [DRAFT.law([*prompt.content, *path[:i]]).max() for i in range(20)]
            assert observation.confidence == pytest.approx(sure, abs=1e-6)


class TestObserving:
    def test_transcripts_are_what_plain_decoding_writes(self, monkeypatch):
        written = []
        score = agreement._score
        monkeypatch.setattr(agreement, "_score", lambda d, w, *rest: written.append(w.tokens) or score(d, w, *rest))
        asked = prompts(6)
        params = SamplingParams(temperature=0.8, top_k=4, min_p=0.05)
        watch(TARGET, DRAFT, asked, params=params, temperatures=(0.8,), seed=30, ends=lambda token: token == 3)
        for number, prompt in enumerate(asked):
            engine = Engine(FakeContext(TARGET, capacity=128), None, ends_generation=lambda token: token == 3)
            running = engine.start(Request(prompt=prompt.content, params=params, max_tokens=20, seed=30 + number))
            while running.finish_reason is None:
                engine.step([running])
            assert written[number] == running.tokens
        assert min(map(len, written)) < 20

    def test_probabilities_are_those_of_the_laws(self, monkeypatch):
        written = []
        score = agreement._score
        monkeypatch.setattr(agreement, "_score", lambda d, w, *rest: written.append(w.tokens) or score(d, w, *rest))
        asked = prompts(3)
        found = watch(TARGET, DRAFT, asked, temperatures=(0.5, 1.0))
        assert [(o.prompt, o.temperature) for o in found] == [(i, t) for i in range(3) for t in (0.5, 1.0)]
        for observation, tokens in zip(found, written, strict=True):
            history = list(asked[observation.prompt].content)
            for i, token in enumerate(tokens):
                p, q = (m.law(history) ** (1 / observation.temperature) for m in (TARGET, DRAFT))
                p, q = p / p.sum(), q / q.sum()
                assert observation.transcript.p_y[i] == pytest.approx(p[token], rel=1e-5)
                assert observation.transcript.q_y[i] == pytest.approx(q[token], rel=1e-5)
                assert observation.overlap[i] == pytest.approx(np.minimum(p, q).sum(), rel=1e-5)
                assert observation.confidence[i] == pytest.approx(q.max(), rel=1e-5)
                for scale, found_overlap in zip(DRAFT_SCALES, observation.rescaled_overlap[:, i], strict=True):
                    other = DRAFT.law(history) ** (1 / (observation.temperature * scale))
                    assert found_overlap == pytest.approx(np.minimum(p, other / other.sum()).sum(), rel=1e-5)
                history.append(token)

    def test_several_sequences_write_what_one_does(self):
        asked = prompts(7, kinds=("a", "b", "c"))
        options = {"temperatures": (0.0, 1.0), "ends": lambda token: token == 4}
        single = watch(TARGET, DRAFT, asked, **options)
        several = watch(TARGET, DRAFT, asked, num_sequences=3, **options)
        for one, other in zip(
            *(sorted(x, key=lambda o: (o.prompt, o.temperature)) for x in (single, several)), strict=True
        ):
            assert (one.prompt, one.kind, one.temperature) == (other.prompt, other.kind, other.temperature)
            np.testing.assert_array_equal(one.transcript.q_y, other.transcript.q_y)
            np.testing.assert_array_equal(one.rescaled_overlap, other.rescaled_overlap)

    def test_a_vocabulary_larger_than_the_targets(self):
        padded = np.zeros((6, 6, 6))
        padded[:5, :5, :5] = 0.5 * DRAFT.laws
        padded[..., 5] += 0.5  # what the draft says of an id that the target does not have is left out
        padded /= padded.sum(-1, keepdims=True)
        same, other = (watch(TARGET, model, prompts(2)) for model in (DRAFT, MarkovModel(padded)))
        for one, two in zip(same, other, strict=True):
            np.testing.assert_allclose(one.overlap, two.overlap, rtol=1e-5)

    def test_the_context_bounds_the_transcript(self):
        found = watch(TARGET, DRAFT, prompts(2), capacity=13)
        assert [len(o.transcript) for o in found] == [7, 7]
        with pytest.raises(ContextOverflowError, match="has 6 tokens and the context holds 6"):
            watch(TARGET, DRAFT, prompts(2), capacity=6)

    def test_kinds_take_turns(self):
        asked = [*prompts(3, kinds=("a",)), *prompts(2, kinds=("b",), seed=1)]
        assert [o.kind for o in watch(TARGET, DRAFT, asked)] == ["a", "b", "a", "b", "a"]

    @pytest.mark.parametrize(("budget_s", "expected"), [(0, 1), (10, 1), (20, 2), (39, 3), (1000, 8)])
    def test_the_budget_holds_without_cutting_a_prompt_short(self, monkeypatch, budget_s, expected):
        # Every prompt takes 10 s; the first one is observed whatever the budget.
        now = iter(range(0, 10_000, 5))
        monkeypatch.setattr(agreement, "monotonic", lambda: float(next(now)))
        found = watch(TARGET, DRAFT, prompts(8), temperatures=(0.0, 1.0), budget_s=budget_s)
        assert len(found) == 2 * expected

    def test_an_interrupt_keeps_what_was_observed(self):
        target = FakeContext(TARGET, capacity=128, failure=Failure(at=60, error=KeyboardInterrupt(), kept="all"))
        draft = FakeContext(DRAFT, capacity=128)
        found = []
        plan = AgreementPlan(params=PLAIN, temperatures=(1.0,), tokens_per_prompt=20)
        observations = observe(target, draft, prompts(8), plan, encode=lambda c: c, ends_generation=lambda t: False)
        with pytest.raises(KeyboardInterrupt):
            found.extend(observations)
        assert len(found) == 2
        assert not target.held[0]
        assert not draft.held[0]
        assert summarise(found, max_draft_tokens=3)[-1].num_prompts == 2

    def test_progress(self):
        seen = []
        contexts = [FakeContext(model, capacity=128) for model in (TARGET, DRAFT)]
        plan = AgreementPlan(params=PLAIN, temperatures=(0.0, 1.0), tokens_per_prompt=3)
        for _ in observe(
            *contexts, prompts(2), plan, encode=lambda c: c, ends_generation=lambda t: False,
            progress=lambda *numbers: seen.append(numbers),
        ):  # fmt: skip
            pass
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_plan_refuses(self):
        with pytest.raises(InvalidOptionError, match="no temperature"):
            AgreementPlan(temperatures=())
        with pytest.raises(InvalidOptionError, match="tokens_per_prompt is 0"):
            AgreementPlan(tokens_per_prompt=0)


def test_default_temperatures():
    assert default_temperatures(SamplingParams(temperature=0.8)) == (0, 0.8, 1)
    assert default_temperatures(SamplingParams(temperature=0)) == (0, 0.7, 1)
    assert default_temperatures(SamplingParams()) == (0, 1)


def test_summaries_come_by_kind_and_temperature():
    found = watch(TARGET, DRAFT, prompts(4), temperatures=(1.0, 0.0))
    assert [(s.kind, s.temperature, s.num_prompts, s.num_tokens) for s in summarise(found, max_draft_tokens=1)] == [
        ("a", 0, 2, 40), ("a", 1, 2, 40), ("b", 0, 2, 40), ("b", 1, 2, 40), ("all", 0, 4, 80), ("all", 1, 4, 80),
    ]  # fmt: skip
    assert summarise([], max_draft_tokens=1) == ()


class TestRowsThatAreNone:
    """NaN, or nothing finite, among the logits."""

    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_nothing_counts_as_drafted_where_the_draft_has_none(self, value):
        asked = prompts(4)
        plan = AgreementPlan(params=PLAIN, temperatures=(0.0, 1.0), tokens_per_prompt=20)
        sound = watch(TARGET, DRAFT, asked, temperatures=(0.0, 1.0))
        bad = FakeContext(DRAFT, capacity=128, spoil=lambda prefix: value if len(prefix) in (8, 15) else None)
        found = list(observe(FakeContext(TARGET, capacity=128), bad, asked, plan, encode=list, ends_generation=never))
        for one, other in zip(found, sound, strict=True):
            # A prompt of 6 tokens: rows 2 and 9 of what follows.
            lost = np.isin(np.arange(20), (2, 9))
            assert one.num_undraftable == 2
            for name in ("overlap", "confidence", "rescaled_overlap"):
                mine, theirs = getattr(one, name), getattr(other, name)
                assert not mine[..., lost].any()
                np.testing.assert_array_equal(mine[..., ~lost], theirs[..., ~lost])
            np.testing.assert_array_equal(one.transcript.p_y, other.transcript.p_y)
            q_y = np.where(lost, 0.0, other.transcript.q_y)
            np.testing.assert_array_equal(one.transcript.q_y, q_y)
        best = best_draft_temperatures(found)
        assert summarise(found, max_draft_tokens=3)[-1].acceptance_rate < 1
        assert all(np.isfinite(each.gain) for each in best)

    def test_they_say_nothing_of_confidence(self):
        overlap, confidence = np.array([0.9, 0.0, 0.9]), np.array([0.8, 0.0, 0.8])
        transcript = Transcript(np.full(3, 0.5), np.full(3, 0.5))
        one = Observation("a", 0, 1.0, transcript, overlap, confidence, np.empty((0, 3)), num_undraftable=1)
        assert fitted_confidence([one], 1.0).model.predict(0.1) == pytest.approx(0.9)
        none = replace(one, overlap=np.zeros(3), confidence=np.zeros(3), num_undraftable=3)
        assert fitted_confidence([none], 1.0).model.predict(0.9) == 0.0

    def test_it_is_said(self):
        transcript = Transcript(np.full(3, 0.5), np.full(3, 0.5))
        one = Observation("a", 0, 1.0, transcript, np.zeros(3), np.zeros(3), np.empty((0, 3)), num_undraftable=1)
        said = []
        say_undraftable([replace(one, num_undraftable=0)], said.append)
        assert said == []
        say_undraftable([one, one], said.append)
        assert "at 2 of 6 tokens the draft model computed no usable logits" in said[0]

    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_of_the_target_they_are_an_error(self, value):
        bad = FakeContext(TARGET, capacity=128, spoil=lambda prefix: value if len(prefix) == 9 else None)
        plan = AgreementPlan(params=PLAIN, temperatures=(1.0,))
        with pytest.raises(InvalidLogitsError):
            list(observe(bad, FakeContext(DRAFT, capacity=128), prompts(2), plan, encode=list, ends_generation=never))


class TestDraftTemperature:
    def test_finds_that_a_flat_draft_is_better_cold(self):
        found = watch(TARGET, flattened(TARGET, 0.7), prompts(20), temperatures=(0.0, 1.0))
        (better,) = best_draft_temperatures(found)
        assert (better.temperature, better.draft_temperature) == (1.0, 0.7)
        assert 0 < better.interval.low <= better.gain <= better.interval.high
        at_own = np.concatenate([o.overlap for o in found if o.temperature == 1])
        assert better.gain == pytest.approx(1 - at_own.mean(), abs=1e-5)

    def test_finds_nothing_where_nothing_is_to_gain(self):
        assert best_draft_temperatures(watch(TARGET, TARGET, prompts(20))) == ()

    def test_chance_is_no_gain(self):
        # The gain of one prompt in ten, and none in the others, may be chance.
        def one(number):
            overlap = np.full(10, 0.5)
            rescaled = np.tile(overlap + (0.3 if number == 0 else 0.0), (len(DRAFT_SCALES), 1))
            transcript = Transcript(np.full(10, 0.5), np.full(10, 0.25))
            return Observation("a", number, 1.0, transcript, overlap, overlap, rescaled)

        assert best_draft_temperatures([one(number) for number in range(10)]) == ()
        assert len(best_draft_temperatures([one(0)] * 10)) == 1


def test_confidence_of_a_sampled_law_is_its_own():
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    params = SamplingParams(top_k=2)
    assert draft_confidence(row, make_law(row, params), params) == pytest.approx(0.625)


@pytest.mark.parametrize("temperature", [1e-5, 1e6])
def test_extreme_temperatures_have_no_draft_temperature_of_their_own(temperature):
    plan = AgreementPlan(temperatures=(temperature,), tokens_per_prompt=4)
    contexts = (FakeContext(TARGET, capacity=64), FakeContext(DRAFT, capacity=64))
    found = list(observe(*contexts, prompts(2), plan, encode=list, ends_generation=lambda token: False))
    assert len(found) == 2
    assert best_draft_temperatures(found) == ()
