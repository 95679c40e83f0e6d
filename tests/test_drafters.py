"""Drafts: tokens, the laws they were drawn from, and no pass more than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from localspec.backend import Context, can_roll_back
from localspec.drafters import Draft, DraftRequest, ModelDrafter, read_ahead
from localspec.policy import FixedPolicy
from localspec.sampling import DenseLaw, SamplingParams, SparseLaw, StepNoise, Stream
from tests.fakes import Failure, FakeContext, MarkovModel
from tests.stats import g_test

MODEL = MarkovModel.random(3, 6)
GREEDY = SamplingParams(temperature=0)
END = 5


def drafter(context: Context, *, vocabulary_size: int = 6) -> ModelDrafter:
    return ModelDrafter(context, vocabulary_size=vocabulary_size, ends_generation=lambda token: token == END)


def request(history: Sequence[int], limit: int = 4, *, sequence: int = 0, **changes: object) -> DraftRequest:
    values: dict[str, object] = {
        "plan": FixedPolicy(limit),
        "params": GREEDY,
        "noise": StepNoise(1, len(history), Stream.DRAFT),
        **changes,
    }
    return DraftRequest(sequence, list(history), limit, **values)  # type: ignore[arg-type]


def greedy_draft(history: Sequence[int], limit: int) -> list[int]:
    tokens: list[int] = []
    for token in MODEL.greedy_path(history, limit):
        tokens.append(token)
        if token == END:
            break
    return tokens


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_greedy_drafts_follow_the_model(limit: int) -> None:
    for start in range(5):
        (draft,) = drafter(FakeContext(MODEL)).draft([request([start, 1], limit)])
        assert draft.tokens == greedy_draft([start, 1], limit)
        assert [law.prob(token) for law, token in zip(draft.laws, draft.tokens, strict=True)] == [1] * len(draft.laws)


def test_tokens_come_from_the_laws_they_are_handed_out_with() -> None:
    """G-test of two drafted tokens against the draft's joint law, 4,000 positions; false alarm 1e-3."""
    context = FakeContext(MODEL, capacity=10)
    drawn = []
    for position in range(4000):
        context.truncate(0, 0)
        noise = StepNoise(9, position, Stream.DRAFT)
        (draft,) = drafter(context).draft([request([1, 2], 2, params=SamplingParams(), noise=noise)])
        drawn.append(tuple(draft.tokens))
        for i, law in enumerate(draft.laws):
            np.testing.assert_allclose(law.dense(6), MODEL.law([1, 2, *draft.tokens[:i]]), atol=1e-6)
    assert g_test(drawn, MODEL.joint([1, 2], 2, end=END)) > 1e-3


def test_nothing_is_drafted_past_an_end() -> None:
    model = MarkovModel(np.eye(6)[[1, 2, END, 0, 0, 0]])
    (draft,) = drafter(FakeContext(model)).draft([request([0], 5)])
    assert draft.tokens == [1, 2, END]
    assert len(draft.laws) == 3


def test_ids_the_target_lacks_are_never_proposed() -> None:
    """A draft with a padded vocabulary: its law is made of the shared ids only, and is the law drawn from."""
    likes_the_last = MarkovModel(np.tile([0.1, 0.1, 0.1, 0.0, 0.2, 0.5], (6, 1)))
    for params in (GREEDY, SamplingParams()):
        for position in range(30):
            noise = StepNoise(2, position, Stream.DRAFT)
            asked = request([0], 3, params=params, noise=noise)
            (draft,) = drafter(FakeContext(likes_the_last), vocabulary_size=4).draft([asked])
            assert len(draft.tokens) == 3
            assert set(draft.tokens) <= {0, 1, 2}
    law = draft.laws[0]
    assert isinstance(law, DenseLaw)
    np.testing.assert_allclose(law.dense(6), [1 / 3, 1 / 3, 1 / 3, 0, 0, 0], atol=1e-6)


