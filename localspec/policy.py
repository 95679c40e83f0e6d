"""How many tokens to draft next.

A policy may look at everything drawn so far and at the draft law of the next position, never at a token it then
throws away: a drawn token is always verified, or the output would not follow the target's law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localspec.errors import InvalidOptionError
from localspec.wording import shown

__all__ = [
    "EXPECTED_TOKENS",
    "MAX_DRAFT_TOKENS",
    "DraftPlan",
    "FixedPolicy",
    "Policy",
    "StepOutcome",
    "check_num_draft_tokens",
]

MAX_DRAFT_TOKENS = 64
"""More than any measured curve rewards; a guard against slips of the keyboard."""

EXPECTED_TOKENS = 128
"""Of an answer of which nothing is known."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one decoding step of one sequence did.

    Attributes:
        num_drafted: tokens drafted.
        num_accepted: of these, how many stand.
        num_emitted: tokens emitted, the recovered or bonus token included; of several sequences their mean.
        depth: tokens in the target's cache when the step began.
        draft_s: seconds in the drafter, without what it took the draft to read a prompt.
        verify_s: seconds in the target's pass.
        sampling_s: seconds in the verification rule.
        prefill_s: seconds in which the draft read a prompt: once, and no matter of this step's length.
    """

    num_drafted: int
    num_accepted: int
    num_emitted: float
    depth: int
    draft_s: float
    verify_s: float
    sampling_s: float
    prefill_s: float = 0.0


class DraftPlan(Protocol):
    """The decisions of one step of one sequence."""

    @property
    def limit(self) -> int:
        """The most tokens to draft with a model; 0 leaves it alone."""

    @property
    def lookup_limit(self) -> int:
        """The most tokens to copy from earlier text; 0 does not look for any."""

    def copies(self, chances: Sequence[float]) -> int:
        """Return how many tokens to copy, at most as many as ``chances``; 0 leaves the step to the model.

        ``chances`` has, for each token that followed the match, the chance that it is accepted if those before are.
        """

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = EXPECTED_TOKENS) -> bool:
        """Whether to run the draft forward for one more law.

        ``num_lacking`` tokens have to be read for it: one, or two after a step whose drafts all stood, or many where
        steps before did not run the draft; and before these ``num_unread`` tokens of the prompt. The time of that has
        to be won back in the ``num_expected`` tokens that may follow.
        """

    def draws(self, confidence: Callable[[], float]) -> bool:
        """Whether to draw from that law; ``confidence`` returns its largest probability.

        A greedy draft's law is a point mass and says nothing: its confidence is that of the law at temperature 1.
        """


class Policy(Protocol):
    """Plans steps, and learns from what came of them; one object serves one generation."""

    def plan(self, depth: int) -> DraftPlan:
        """Return the plan of the next step, with ``depth`` tokens in the target's cache."""

    def observe(self, outcome: StepOutcome) -> None:
        """Take note of a finished step; the pass that read the prompt is not one."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Draft the same number of tokens in every step.

    Attributes:
        limit: tokens drafted with a model.
        lookup_limit: tokens copied wherever the text repeats itself, in place of the model's.

    Raises:
        InvalidOptionError: a number is not between 0 and MAX_DRAFT_TOKENS.
    """

    limit: int
    lookup_limit: int = 0

    def __post_init__(self) -> None:
        check_num_draft_tokens(self.limit)
        check_num_draft_tokens(self.lookup_limit)

    def plan(self, depth: int) -> DraftPlan:
        """Return itself: every step is alike."""
        return self

    def observe(self, outcome: StepOutcome) -> None:
        """Ignore the outcome."""

    def copies(self, chances: Sequence[float]) -> int:
        """Return all there are."""
        return len(chances)

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = EXPECTED_TOKENS) -> bool:
        """Return True."""
        return True

    def draws(self, confidence: Callable[[], float]) -> bool:
        """Return True."""
        return True


def check_num_draft_tokens(value: object) -> int:
    """Return ``value`` if it is a usable draft length, else raise InvalidOptionError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DRAFT_TOKENS:
        return value
    raise InvalidOptionError(
        f"the number of draft tokens is {shown(value)}; use a whole number from 0 (do not speculate) to"
        f" {MAX_DRAFT_TOKENS}"
    )
