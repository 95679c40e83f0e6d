"""What speculative steps of several sorts would have come to on texts that the target wrote alone.

A step copies where earlier text matches well enough, else a draft model drafts, else it is plain. Where it begins
follows from how the steps before it went, by the transcript recursion (``acceptance.step_starts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.acceptance import Transcript, step_lengths, step_starts
from localspec.curves import CostCurves
from localspec.lookup import Repeats
from localspec.plans import EvaluationPlan, evaluation_plan
from localspec.profile import SamplerCost

__all__ = ["LONGEST_COPY", "Copying", "Drafting", "StepCosts", "StepCounts", "Text", "copying", "count_steps"]

LONGEST_COPY = 15
"""Copied tokens that are looked at, which with the last token of the text make a pass of 16."""


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """What copying earlier text would have yielded at each of the N positions of a text.

    Attributes:
        matched: tokens of the longest match that ends there; 0 without one, [N].
        right: how many of the copied tokens were the next ones, ``LONGEST_COPY`` at most, [N]. A copied token is the
            emitted one exactly where the rule accepts it, so that given the text nothing is left to chance.
    """

    matched: NDArray[np.int64]
    right: NDArray[np.int64]


def copying(prompt: Sequence[int], tokens: Sequence[int]) -> Copying:
    """Look, as the lookup drafter does, before each of ``tokens`` for a match in all that precedes it.

    >>> copying([7, 8, 9, 7, 8], [9, 7, 1]).right
    array([2, 1, 0])
    """
    text = Repeats()
    text.extend(prompt)
    matched, right = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
    for t, token in enumerate(tokens):
        match = text.match()
        if match is not None:
            matched[t] = match.length
            following = tokens[t : t + LONGEST_COPY]
            copied = text.following(match, len(following))
            same = (i for i, (a, b) in enumerate(zip(copied, following, strict=True)) if a != b)
            right[t] = next(same, len(following))
        text.extend([token])
    return Copying(matched, right)


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the target's: what copying would have yielded, and what a draft model, if any, makes of it."""

    copying: Copying
    transcript: Transcript | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """How steps draft.

    Attributes:
        num_draft_tokens: γ of the draft model; 0 is without one.
        num_copied: tokens copied where there is a match; 0 is without copying.
        min_match: the length of match from which on a step copies.
    """

    num_draft_tokens: int = 0
    num_copied: int = 0
    min_match: int = 2


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The expected number of steps of each sort that write some texts.

    Attributes:
        tokens: of the texts.
        plain: steps that draft nothing.
        drafted: steps in which the draft model drafts.
        all_accepted: those of them whose drafts are all accepted.
        copied: steps that copy.
        copied_tokens: emitted by these.
    """

    tokens: float
    plain: float
    drafted: float
    all_accepted: float
    copied: float
    copied_tokens: float


def count_steps(texts: Sequence[Text], how: Drafting) -> StepCounts:
    """Return the steps, under the block rule, that write ``texts``, which need transcripts if a model drafts."""
    sums = np.zeros(6)
    for text in texts:
        n, gamma = len(text.copying.matched), how.num_draft_tokens
        lengths = np.zeros((n, max(gamma, how.num_copied) + 1))
        lengths[:, 0] = 1.0
        if gamma:
            assert text.transcript is not None
            lengths[:, : gamma + 1] = step_lengths(text.transcript, gamma, "block")
        copies = (text.copying.matched >= how.min_match) & (how.num_copied > 0)
        right = np.minimum(text.copying.right, how.num_copied)
        all_accepted = np.where(copies, 0.0, lengths[:, gamma]) if gamma else np.zeros(n)
        lengths[copies] = np.eye(lengths.shape[1])[right[copies]]
        starts = np.asarray(step_starts(lengths))
        others, copied = starts[~copies].sum(), starts[copies].sum()
        steps = (0.0, others) if gamma else (others, 0.0)
        sums += (n, *steps, starts @ all_accepted, copied, starts[copies] @ (right[copies] + 1))
    return StepCounts(*sums.tolist())


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of steps on one machine, from measured curves.

    Attributes:
        target: passes of the target.
        draft: passes of the draft; None without one.
        sampler: what a step costs beside passes.
        depth: tokens in the caches.
        target_plan: how the target evaluates several tokens.
        draft_plan: how the draft does.
    """

    target: CostCurves
    draft: CostCurves | None
    sampler: SamplerCost
    depth: int
    target_plan: EvaluationPlan
    draft_plan: EvaluationPlan

    @classmethod
    def of(
        cls, target: CostCurves, draft: CostCurves | None, sampler: SamplerCost, *, depth: int, limit: int
    ) -> StepCosts:
        """Return costs under the plans that a profile with these curves has; ``limit`` is the target's."""
        draft_plan = EvaluationPlan() if draft is None else evaluation_plan(draft)
        return cls(target, draft, sampler, depth, evaluation_plan(target, limit=limit), draft_plan)

    def seconds(self, counts: StepCounts, how: Drafting) -> float:
        """Return what the counted steps take together.

        After copied tokens a draft model has to read them: that is counted as if its next pass took them along.
        """
        seconds = counts.plain * (self._target_s(1) + self.sampler.plain_s)
        seconds += counts.copied * self._step_s(how.num_copied)
        if self.draft is None or not how.num_draft_tokens:
            return seconds
        one_s, two_s = self._draft_s(1), self._draft_s(2)
        each_s = self._step_s(how.num_draft_tokens) + how.num_draft_tokens * one_s
        seconds += counts.drafted * each_s + counts.all_accepted * (two_s - one_s)
        if counts.copied:
            emitted = round(counts.copied_tokens / counts.copied)
            seconds += counts.copied * (self._draft_s(1 + emitted) - one_s)
        return seconds

    def _step_s(self, num_tokens: int) -> float:
        return self._target_s(num_tokens + 1) + self.sampler.step_s + num_tokens * self.sampler.draft_s

    def _target_s(self, num_tokens: int) -> float:
        return self.target_plan.seconds(self.target, num_tokens, self.depth)

    def _draft_s(self, num_tokens: int) -> float:
        assert self.draft is not None
        return self.draft_plan.seconds(self.draft, num_tokens, self.depth)
