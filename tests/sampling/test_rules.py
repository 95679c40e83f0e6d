"""The rules are exact: shown as identities over the pure ``verification_law``, not by sampling.

``verify`` is then tied to ``verification_law`` draw by draw. Known wrong rules are kept as mutants, and must fail.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from localspec.errors import InvalidOptionError
from localspec.sampling import DenseLaw, Law, SparseLaw, Verification, residual, verification_law, verify, verify_laws
from tests.fakes import MarkovModel
from tests.stats import g_test, holm_rejects
from tests.strategies import law_pairs

RULES = ("token", "block")
TOLERANCE = 1e-12
ALMOST_ONE = 1 - 2.0**-53

Floats = NDArray[np.float64]
RuleLaw = Callable[[Floats, Floats, Sequence[int], str], tuple[Floats, Floats]]
LawAt = Callable[[tuple[int, ...]], Floats]


class Given:
    """Uniforms chosen by a test."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def random(self, size: int, /) -> Floats:
        assert size == len(self.values)
        return np.array(self.values)


# --- the identities -----------------------------------------------------------------------------------------


@given(laws=st.integers(1, 6).flatmap(lambda size: law_pairs(2, 1, size)), rule=st.sampled_from(RULES))
@settings(max_examples=300)
def test_one_drafted_token_leaves_the_target_law(laws: tuple[Floats, Floats], rule: str) -> None:
    p, q = laws
    first = np.zeros(p.shape[1])
    for token in np.flatnonzero(q[0]):
        probs, next_laws = verification_law(p, q, [int(token)], rule)
        assert probs.sum() == pytest.approx(1, abs=TOLERANCE)
        first[token] += q[0, token] * probs[1]
        first += q[0, token] * probs[0] * next_laws[0]
        np.testing.assert_allclose(next_laws[1], p[1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(first, p[0], rtol=0, atol=TOLERANCE)


@given(laws=st.integers(1, 6).flatmap(lambda size: law_pairs(1, 1, size)))
@settings(max_examples=300)
def test_residual_mass_is_the_total_variation(laws: tuple[Floats, Floats]) -> None:
    p, q = laws[0][0], laws[1][0]
    alpha = np.minimum(p, q).sum()
    forms = {
        "dense": (DenseLaw.of(p), DenseLaw.of(q)),
        "sparse": (_sparse(p), _sparse(q)),
        "mixed": (DenseLaw.of(p), _sparse(q)),
        "mixed the other way": (_sparse(p), DenseLaw.of(q)),
    }
    for a, b in forms.values():
        mass, back = (rest[1] if rest else 0.0 for rest in (residual(a, b), residual(b, a)))
        assert mass == pytest.approx(1 - alpha, abs=TOLERANCE)
        assert back == pytest.approx(1 - alpha, abs=TOLERANCE)
    rest = residual(*forms["dense"])
    if rest and rest[1] > 1e-6:
        # q·min(1, p/q) + (1 − α)·residual = p, token by token
        np.testing.assert_allclose(np.minimum(p, q) + rest[1] * rest[0].dense(len(p)), p, rtol=0, atol=TOLERANCE)


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, int, Floats, Floats]:
    """Return V, γ and laws of target and draft after every prefix shorter than γ+1 and γ."""
    size, num_draft_tokens = draw(st.sampled_from([(1, 2), (2, 0), (2, 1), (2, 3), (3, 1), (3, 2)]))
    inner = sum(size**depth for depth in range(num_draft_tokens))
    p, q = draw(law_pairs(inner + size**num_draft_tokens, max(inner, 1), size))
    return size, num_draft_tokens, p, q


def _node(prefix: tuple[int, ...], size: int) -> int:
    """Return the row of the law after ``prefix`` in a tree stored depth by depth."""
    at = sum(size**depth for depth in range(len(prefix)))
    return at + functools.reduce(lambda number, token: number * size + token, prefix, 0)


@given(tree=trees(), rule=st.sampled_from(RULES))
@settings(max_examples=150, deadline=None)
def test_a_block_leaves_the_joint_law_of_the_target(tree: tuple[int, int, Floats, Floats], rule: str) -> None:
    """Drafts of γ tokens, a step, and then the target itself up to γ+1 tokens: exactly the target's joint law."""
    size, num_draft_tokens, p_tree, q_tree = tree

    def p_at(prefix: tuple[int, ...]) -> Floats:
        return p_tree[_node(prefix, size)]

    def target_prob(path: tuple[int, ...], start: int) -> float:
        return float(np.prod([p_at(path[:at])[path[at]] for at in range(start, len(path))]))

    step = one_step(p_at, lambda prefix: q_tree[_node(prefix, size)], size, num_draft_tokens, rule)
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, weight in step.items():
        for rest in itertools.product(range(size), repeat=num_draft_tokens + 1 - len(emitted)):
            joint[emitted + rest] += weight * target_prob(emitted + rest, len(emitted))
    for path in itertools.product(range(size), repeat=num_draft_tokens + 1):
        assert joint[path] == pytest.approx(target_prob(path, 0), abs=TOLERANCE)


def one_step(
    p_at: LawAt, q_at: LawAt, size: int, num_draft_tokens: int, rule: str, rule_law: RuleLaw = verification_law
) -> dict[tuple[int, ...], float]:
    """Return the law of what one step emits: every draft, times every outcome of its verification."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted in itertools.product(range(size), repeat=num_draft_tokens):
        q = np.array([q_at(drafted[:i]) for i in range(num_draft_tokens)]).reshape(num_draft_tokens, size)
        p = np.array([p_at(drafted[:i]) for i in range(num_draft_tokens + 1)])
        chance = float(np.prod([q[i, token] for i, token in enumerate(drafted)]))
        if chance == 0:
            continue
        probs, laws = rule_law(p, q, drafted, rule)
        for num_accepted, prob in enumerate(probs):
            for token in range(size):
                law[(*drafted[:num_accepted], token)] += chance * prob * laws[num_accepted, token]
    return law


# --- enumeration over a toy Markov model, and the mutants ---------------------------------------------------

SIZE, NUM_DRAFT_TOKENS, LENGTH = 3, 3, 5
FLAT = 0.55  # a draft law without a token as likely as this counts as unsure
TARGET = MarkovModel([[0.1, 0.2, 0.7], [0.0, 0.5, 0.5], [0.4, 0.4, 0.2]])
DRAFT = MarkovModel([[0.3, 0.1, 0.6], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]])


def joint_error(rule: str, rule_law: RuleLaw = verification_law) -> float:
    """Return the largest error in the joint law of LENGTH tokens, emitted by as many steps as that takes."""

    @functools.cache
    def step_after(last: int) -> dict[tuple[int, ...], float]:
        return one_step(
            lambda prefix: TARGET.law((last, *prefix)),
            lambda prefix: DRAFT.law((last, *prefix)),
            SIZE,
            NUM_DRAFT_TOKENS,
            rule,
            rule_law,
        )

    joint: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(path: tuple[int, ...], weight: float) -> None:
        if len(path) >= LENGTH:
            joint[path[:LENGTH]] += weight
            return
        for emitted, prob in step_after(path[-1] if path else 0).items():
            if prob > 0:
                extend(path + emitted, weight * prob)

    extend((), 1.0)
    expected = TARGET.joint([0], LENGTH)
    return max(abs(joint[path] - expected.get(path, 0.0)) for path in {*joint, *expected})


@pytest.mark.parametrize("rule", RULES)
def test_repeated_steps_leave_the_joint_law_of_the_target(rule: str) -> None:
    assert joint_error(rule) < TOLERANCE


def _block_by_hand(p: Floats, q: Floats, drafted: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return P[0..γ] and h[0..γ] (h[0] = 1) of MATH.md §2, written down plainly."""
    scales = [1.0]
    for i, token in enumerate(drafted):
        scales.append(min(1.0, scales[-1] * p[i, token] / q[i, token]))
    passes = [1.0]
    for i in range(1, len(drafted)):
        rest = np.maximum(scales[i] * p[i] - q[i], 0).sum()
        below = rest + 1 - scales[i]
        passes.append(rest / below if below > 0 else 1.0)
    return scales, [*passes, scales[-1]] if drafted else passes


def _normalise(row: Floats, otherwise: Floats) -> Floats:
    return row / row.sum() if row.sum() > 0 else otherwise


def stops_at_the_first_failure(p: Floats, q: Floats, drafted: Sequence[int], rule: str) -> tuple[Floats, Floats]:
    _, laws = verification_law(p, q, drafted, "block")
    _, passes = _block_by_hand(p, q, drafted)
    return np.cumprod(passes) * (1 - np.array([*passes[1:], 0.0])), laws


def residual_of_the_token_rule_in_a_block(
    p: Floats, q: Floats, drafted: Sequence[int], rule: str
) -> tuple[Floats, Floats]:
    probs, laws = verification_law(p, q, drafted, "block")
    return probs, np.array([*(_normalise(np.maximum(a - b, 0), a) for a, b in zip(p[:-1], q, strict=True)), laws[-1]])


def draws_from_the_target_after_a_rejection(
    p: Floats, q: Floats, drafted: Sequence[int], rule: str
) -> tuple[Floats, Floats]:
    probs, _ = verification_law(p, q, drafted, rule)
    return probs, p.copy()


def bonus_from_the_row_before(p: Floats, q: Floats, drafted: Sequence[int], rule: str) -> tuple[Floats, Floats]:
    probs, laws = verification_law(p, q, drafted, rule)
    laws[-1] = p[-2]
    return probs, laws


def discards_an_unlikely_token_once_drawn(
    p: Floats, q: Floats, drafted: Sequence[int], rule: str
) -> tuple[Floats, Floats]:
    sure = itertools.takewhile(lambda i: q[i, drafted[i]] >= 0.35, range(len(drafted)))
    return _shortened(p, q, drafted, rule, len(list(sure)))


def stops_before_drawing_from_a_flat_law(
    p: Floats, q: Floats, drafted: Sequence[int], rule: str
) -> tuple[Floats, Floats]:
    """Exact: the decision looks at the law, and not at what is then drawn from it."""
    sure = itertools.takewhile(lambda i: q[i].max() >= FLAT, range(len(drafted)))
    return _shortened(p, q, drafted, rule, len(list(sure)))


def _shortened(p: Floats, q: Floats, drafted: Sequence[int], rule: str, length: int) -> tuple[Floats, Floats]:
    probs, laws = verification_law(p[: length + 1], q[:length], drafted[:length], rule)
    missing = len(drafted) - length
    return np.pad(probs, (0, missing)), np.pad(laws, ((0, missing), (0, 0)))


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        (stops_at_the_first_failure, "block"),
        (residual_of_the_token_rule_in_a_block, "block"),
        *itertools.product([draws_from_the_target_after_a_rejection], RULES),
        *itertools.product([bonus_from_the_row_before], RULES),
        *itertools.product([discards_an_unlikely_token_once_drawn], RULES),
    ],
)
def test_enumeration_notices_wrong_rules(mutant: RuleLaw, rule: str) -> None:
    assert joint_error(rule, mutant) > 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_stopping_on_the_law_alone_is_exact(rule: str) -> None:
    assert {DRAFT.law([token]).max() >= FLAT for token in range(SIZE)} == {True, False}, "some states must stop"
    assert joint_error(rule, stops_before_drawing_from_a_flat_law) < TOLERANCE


