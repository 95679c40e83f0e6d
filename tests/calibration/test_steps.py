"""Steps of several sorts on texts whose every acceptance is known."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.acceptance import Transcript, agreement
from localspec.calibration.steps import LONGEST_COPY, Drafting, StepCosts, Text, copying, count_steps
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.drafters import DraftRequest
from localspec.lookup import LookupDrafter
from localspec.plans import EvaluationPlan
from localspec.profile import SamplerCost, predicted_speedups
from localspec.sampling import SamplingParams, StepNoise, Stream


def curve(seconds: dict[int, float]) -> CostCurves:
    return CostCurves((CostCurve(256, tuple(PassCost(n, n, s, 0.0, 5) for n, s in seconds.items())),))


TARGET = curve({1: 1.0, 2: 1.5, 3: 1.8, 5: 2.0, 9: 3.0, 16: 4.0})
DRAFT = curve({1: 0.1, 2: 0.25, 4: 0.3})


def costs(draft: CostCurves | None = DRAFT, sampler: SamplerCost | None = None) -> StepCosts:
    return StepCosts(TARGET, draft, sampler or SamplerCost(), 256, EvaluationPlan(), EvaluationPlan())


def transcript(seed: int, length: int) -> Transcript:
    rng = np.random.default_rng(seed)
    return Transcript(rng.uniform(0.3, 1, length), rng.uniform(0, 1, length))


class _CopyAll:
    limit, lookup_limit = 0, LONGEST_COPY

    def copies(self, chances: object) -> int:
        return LONGEST_COPY


def test_copying_is_what_the_drafter_does() -> None:
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.integers(0, 4, 120)]
    prompt, tokens = text[:40], text[40:]
    found = copying(prompt, tokens)
    for t in range(0, len(tokens), 7):
        drafter = LookupDrafter(ends_generation=lambda token: False)
        request = DraftRequest(
            sequence=0, history=[*prompt, *tokens[:t]], limit=99, plan=_CopyAll(), params=SamplingParams(),
            noise=StepNoise(0, 0, Stream.VERIFY),
        )  # fmt: skip
        draft = drafter.draft([request])[0].tokens
        right = 0
        while right < min(len(draft), len(tokens) - t) and draft[right] == tokens[t + right]:
            right += 1
        assert (found.matched[t] > 0) == bool(draft)
        # Which of several matches is taken depends on the one before; the longest is as good.
        if found.matched[t] > 4:
            assert found.right[t] == right


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_without_copies_it_is_the_transcript_recursion(gamma: int) -> None:
    transcripts = [transcript(seed, 30 + seed) for seed in range(4)]
    texts = [Text(copying([1, 2], list(range(len(one)))), one) for one in transcripts]
    counts = count_steps(texts, Drafting(gamma))
    expected = agreement(transcripts, gamma, rule="block").tokens_per_step[gamma]
    assert counts.tokens / counts.drafted == pytest.approx(expected, rel=1e-12)
    assert counts.plain == counts.copied == 0


def test_the_prediction_of_a_model_is_the_profile_s() -> None:
    transcripts = [transcript(seed, 400) for seed in range(3)]
    texts = [Text(copying([1, 2], list(range(len(one)))), one) for one in transcripts]
    sampler = SamplerCost(0.01, 0.02, 0.03)
    found = agreement(transcripts, 4, rule="block").tokens_per_step
    expected = predicted_speedups(found, target=TARGET, draft=DRAFT, depth=256, sampler=sampler)
    for gamma in (1, 2, 4):
        how = Drafting(gamma)
        counts = count_steps(texts, how)
        speed = counts.tokens / costs(sampler=sampler).seconds(counts, how)
        # The profile takes the chance that all are accepted from E(γ) - E(γ - 1), here it is counted.
        assert speed * (TARGET.seconds(1, 256) + sampler.plain_s) == pytest.approx(expected[gamma], rel=0.01)


def test_a_text_that_repeats_itself_is_copied_in_long_steps() -> None:
    cycle = [5, 6, 7, 8]
    text = Text(copying(cycle * 2, cycle * 8))
    how = Drafting(num_copied=4)
    counts = count_steps([text], how)
    # 32 tokens, 5 a step: the last step is cut off by the end.
    assert (counts.copied, counts.plain, counts.copied_tokens) == (7, 0, pytest.approx(32, abs=3))
    assert costs(None).seconds(counts, how) == pytest.approx(7 * 2.0)


def test_short_matches_can_be_left_alone() -> None:
    text = Text(copying([1, 2, 3, 9, 1, 2], [4, 5]))
    assert count_steps([text], Drafting(num_copied=2)).copied == 1  # after 1, 2 came 3
    assert count_steps([text], Drafting(num_copied=2, min_match=3)).copied == 0


def test_a_model_drafts_where_nothing_is_copied_and_reads_what_was() -> None:
    prompt, tokens = [1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 9, 8, 7]
    sure = Transcript(np.ones(5), np.ones(5))
    text = Text(copying(prompt, tokens), sure)
    how = Drafting(num_draft_tokens=1, num_copied=2)
    counts = count_steps([text], how)
    # One step copies 3, 4 and emits 9, the next drafts 8 and emits 7.
    assert (counts.copied, counts.copied_tokens, counts.drafted, counts.all_accepted) == (1, 3, 1, 1)
    copied_s, drafted_s, read_s = 1.8, 1.5 + 0.1 + (0.25 - 0.1), 0.3 - 0.1
    assert costs().seconds(counts, how) == pytest.approx(copied_s + drafted_s + read_s)
    assert costs(None).seconds(counts, how) == pytest.approx(copied_s)
