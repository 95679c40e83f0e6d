"""The transcript recursion against running the rules themselves, outcome by outcome."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from localspec.acceptance import (
    Agreement,
    Transcript,
    acceptance_rate,
    agreement,
    agreement_intervals,
    tokens_per_step,
)
from localspec.errors import InvalidOptionError
from localspec.theory import expected_tokens

VOCABULARY = 3


class Chain:
    """A random Markov model of order one: the law of the next token depends on the last one."""

    def __init__(self, rng, zeros=()):
        self.start = rng.dirichlet(np.ones(VOCABULARY))
        table = rng.dirichlet(np.ones(VOCABULARY) * 0.7, size=VOCABULARY)
        for row, column in zeros:
            table[row, column] = 0
        self.table = table / table.sum(axis=1, keepdims=True)

    def law(self, prefix):
        return self.table[prefix[-1]] if prefix else self.start


def normalised(weights):
    return weights / weights.sum() if weights.sum() > 0 else weights


def step_outcomes_token(p, q, drafted):
    """Yield (chance, number kept, law of the token after them), straight from the token rule."""
    reached = 1.0
    for i, x in enumerate(drafted):
        keep = min(1.0, p[i][x] / q[i][x])
        yield reached * (1 - keep), i, normalised(np.maximum(p[i] - q[i], 0))
        reached *= keep
    yield reached, len(drafted), p[len(drafted)]


def step_outcomes_block(p, q, drafted):
    """The same for the block rule: every place is tried, the last success counts."""
    length = len(drafted)
    if length == 0:
        yield 1.0, 0, p[0]
        return
    weight = [1.0]
    for i, x in enumerate(drafted):
        weight.append(min(1.0, weight[i] * p[i][x] / q[i][x]))
    success = []
    for i in range(1, length):
        rest = np.maximum(weight[i] * p[i] - q[i], 0).sum()
        bottom = rest + 1 - weight[i]
        success.append(1.0 if bottom == 0 else rest / bottom)
    success.append(weight[length])
    later_fail = 1.0
    for i in range(length, 0, -1):
        law = p[length] if i == length else normalised(np.maximum(weight[i] * p[i] - q[i], 0))
        yield later_fail * success[i - 1], i, law
        later_fail *= 1 - success[i - 1]
    yield later_fail, 0, normalised(np.maximum(p[0] - q[0], 0))


RULES = {"token": step_outcomes_token, "block": step_outcomes_block}


def steps_given_text(target, draft, gamma, length, rule):
    """Run every outcome of every step: {text: (its probability, E[steps | text])}."""
    mass = defaultdict(float)  # chance that a step begins after this prefix
    steps = defaultdict(float)  # the same, times the steps taken so far
    mass[()] = 1.0
    for at in range(length):
        for prefix in [key for key in mass if len(key) == at]:
            for drafted in itertools.product(range(VOCABULARY), repeat=gamma):
                texts = [prefix + drafted[:i] for i in range(gamma + 1)]
                p = [target.law(text) for text in texts]
                q = [draft.law(text) for text in texts[:-1]]
                chance = np.prod([q[i][x] for i, x in enumerate(drafted)])
                if chance == 0:
                    continue
                for outcome, kept, law in RULES[rule](p, q, drafted):
                    for y in range(VOCABULARY):
                        weight = chance * outcome * law[y]
                        if weight:
                            text = (prefix + drafted[:kept] + (y,))[:length]
                            mass[text] += mass[prefix] * weight
                            steps[text] += (steps[prefix] + mass[prefix]) * weight
    return {text: (mass[text], steps[text] / mass[text]) for text in mass if len(text) == length}


def scored(model, text):
    return np.array([model.law(text[:i])[x] for i, x in enumerate(text)])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("gamma", "length"), [(0, 3), (1, 4), (2, 5), (3, 5)])
@pytest.mark.parametrize("zeros", [(), ((0, 1), (2, 2))])
def test_equals_enumeration_of_every_draft_and_outcome(rule, gamma, length, zeros):
    rng = np.random.default_rng(7)
    target, draft = Chain(rng), Chain(rng, zeros)
    found = steps_given_text(target, draft, gamma, length, rule)
    assert len(found) == VOCABULARY**length
    for text, (chance, steps) in found.items():
        p_y, q_y = scored(target, text), scored(draft, text)
        assert chance == pytest.approx(p_y.prod(), abs=1e-12)  # the enumerated rule is exact itself
        assert length / tokens_per_step(p_y, q_y, gamma, rule) == pytest.approx(steps, abs=1e-9)


def test_point_mass_draft_makes_the_rules_agree():
    rng = np.random.default_rng(3)
    p_y = rng.uniform(0.05, 1, 200)
    q_y = (rng.uniform(size=200) < 0.7).astype(float)
    for gamma in range(6):
        assert tokens_per_step(p_y, q_y, gamma, "block") == pytest.approx(tokens_per_step(p_y, q_y, gamma))


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_constant_ratio_gives_the_textbook_formula(alpha, gamma):
    n = 20_000
    measured = tokens_per_step(np.full(n, 0.5), np.full(n, 0.5 * alpha), gamma)
    assert measured == pytest.approx(expected_tokens(alpha, gamma), rel=1e-3)
    pooled = agreement([Transcript(np.full(n, 0.5), np.full(n, 0.5 * alpha))], gamma)
    assert pooled.acceptance_rate == pytest.approx(alpha)
    assert pooled.accepted_prefix == pytest.approx([alpha**i for i in range(gamma + 1)])


ratios = st.lists(st.tuples(st.floats(1e-3, 1), st.floats(0, 1)), min_size=1, max_size=30)


@settings(deadline=None)
@given(ratios, st.integers(0, 8))
def test_bounds(pairs, gamma):
    p_y, q_y = np.array(pairs).T
    token, block = (tokens_per_step(p_y, q_y, gamma, rule) for rule in ("token", "block"))
    n = len(pairs)
    assert token >= 1 - 1e-12
    assert block >= token * (1 - 1e-12)
    assert block <= n / -(-n // (gamma + 1)) * (1 + 1e-12)
    if gamma == 1:
        assert block == pytest.approx(token)


@settings(deadline=None)
@given(ratios)
def test_one_pass_gives_every_draft_length(pairs):
    p_y, q_y = np.array(pairs).T
    for rule in ("token", "block"):
        every = agreement([Transcript(p_y, q_y)], 5, rule=rule).tokens_per_step
        assert every == pytest.approx([tokens_per_step(p_y, q_y, gamma, rule) for gamma in range(6)])


def test_accepted_prefixes_add_up_to_tokens_per_step():
    rng = np.random.default_rng(5)
    n = 20_000
    transcript = Transcript(rng.uniform(0.1, 1, n), rng.uniform(0, 1, n))
    for rule in ("token", "block"):
        found = agreement([transcript], 6, rule=rule)
        assert sum(found.accepted_prefix) == pytest.approx(found.tokens_per_step[6], rel=1e-3)
        assert list(found.accepted_prefix) == sorted(found.accepted_prefix, reverse=True)


def test_extreme_probabilities():
    tiny = 5e-324
    for rule in ("token", "block"):
        # Ratios whose product overflows, then a token that the draft cannot make: it ends the step.
        assert tokens_per_step([tiny, tiny, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0], 3, rule) == pytest.approx(4 / 2)
        assert tokens_per_step([1.0, 1.0], [tiny, tiny], 2, rule) == pytest.approx(1)
    found = agreement([Transcript(np.array([tiny, 1.0]), np.array([1.0, 0.5]))], 1)
    assert found.acceptance_rate == pytest.approx(0.75)


def test_pools_tokens_over_steps():
    rng = np.random.default_rng(11)
    transcripts = [Transcript(rng.uniform(0.2, 1, n), rng.uniform(0, 1, n)) for n in (5, 40, 90)]
    found = agreement(transcripts, 3, rule="block")
    steps = sum(len(t) / tokens_per_step(t.p_y, t.q_y, 3, "block") for t in transcripts)
    assert found.num_tokens == 135
    assert found.tokens_per_step[3] == pytest.approx(135 / steps)
    assert found.tokens_per_step[0] == 1


def test_a_prefix_longer_than_every_text_is_unknown():
    found = agreement([Transcript(np.array([1.0]), np.array([1.0]))], 2)
    assert found.accepted_prefix[:2] == (1, 1)
    assert np.isnan(found.accepted_prefix[2])


class TestIntervals:
    @staticmethod
    def prompts(rng, count, alpha):
        """Texts from a toy whose every position is an independent draw with Σ min(p, q) = alpha."""
        laws = np.array([[0.5, 0.5], [0.5 + (1 - alpha), 0.5 - (1 - alpha)]])
        out = []
        for _ in range(count):
            y = rng.integers(0, 2, size=60)
            out.append(Transcript(laws[0][y], laws[1][y]))
        return out

    def test_cover_the_truth(self):
        # 40 data sets at 90 %: fewer than 29 covered has a chance below 1e-3 even at a true 85 %.
        rng = np.random.default_rng(2)
        covered = 0
        for _ in range(40):
            found = agreement_intervals(self.prompts(rng, 20, 0.8), 2, confidence=0.9, samples=400)
            covered += found.acceptance_rate.low <= 0.8 <= found.acceptance_rate.high
        assert covered >= 29

    def test_surround_the_estimate_and_repeat(self):
        transcripts = self.prompts(np.random.default_rng(4), 12, 0.7)
        found = agreement_intervals(transcripts, 3, rule="block", seed=9)
        assert found == agreement_intervals(transcripts, 3, rule="block", seed=9)
        assert found != agreement_intervals(transcripts, 3, rule="block", seed=10)
        centre = agreement(transcripts, 3, rule="block")
        for value, interval in zip(centre.tokens_per_step[1:], found.tokens_per_step[1:], strict=True):
            assert interval.low < value < interval.high
        assert found.tokens_per_step[0].low == found.tokens_per_step[0].high == 1

    def test_widen_with_confidence(self):
        transcripts = self.prompts(np.random.default_rng(4), 12, 0.7)
        narrow, wide = (
            agreement_intervals(transcripts, 1, confidence=level).acceptance_rate for level in (0.5, 0.99)
        )
        assert wide.low < narrow.low < narrow.high < wide.high

    def test_refuse(self):
        transcripts = self.prompts(np.random.default_rng(4), 2, 0.7)
        with pytest.raises(InvalidOptionError, match="at least 2"):
            agreement_intervals(transcripts[:1], 1)
        for confidence in (0, 1, float("nan")):
            with pytest.raises(InvalidOptionError, match="confidence"):
                agreement_intervals(transcripts, 1, confidence=confidence)
        with pytest.raises(InvalidOptionError, match="samples"):
            agreement_intervals(transcripts, 1, samples=0)


class TestAcceptanceRate:
    @settings(deadline=None)
    @given(hnp.arrays(float, (2, 4, 5), elements=st.floats(0, 1)))
    def test_is_one_minus_total_variation(self, weights):
        p, q = (weights + 1e-6) / (weights + 1e-6).sum(axis=-1, keepdims=True)
        rates = acceptance_rate(p, q)
        assert rates.shape == (4,)
        assert rates.dtype == np.float64
        assert rates == pytest.approx(1 - np.abs(p - q).sum(axis=-1) / 2)
        assert acceptance_rate(p[0], q[0]) == rates[0]
        assert acceptance_rate(p[0], p[0]) == pytest.approx(1)

    def test_toy_at_three_temperatures(self):
        def law(logits, temperature):
            weights = np.exp(np.array(logits) / temperature)
            return weights / weights.sum()

        rates = [acceptance_rate(law((2, 0), t), law((1.5, 0), t)) for t in (0.5, 1)]
        assert rates == pytest.approx([0.97, 0.94], abs=0.005)
        assert acceptance_rate([1, 0], [1, 0]) == 1

    @settings(deadline=None)
    @given(st.integers(0, 1000))
    def test_is_the_mean_ratio_over_the_targets_own_text(self, seed):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.ones(6), size=2)
        each = [agreement([Transcript(p[[y]], q[[y]])], 1).acceptance_rate for y in range(6)]
        assert np.dot(p, each) == pytest.approx(acceptance_rate(p, q))

    @pytest.mark.parametrize(
        ("p", "q"),
        [
            ([0.5, 0.5], [1.0]),
            ([0.5, 0.4], [0.5, 0.5]),
            ([0.5, 0.5], [1.5, -0.5]),
            ([0.5, np.nan], [0.5, 0.5]),
            ([], []),
            (1.0, 1.0),
            ("a", "b"),
            (np.ones((1, 1, 1)), np.ones((1, 1, 1))),
        ],
    )
    def test_refuses(self, p, q):
        with pytest.raises(InvalidOptionError):
            acceptance_rate(p, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.0], [0.5, 0.5], 1), r"p_y\[1\] is 0: the target cannot have sampled"),
        (([0.5, -0.1], [0.5, 0.5], 1), r"p_y\[1\] is -0\.1"),
        (([0.5, 0.5], [0.5, 1.1], 1), r"q_y\[1\] is 1\.1"),
        (([0.5, np.nan], [0.5, 0.5], 1), "p_y holds NaN"),
        (([0.5], [0.5, 0.5], 1), "shape"),
        (([], [], 1), "shape"),
        (([[0.5]], [[0.5]], 1), "shape"),
        ((["x"], [0.5], 1), "p_y is not an array"),
        (([0.5], [0.5], -1), "num_draft_tokens is -1"),
        (([0.5], [0.5], 1.5), "num_draft_tokens is 1.5"),
        (([0.5], [0.5], 1, "coupled"), "rule is 'coupled'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(InvalidOptionError, match=message):
        tokens_per_step(*arguments)


def test_no_transcripts():
    with pytest.raises(InvalidOptionError, match="no transcripts"):
        agreement([], 1)


def test_results_are_plain_values():
    found = agreement([Transcript(np.array([0.5]), np.array([0.25]))], 1)
    assert found == Agreement(1, 0.5, (1.0, 1.0), (1.0, 0.5))
    assert all(type(value) is float for value in (*found.tokens_per_step, *found.accepted_prefix))


def test_probabilities_that_are_no_list_of_numbers() -> None:
    with pytest.raises(InvalidOptionError, match="p_y"):
        tokens_per_step([[0.5], [0.5, 0.5]], [0.5], 1)