@given(laws=law_pairs(4, 3, 3), drafted=st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_block_law_is_the_formula(laws: tuple[Floats, Floats], drafted: list[int]) -> None:
    p, q = laws
    assume(all(q[i, token] > 0 for i, token in enumerate(drafted)))
    scales, passes = _block_by_hand(p, q, drafted)
    probs, next_laws = verification_law(p, q, drafted, "block")
    for i in range(4):
        assert probs[i] == pytest.approx(passes[i] * np.prod([1 - h for h in passes[i + 1 :]]), abs=1e-9)
        rest = np.maximum(scales[i] * p[i] - q[i], 0) if i < 3 else p[i]
        if rest.sum() > 1e-6:
            np.testing.assert_allclose(next_laws[i], rest / rest.sum(), rtol=0, atol=1e-9)


@given(laws=law_pairs(4, 3, 3))
def test_block_rule_accepts_no_less(laws: tuple[Floats, Floats]) -> None:
    """Expected tokens per step, over all drafts."""
    p, q = laws
    expected = dict.fromkeys(RULES, 0.0)
    for drafted in itertools.product(range(3), repeat=3):
        chance = float(np.prod([q[i, token] for i, token in enumerate(drafted)]))
        for rule in RULES if chance > 0 else ():
            expected[rule] += chance * float(verification_law(p, q, drafted, rule)[0] @ np.arange(4))
    assert expected["block"] >= expected["token"] - 1e-9


@pytest.mark.parametrize("kind", ["one drafted token", "point masses"])
def test_the_rules_coincide(kind: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        num_drafted = 1 if kind == "one drafted token" else 3
        p = rng.dirichlet(np.ones(4), num_drafted + 1)
        drafted = [int(token) for token in rng.integers(4, size=num_drafted)]
        q = rng.dirichlet(np.ones(4), num_drafted) if kind == "one drafted token" else np.eye(4)[drafted]
        for a, b in zip(
            verification_law(p, q, drafted, "token"), verification_law(p, q, drafted, "block"), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def test_a_point_mass_among_the_draft_laws_does_not_change_the_rule() -> None:
    """Where P = (1, 0.5, 0.45), the block rule keeps both tokens at u = (0.9, 0.3), and the token rule none."""
    p = [SparseLaw.of(np.array([0, 1]), np.array(row)) for row in ([0.4, 0.6], [0.9, 0.1], [0.5, 0.5])]
    q: list[Law] = [SparseLaw.of(np.array([0, 1]), np.array([0.8, 0.2])), SparseLaw.point(0)]
    kept = {rule: verify_laws(p, q, [0, 0], rule=rule, uniforms=Given(0.9, 0.3, 0.1)).num_accepted for rule in RULES}
    assert kept == {"block": 2, "token": 0}


# --- corner cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_is_plain_decoding(rule: str) -> None:
    p = np.array([[0.25, 0.75, 0.0]])
    for q in (np.zeros((0, 3)), []):
        probs, laws = verification_law(p, q, [], rule)
        assert probs.tolist() == [1.0]
        assert laws.tolist() == p.tolist()
        assert verify(p, q, [], rule, Given(0.0)) == Verification(0, 0)
        assert verify(p, q, [], rule, Given(ALMOST_ONE)) == Verification(0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_without_residual_samples_the_target(rule: str) -> None:
    """p = q and yet a rejection: here because the token was never in q, as a caller might get wrong."""
    p = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    probs, laws = verification_law(p, p[:1], [2], rule)
    assert probs.tolist() == [1.0, 0.0]
    assert laws[0].tolist() == p[0].tolist()
    assert np.isfinite(laws).all()


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_accept_everything(rule: str) -> None:
    p = np.random.default_rng(1).dirichlet(np.ones(5), 4)
    drafted = [0, 1, 2]
    assert verification_law(p, p[:3], drafted, rule)[0].tolist() == [0, 0, 0, 1]
    assert verify(p, p[:3], drafted, rule, Given(*[ALMOST_ONE] * 4)).num_accepted == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_token_the_target_never_says_is_rejected_at_any_uniform(rule: str, at: int) -> None:
    p = np.full((4, 3), [0.5, 0.5, 0.0])
    q = np.full((3, 3), [0.25, 0.25, 0.5])
    drafted = [0, 0, 0]
    drafted[at] = 2
    for u in (0.0, 0.3, ALMOST_ONE):
        verification = verify(p, q, drafted, rule, Given(0.0, 0.0, 0.0, u))
        assert verification.num_accepted <= at
        assert verification.next_token != 2
    assert verification_law(p, q, drafted, rule)[0][at + 1 :].sum() == 0


@pytest.mark.parametrize(
    ("p", "q", "drafted"),
    [
        ([[0.5, 0.5]], [[0.5, 0.5]], [0]),
        ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]], [2]),
        ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]], [-1]),
        ([[0.5, 0.5], [0.5, 0.5]], [[1.0]], [0]),
        ([[0.5, 0.6], [0.5, 0.5]], [[0.5, 0.5]], [0]),
        ([[1.5, -0.5], [0.5, 0.5]], [[0.5, 0.5]], [0]),
        ([[float("nan"), 0.5], [0.5, 0.5]], [[0.5, 0.5]], [0]),
        ([[0.5, 0.5], [0.5, 0.5]], [[float("inf"), 0.5]], [0]),
        ([0.5, 0.5], [], []),
    ],
)
def test_bad_arguments_are_refused(p: ArrayLike, q: ArrayLike, drafted: list[int]) -> None:
    with pytest.raises(InvalidOptionError):
        verification_law(p, q, drafted, "token")
    with pytest.raises(InvalidOptionError):
        verify(p, q, drafted, "block", np.random.default_rng(0))


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"'coupled-ish'.*token, block"):
        verification_law([[1.0]], [], [], "coupled-ish")


