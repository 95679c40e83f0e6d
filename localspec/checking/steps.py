"""Whether every step of a replay drafts by the draft's law, and accepts as the rule says given those very drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localspec.checking.evidence import Bet, growth, moments
from localspec.drafters import Draft, DraftRequest, ModelDrafter
from localspec.sampling import Rule, verification_law

__all__ = ["STEP_SHIFTS", "Draws", "Outcomes", "StepBets", "WatchedDrafter"]

Floats = NDArray[np.float64]

STEP_SHIFTS = (
    "likely drafts",
    "drafts as early in the vocabulary as the one before",
    "accepted drafts",
    "accepted drafts early in the vocabulary",
)
"""In words, what the functions that ``StepBets`` bets on are large for.

Numbers that are used twice show where tokens are early in the vocabulary: draws go through the ids in order, so that
an early token was drawn by a small number. The same number draws another early token, and a small one accepts.
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


class Draws:
    """A token drawn from a law, and how early in the vocabulary it is: from 1, by the smallest numbers, to -1.

    Args:
        law: [n].
    """

    def __init__(self, law: Floats) -> None:
        self.law = law
        self.early: Floats = 1 - (2 * np.cumsum(law) - law)
        self._likely = Outcomes(law, (law,))
        self._alike = {side: Outcomes(law, (law, side * self.early)) for side in (-1, 1)}

    def settle(self, bets: Sequence[Bet], drawn: int, before: float | None) -> None:
        """Let ``drawn`` decide two bets: that likely tokens come, and ones as early or late as a token before.

        Without one, ``before`` is None, and there is no second bet.
        """
        if before:
            self._alike[1 if before > 0 else -1].settle(bets, drawn)
        else:
            self._likely.settle(bets[:1], drawn)


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
        q: Sequence[Draws],
        before: float | None,
    ) -> float | None:
        """Take the next step.

        Args:
            prefix: the text before it.
            drafted: γ tokens, at least one.
            num_accepted: of them.
            p: target laws after the prefix and 0, 1, …, γ of them.
            q: draft laws after 0, …, γ - 1 of them.
            before: what this method returned for the step before; None if there was none.

        Returns:
            How early in the vocabulary the first drafted token is; see ``Draws``.
        """
        if any(not draws.law[token] > 0 for draws, token in zip(q, drafted, strict=True)):
            self.impossible += 1
            return None
        early = [float(draws.early[token]) for draws, token in zip(q, drafted, strict=True)]
        for draws, token, other in zip(q, drafted, (before, *early), strict=False):
            draws.settle(self.bets[:2], token, other)
        key = prefix, drafted
        if key not in self._acceptance:
            probs, _ = verification_law(p, [draws.law for draws in q], drafted, self.rule)
            functions = np.arange(len(drafted) + 1) / 2, np.concatenate([[0.0], np.cumsum(early)])
            self._acceptance[key] = Outcomes(probs / probs.sum(), functions)
        if self._acceptance[key].law[num_accepted] > 0:
            self._acceptance[key].settle(self.bets[2:], num_accepted)
        else:
            self.impossible += 1
        return early[0]