def test_sequences_share_passes_and_leave_when_done() -> None:
    context = FakeContext(MODEL, num_sequences=3)
    requests = [request([1, s], limit, sequence=s) for s, limit in ((0, 1), (1, 4), (2, 2))]
    drafts = drafter(context).draft(requests)
    assert [d.tokens for d in drafts] == [greedy_draft([1, s], limit) for s, limit in ((0, 1), (1, 4), (2, 2))]
    assert context.passes == max(len(d.tokens) for d in drafts)
    assert context.rows == sum(len(d.tokens) for d in drafts)
    assert drafter(context).draft([]) == []


def test_what_the_cache_holds_is_not_read_again() -> None:
    context = FakeContext(MODEL)
    maker = drafter(context)
    (draft,) = maker.draft([request([1, 2, 0], 4)])
    assert context.tokens_read == 3 + len(draft.tokens) - 1
    # All accepted and one token more: the draft lacks its own last token and that one.
    history = [1, 2, 0, *draft.tokens, 3]
    before = context.tokens_read
    maker.keep(0, len(history) - 1)
    (again,) = maker.draft([request(history, 1)])
    assert context.tokens_read == before + 2
    assert again.tokens == greedy_draft(history, 1)


def test_a_prompt_is_read_by_chunks_and_what_follows_in_one_pass() -> None:
    context = FakeContext(MODEL, chunk=4)
    drafter(context).draft([request([1] * 11, 1, prompt_length=9)])
    assert (context.length(0), context.passes, context.rows) == (11, 3 + 1, 1)
    # Written without drafts: more than one pass can take.
    drafter(context).draft([request([1] * 20, 1, prompt_length=9)])
    assert (context.length(0), context.passes, context.rows) == (20, 4 + 2 + 1, 2)


def test_nothing_is_read_for_a_step_that_does_not_run_the_draft() -> None:
    context = FakeContext(MODEL, chunk=4)
    plan = Cautious(0.0, 0)
    assert drafter(context).draft([request([1] * 11, 3, plan=plan, prompt_length=9, num_expected=40)]) == [Draft()]
    assert (context.passes, plan.lacking) == (0, [(2, 9, 40)])


def test_reading_ahead_goes_on_where_it_was_interrupted() -> None:
    # By quarters of a chunk, because somebody watches.
    context = FakeContext(MODEL, chunk=12, failure=Failure(2, KeyboardInterrupt(), "all"))
    tokens = [1, 2, 3, 4, 0, 1, 2, 3]
    told: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        read_ahead(context, 0, tokens, lambda held, wanted: told.append((held, wanted)))
    read_ahead(context, 0, tokens, lambda held, wanted: told.append((held, wanted)))
    assert context.held[0] == tokens
    assert told == [(3, 8), (8, 8)]


@dataclass(slots=True)
class Cautious:
    """A plan that runs a given number of times and draws only from sure laws."""

    threshold: float
    runs_left: int = 99
    limit: int = 9
    seen: list[float] = field(default_factory=list)
    lacking: list[tuple[int, int, int]] = field(default_factory=list)

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = 128) -> bool:
        self.lacking.append((num_lacking, num_unread, num_expected))
        self.runs_left -= 1
        return self.runs_left >= 0

    def draws(self, confidence: Callable[[], float]) -> bool:
        self.seen.append(confidence())
        return self.seen[-1] >= self.threshold


def test_a_plan_decides_before_the_draw() -> None:
    """It is shown the confidence of each law; what was drawn is kept, and an unsure law is never drawn from."""
    plan = Cautious(0.4)
    (draft,) = drafter(FakeContext(MODEL)).draft([request([1, 2], 9, plan=plan, params=SamplingParams())])
    assert [law.confidence for law in draft.laws] == plan.seen[: len(draft.laws)]
    assert all(confidence >= 0.4 for confidence in plan.seen[: len(draft.laws)])
    assert len(plan.seen) == len(draft.tokens) or plan.seen[-1] < 0.4
    context = FakeContext(MODEL)
    (none,) = drafter(context).draft([request([1, 2], 9, plan=Cautious(0.0, runs_left=0))])
    assert none == Draft()
    assert context.passes == 0
    (two,) = drafter(context).draft([request([1, 2], 9, plan=Cautious(0.0, runs_left=2))])
    assert len(two.tokens) == context.passes == 2


