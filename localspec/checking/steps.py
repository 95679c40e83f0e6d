"""Whether every step of a replay drafts by the draft's law, and accepts as the rule says given those very drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localspec.checking.evidence import Bet, growth, moments
from localspec.drafters import Draft, DraftRequest, ModelDrafter
from localspec.sampling import Rule, verification_law

__all__ = ["STEP_SHIFTS", "Outcomes", "StepBets", "WatchedDrafter"]

Floats = NDArray[np.float64]

STEP_SHIFTS = ("likely drafts", "accepted drafts", "accepted drafts early in the vocabulary")
"""In words, what the functions that ``StepBets`` bets on are large for.

Draft and acceptance that share random numbers show in the last: draws go through the ids in order, so that an early
token was drawn by a small number, and a small number accepts.
"""


class WatchedDrafter(ModelDrafter):
    """A ``ModelDrafter`` that keeps what it drafted.

    Attributes:
        drafted: by sequence, until ``forget``.
    """

    drafted: dict[int, tuple[int, ...]]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft, and keep it."""
        drafts = super().draft(requests)
        self.drafted = {r.sequence: tuple(d.tokens) for r, d in zip(requests, drafts, strict=True) if d.tokens}
        return drafts

    def forget(self) -> None:
        """Forget what was drafted."""
        self.drafted = {}


class Outcomes:
    """What can come of one draw, and what each outcome adds to a bet on each of some functions.

    Args:
        law: of the outcomes, [n].
        functions: f of every outcome, [n] each.
    """

    def __init__(self, law: Floats, functions: Sequence[Floats]) -> None:
        self.law = law
        self._grown = [growth(law, values) for values in functions]
        self._moments = [[moments(law, values, i) for i in range(len(law))] for values in functions]

    def settle(self, bets: Sequence[Bet], drawn: int) -> None:
        """Let outcome ``drawn`` decide one bet on each function."""
        for bet, grown, moment in zip(bets, self._grown, self._moments, strict=True):
            bet.settle(grown[drawn], *moment[drawn])


@dataclass(slots=True)
class StepBets:
    """Bets on the steps of one rule under one setting.

    Each drafted token has the law q of its place, given those before it; given all drafted tokens, the number
    accepted has the law of the rule, which was proved to be right. Both hold whatever came before, so these are fair
    bets, and they look at draft and verification together: the law of the text alone shows only what is left of a
    fault when tokens that gain and tokens that lose have been added up.

    Attributes:
        rule: "token" or "block".
        bets: one for each of ``STEP_SHIFTS``.
        impossible: how often something had probability 0.
    """

    rule: Rule
    bets: tuple[Bet, ...] = field(default_factory=lambda: tuple(Bet() for _ in STEP_SHIFTS))
    impossible: int = 0
    _acceptance: dict[tuple[tuple[int, ...], tuple[int, ...]], Outcomes] = field(default_factory=dict)

    def take(
        self,
        prefix: tuple[int, ...],
        drafted: tuple[int, ...],
        num_accepted: int,
        p: Sequence[Floats],
        q: Sequence[Outcomes],
    ) -> None:
        """Take the next step.

        Args:
            prefix: the text before it.
            drafted: γ tokens.
            num_accepted: of them.
            p: target laws after the prefix and 0, 1, …, γ of them.
            q: draft laws after 0, …, γ - 1 of them, each with a function to bet on.
        """
        key = prefix, drafted
        if key not in self._acceptance:
            if any(not outcomes.law[token] > 0 for outcomes, token in zip(q, drafted, strict=True)):
                self.impossible += 1
                return
            self._acceptance[key] = _acceptance(self.rule, drafted, p, [outcomes.law for outcomes in q])
        for outcomes, token in zip(q, drafted, strict=True):
            outcomes.settle(self.bets[:1], token)
        accepted = self._acceptance[key]
        if accepted.law[num_accepted] > 0:
            accepted.settle(self.bets[1:], num_accepted)
        else:
            self.impossible += 1


def _acceptance(rule: Rule, drafted: Sequence[int], p: Sequence[Floats], q: Sequence[Floats]) -> Outcomes:
    probs, _ = verification_law(p, q, drafted, rule)
    # From 1 for what the smallest numbers draw to -1 for what the largest do.
    early = [1 - (2 * law[:token].sum() + law[token]) for law, token in zip(q, drafted, strict=True)]
    count = np.arange(len(drafted) + 1)
    return Outcomes(probs / probs.sum(), (count / 2, np.concatenate([[0.0], np.cumsum(early)])))
