"""What is asked of the engine, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from localspec.errors import LocalspecError
from localspec.policy import FixedPolicy, Policy
from localspec.sampling import Rule, SamplingParams

__all__ = ["FinishReason", "Generation", "Request", "Stats", "Step", "StepTimes"]

FinishReason = Literal["stop", "length", "context"]
"""An end-of-generation token or a watcher's word; max_tokens reached; the context is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate.

    Attributes:
        prompt: token ids, at least one.
        params: how target laws are made.
        max_tokens: emit no more than this.
        seed: of the noise; the same seed gives the same draws.
        rule: how drafts are verified; both are exact.
        policy: how many tokens to draft; the default is none.
        draft_params: how draft laws are made; default ``params``.
        watch: called with every token in order; True ends the generation with that token.
        progress: called with the tokens read and the prompt's length while the prompt is read.
    """

    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    rule: Rule = "block"
    policy: Policy = field(default_factory=lambda: FixedPolicy(0))
    draft_params: SamplingParams | None = None
    watch: Callable[[int], bool] | None = None
    progress: Callable[[int, int], None] | None = None


@dataclass(slots=True)
class Stats:
    """What a generation did; only emitted tokens are counted. Times are seconds.

    Sequences that run together share passes, and the time of a pass counts for each of them.

    Attributes:
        prompt_tokens: length of the prompt.
        reused_tokens: of these, how many the target's cache still held.
        tokens: emitted.
        steps: target passes that emitted something.
        drafted: tokens drafted, up to where the generation ended.
        accepted: of these, how many were emitted.
        drafted_at: how often position 1, 2, … of a step was drafted.
        accepted_at: how often it was accepted.
        prefill_s: reading the prompt, in both models, up to the first token.
        draft_s: the drafter.
        verify_s: the target's passes.
        sampling_s: the verification rule.
        wall_s: from the first token to the last, all that surrounds the passes included, prefill excluded.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sampling_s: float = 0.0
    wall_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target pass."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second after the first, which belongs to reading the prompt."""
        return (self.tokens - 1) / self.wall_s if self.tokens > 1 and self.wall_s > 0 else 0.0

    def count(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Add one step."""
        self.steps += 1
        self.tokens += num_emitted
        self.drafted += num_drafted
        self.accepted += num_accepted
        while len(self.drafted_at) < num_drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(num_drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < num_accepted


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of a step that all sequences share; what the draft reads of prompts is not drafting."""

    read_s: float
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one step emitted for one sequence.

    Attributes:
        tokens: ids, at least one; none while a prompt is being read, or after an error.
        num_accepted: how many of the first of them were drafted; the rest, one or none, is the target's own.
        error: what went wrong with this sequence alone. The generation cannot go on.
    """

    tokens: Sequence[int]
    num_accepted: int
    error: LocalspecError | None = None


class Generation:
    """A running request: its history and statistics.

    Attributes:
        sequence: which sequence of the contexts it occupies.
        request: what was asked.
        history: prompt and emitted tokens.
        stats: counted so far.
        finish_reason: why it ended; None while it runs.
    """

    def __init__(self, sequence: int, request: Request, history: list[int]) -> None:
        self.sequence = sequence
        self.request = request
        self.history = history
        self.stats = Stats(prompt_tokens=len(history))
        self.finish_reason: FinishReason | None = None
        self.draft_prefill_s = 0.0
        self._draft_prefill_total_s = 0.0
        self._first_token_at: float | None = None

    @property
    def tokens(self) -> list[int]:
        """The ids emitted so far."""
        return self.history[self.stats.prompt_tokens :]

    def count_reading(self, times: StepTimes) -> None:
        """Add a pass that read a part of the prompt."""
        self.stats.prefill_s += times.read_s + times.verify_s

    def count(self, step: Step, num_drafted: int, times: StepTimes, sampling_s: float, now: float) -> None:
        """Add a step to the statistics; the pass that read the prompt counts as prefill."""
        stats = self.stats
        stats.count(num_drafted, step.num_accepted, len(step.tokens))
        if self._first_token_at is None:
            self._first_token_at = now
            stats.prefill_s += times.read_s + times.verify_s
        else:
            stats.draft_s += times.draft_s
            stats.verify_s += times.verify_s
        stats.prefill_s += self.draft_prefill_s
        self._draft_prefill_total_s += self.draft_prefill_s
        self.draft_prefill_s = 0.0
        stats.sampling_s += sampling_s
        stats.wall_s = now - self._first_token_at - self._draft_prefill_total_s