# --- can the cache forget? ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_a_sound_cache_is_recognised(order: int) -> None:
    context = FakeContext(MarkovModel.random(0, 6, order=order))
    assert can_roll_back(context, [1, 2, 3])
    assert context.length(0) == 0


@pytest.mark.parametrize("rollback", ["refused", "wrong"])
def test_a_cache_that_cannot_forget_is_recognised(rollback: str) -> None:
    for seed in range(20):
        context = FakeContext(MarkovModel.random(seed, 6), rollback=rollback)  # type: ignore[arg-type]
        assert not can_roll_back(context, [1, 2, 3])
        assert context.length(0) == 0


def test_rows_of_nan_are_no_proof_of_a_rollback() -> None:
    assert not can_roll_back(FakeContext(MODEL, spoil=lambda prefix: np.nan), [1, 2, 3])


def test_a_probe_that_fails_leaves_the_sequence_empty() -> None:
    for at in (1, 2, 3):
        context = FakeContext(MODEL, failure=Failure(at, KeyboardInterrupt(), "all"))
        with pytest.raises(KeyboardInterrupt):
            can_roll_back(context, [1, 2, 3])
        assert context.length(0) == 0


def test_a_point_mass_is_kept_as_such() -> None:
    (draft,) = drafter(FakeContext(MODEL)).draft([request([1], 1)])
    assert isinstance(draft.laws[0], SparseLaw)


# --- a cut vocabulary ---------------------------------------------------------------------------------------------


def test_a_cut_draft_proposes_kept_ids_and_reads_all() -> None:
    """G-test of two drafted tokens against the laws that are left, 3,000 positions; false alarm 1e-3."""
    kept = [1, 2, 4]
    context = FakeContext(MODEL, capacity=10, kept=kept)
    drawn = []
    for position in range(3000):
        context.truncate(0, 0)
        noise = StepNoise(9, position, Stream.DRAFT)
        asked = request([0, 3], 2, params=SamplingParams(), noise=noise)
        (draft,) = drafter(context).draft([asked])
        drawn.append(tuple(draft.tokens))
        for number, law in enumerate(draft.laws):
            left = cut_law([0, 3, *draft.tokens[:number]], kept)
            np.testing.assert_allclose(law.dense(6), left, rtol=1e-5)
    assert context.held[0][:2] == [0, 3]  # ids that it cannot propose
    first = cut_law([0, 3], kept)
    joint = {(a, b): first[a] * cut_law([0, 3, a], kept)[b] for a in kept for b in kept}
    assert g_test(drawn, joint) > 1e-3


def cut_law(prefix: Sequence[int], kept: Sequence[int]) -> np.ndarray:
    law = np.zeros(6)
    law[list(kept)] = MODEL.law(prefix)[list(kept)]
    return law / law.sum()


def test_a_cut_draft_keeps_to_what_the_target_knows() -> None:
    context = FakeContext(MODEL, kept=[1, 2, 4])
    for start in range(4):
        context.truncate(0, 0)
        (draft,) = drafter(context, vocabulary_size=4).draft([request([start, 1], 3, params=SamplingParams())])
        assert set(draft.tokens) <= {1, 2}


def test_penalties_bias_and_bans_reach_a_cut_draft_by_id() -> None:
    params = SamplingParams(presence_penalty=100, logit_bias={4: 50.0, 0: 90.0}, banned=(3,))
    (draft,) = drafter(FakeContext(MODEL, kept=[1, 2, 4])).draft([request([0, 4], 1, params=params)])
    assert draft.laws[0].prob(4) < 1e-9  # biased up, penalised down
    (biased,) = drafter(FakeContext(MODEL, kept=[1, 2, 4])).draft(
        [request([0, 1], 1, params=SamplingParams(logit_bias={4: 50.0, 0: 90.0}))]
    )
    assert biased.tokens == [4]
    (banned,) = drafter(FakeContext(MODEL, kept=[1, 2, 4])).draft(
        [request([0, 1], 1, params=SamplingParams(banned=(1, 2, 3)))]
    )
    assert banned.tokens == [4]