# --- verify draws from verification_law ---------------------------------------------------------------------


def _threshold(accepts: Callable[[float], bool]) -> float:
    """Return where ``accepts`` turns from true to false on [0, 1): the probability of acceptance."""
    if accepts(ALMOST_ONE):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return high


@given(laws=law_pairs(4, 3, 4), drafted=st.lists(st.integers(0, 3), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_token_rule_turns_where_its_law_says(laws: tuple[Floats, Floats], drafted: list[int]) -> None:
    p, q = laws
    assume(all(q[i, token] > 0 for i, token in enumerate(drafted)))
    probs, _ = verification_law(p, q, drafted, "token")
    reached = 1.0
    for i in range(3):
        if reached < 1e-6:
            break

        def accepts(u: float, i: int = i) -> bool:
            uniforms = [0.0] * i + [u] + [ALMOST_ONE] * (3 - i)
            return verify(p, q, drafted, "token", Given(*uniforms)).num_accepted > i

        assert _threshold(accepts) == pytest.approx(1 - probs[i] / reached, abs=1e-9)
        reached -= probs[i]


@given(laws=law_pairs(4, 3, 4), drafted=st.lists(st.integers(0, 3), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_block_rule_turns_where_its_law_says(laws: tuple[Floats, Floats], drafted: list[int]) -> None:
    p, q = laws
    assume(all(q[i, token] > 0 for i, token in enumerate(drafted)))
    probs, _ = verification_law(p, q, drafted, "block")
    later_fail = 1.0
    for i in (3, 2, 1):
        if later_fail < 1e-6:
            break

        def accepts(u: float, i: int = i) -> bool:
            uniforms = [ALMOST_ONE] * 4
            uniforms[i - 1] = u
            return verify(p, q, drafted, "block", Given(*uniforms)).num_accepted >= i

        assert _threshold(accepts) == pytest.approx(probs[i] / later_fail, abs=1e-9)
        later_fail -= probs[i]


@given(laws=law_pairs(4, 3, 4), drafted=st.lists(st.integers(0, 3), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_next_token_is_drawn_by_inverting_its_law(laws: tuple[Floats, Floats], drafted: list[int]) -> None:
    p, q = laws
    assume(all(q[i, token] > 0 for i, token in enumerate(drafted)))
    for rule in RULES:
        probs, next_laws = verification_law(p, q, drafted, rule)
        for num_accepted in np.flatnonzero(probs > 0.01):
            uniforms = _uniforms_for(p, q, drafted, rule, int(num_accepted))
            if uniforms is None:
                continue
            edges = np.cumsum(next_laws[num_accepted])
            for token in np.flatnonzero(next_laws[num_accepted] > 1e-6):
                for u in (edges[token] - next_laws[num_accepted, token] + 1e-9, edges[token] - 1e-9):
                    got = verify(p, q, drafted, rule, Given(*uniforms, float(u)))
                    assert got == Verification(int(num_accepted), int(token))


def _uniforms_for(p: Floats, q: Floats, drafted: list[int], rule: str, num_accepted: int) -> list[float] | None:
    """Return uniforms that lead to ``num_accepted``, if corners of the cube do."""
    for uniforms in itertools.product([0.0, ALMOST_ONE], repeat=len(drafted)):
        if verify(p, q, drafted, rule, Given(*uniforms, 0.5)).num_accepted == num_accepted:
            return list(uniforms)
    return None


def test_verify_samples_its_law() -> None:
    """G-tests over the outcomes (accepted, next token), 8 cases of 4,000 draws; false alarm 1e-3 over the seeds."""
    rng = np.random.default_rng(20)
    p_values = {}
    for rule, case in itertools.product(RULES, range(4)):
        p, q = rng.dirichlet(np.ones(4), 4), rng.dirichlet(np.ones(4), 3)
        drafted = [int(token) for token in rng.integers(4, size=3)]
        probs, laws = verification_law(p, q, drafted, rule)
        expected = {(i, t): float(probs[i] * laws[i, t]) for i in range(4) for t in range(4)}
        drawn = (verify(p, q, drafted, rule, rng) for _ in range(4000))
        p_values[f"{rule} {case}"] = g_test(((v.num_accepted, v.next_token) for v in drawn), expected)
    assert holm_rejects(p_values, 1e-3) == []


# --- sparse laws, dense laws, single precision --------------------------------------------------------------


def _sparse(row: Floats) -> SparseLaw:
    ids = np.flatnonzero(row)
    return SparseLaw.of(ids, row[ids])


FORMS: dict[str, Callable[[Floats], Law]] = {
    "float64": DenseLaw.of,
    "float32": lambda row: DenseLaw.of(row.astype(np.float32)),
    "unnormalised": lambda row: DenseLaw.of(row * 7.5),
    "sparse": _sparse,
}


@given(
    laws=law_pairs(4, 3, 5),
    drafted=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    uniforms=st.lists(st.floats(1e-4, 0.98), min_size=4, max_size=4),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=7, max_size=7),
    rule=st.sampled_from(RULES),
)
@settings(max_examples=300, deadline=None)
def test_the_form_of_a_law_does_not_matter(
    laws: tuple[Floats, Floats], drafted: list[int], uniforms: list[float], forms: list[str], rule: str
) -> None:
    """Any mixture of forms decides as float64 arrays do, unless a number lies within rounding of an edge.

    0 is such an edge: a residual that is 0 in float64 and 1e-8 in float32 is hit there.
    """
    p, q = laws
    assume(all(q[i, token] > 0 for i, token in enumerate(drafted)))
    scales = _block_by_hand(p, q, drafted)[0] if rule == "block" else [1.0] * 4
    gaps = np.abs([*(np.array(scales[:3])[:, None] * p[:3] - q).flat, *(1 - np.array(scales)), *p.flat, *q.flat])
    assume(gaps[gaps > 0].min(initial=1.0) > 1e-5)
    nudged = (np.clip(np.array(uniforms) + s * 1e-5, 0, 0.99) for s in (-1, 0, 1))
    outcomes = {verify(p, q, drafted, rule, Given(*uniform)) for uniform in nudged}
    assume(len(outcomes) == 1)
    p_laws = [FORMS[form](row) for form, row in zip(forms[:4], p, strict=True)]
    q_laws = [FORMS[form](row) for form, row in zip(forms[4:], q, strict=True)]
    assert {verify_laws(p_laws, q_laws, drafted, rule=rule, uniforms=Given(*uniforms))} == outcomes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("outside", [-1, -7, 3, 99])
def test_ids_the_target_does_not_have_are_rejected(rule: str, outside: int) -> None:
    """The draft's law may reach past the target's vocabulary; p is 0 there, and the last row is not asked for."""
    q = SparseLaw.of(np.array(sorted([outside, 1])), np.ones(2))
    row = np.array([0.25, 0.25, 0.5])
    for p in (DenseLaw.of(row), DenseLaw.of(row.astype(np.float32)), _sparse(row)):
        for u in (0.0, 0.4, ALMOST_ONE):
            got = verify_laws([p], [q], [outside], rule=rule, uniforms=Given(0.0, u))
            assert got.num_accepted == 0
            assert got.next_token == (0 if u < 1 / 3 else 2), "max(p − q, 0) leaves 1/4 and 1/2"


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_law_of_another_width(rule: str) -> None:
    """Vocabularies that differ by padding: the missing ids have probability 0."""
    p, wide, narrow = DenseLaw.of(np.array([0.5, 0.3, 0.2])), np.array([0.4, 0.2, 0.1, 0.3]), np.array([0.9, 0.1])
    got = verify_laws([p], [DenseLaw.of(wide)], [3], rule=rule, uniforms=Given(0.0, 0.99))
    assert got == Verification(0, 2)
    got = verify_laws([p, p], [DenseLaw.of(narrow)], [0], rule=rule, uniforms=Given(0.6, 0.99))
    assert got == Verification(0, 2)
    rest = residual(p, DenseLaw.of(narrow))
    assert rest is not None
    np.testing.assert_allclose(rest[0].dense(3), [0, 0.5, 0.5], atol=TOLERANCE)


def test_rows_are_asked_for_only_when_needed() -> None:
    asked: list[int] = []

    class Lazy(list[Law]):
        def __getitem__(self, index: int) -> Law:  # type: ignore[override]
            asked.append(index)
            return super().__getitem__(index)

    p = Lazy(_sparse(row) for row in np.eye(3)[[0, 1, 2, 0]])
    q = [_sparse(row) for row in np.eye(3)[[0, 2, 2]]]
    verify_laws(p, q, [0, 2, 2], rule="token", uniforms=Given(0, 0, 0, 0))
    assert set(asked) == {0, 1}


@pytest.mark.parametrize(
    ("p", "q", "drafted"),
    [
        ([[0.5, 0.5]], [[0.5, 0.5]], []),
        ([[0.5, 0.5], [1.0]], [[0.5, 0.5]], [0]),
        ([["a", "b"], ["c", "d"]], [[0.5, 0.5]], [0]),
        ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]], [0.0]),
        ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]], [None]),
    ],
)
def test_arguments_that_are_no_laws_or_ids(p, q, drafted):
    for rule in ("token", "block"):
        with pytest.raises(InvalidOptionError):
            verification_law(p, q, drafted, rule)
        with pytest.raises(InvalidOptionError):
            verify(p, q, drafted, rule, np.random.default_rng(0))
