"""Where drafts come from: tokens, and the laws they were really drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.errors import InvalidLogitsError
from localspec.policy import EXPECTED_TOKENS, DraftPlan
from localspec.sampling import Ids, Law, PositionNoise, RecentTokens, SamplingParams, StepNoise, make_law

Row = NDArray[np.float32]
Progress = Callable[[int, int], None]

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "ModelDrafter",
    "chunk_size",
    "draft_confidence",
    "ids_with_logits",
    "law_maker",
    "read_ahead",
    "shared_width",
]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one sequence asks of a drafter.

    Attributes:
        sequence: its number.
        history: all its tokens, the last one not yet evaluated by the target.
        limit: the most tokens there is room for, at least 1.
        plan: decides how many, token by token.
        params: how draft laws are made.
        noise: where the draws come from.
        coupled_seed: under the coupled rule, the seed of the noise that target and draft share.
        prompt_length: of the first tokens of the history; the time to read these is not the step's.
        num_expected: tokens that may be expected to follow.
        progress: called as by ``read_ahead`` while a draft reads a prompt, and may raise.
    """

    sequence: int
    history: Sequence[int]
    limit: int
    plan: DraftPlan
    params: SamplingParams
    noise: StepNoise
    coupled_seed: int | None = None
    prompt_length: int = 0
    num_expected: int = EXPECTED_TOKENS
    progress: Progress | None = None

    def draw(self, law: Law, index: int) -> int:
        """Return a token drawn from ``law``, to be the step's drafted token number ``index``, from 0."""
        if self.coupled_seed is None:
            return law.draw(self.noise.next())
        return law.race(PositionNoise(self.coupled_seed, len(self.history) + index))


@dataclass(slots=True)
class Draft:
    """Drafted tokens and, for each, the law it was drawn from; ``prefill_s`` is the time it took to read a prompt."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    prefill_s: float = field(default=0.0, compare=False)


class Drafter(Protocol):
    """Proposes continuations."""

    def prefill(self, sequence: int, history: Sequence[int], *, limit: int) -> None:
        """Read of a prompt what is lacking, but for the last token, and no more than ``limit`` tokens now."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, drafting all sequences together."""

    def keep(self, sequence: int, length: int) -> None:
        """Forget everything past the first ``length`` tokens of a sequence."""

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Let ``sequence``, which is emptied, know what ``source`` knows of its first ``length`` tokens.

        Raises:
            RollbackError: as ``Context.copy``.
        """


def read_ahead(context: Context, sequence: int, tokens: Sequence[int], progress: Progress | None = None) -> None:
    """Evaluate what ``context`` lacks of ``tokens``, a chunk at a time so that an interrupt is noticed.

    Args:
        context: the model.
        sequence: which sequence.
        tokens: what the cache shall hold afterwards; what it holds already must be a prefix.
        progress: called with the tokens held and wanted after each chunk.
    """
    chunk = chunk_size(context, progress)
    while (held := context.length(sequence)) < len(tokens):
        context.decode([Span(sequence, tokens[held : held + chunk], 0)])
        if progress:
            progress(min(held + chunk, len(tokens)), len(tokens))


def chunk_size(context: Context, progress: Progress | None) -> int:
    """Return how many tokens to read in one go.

    Who watches may want to interrupt: a quarter of a chunk takes a quarter of the time, and reading as a whole a
    tenth more (1.5B Q4_K_M on one core: 89 tokens/s by 128, 80 by 32).
    """
    return context.chunk if progress is None else max(1, context.chunk // 4)


def law_maker(context: Context) -> Callable[[Row, SamplingParams, Sequence[int] | Ids], Law]:
    """Return what makes laws over ids of rows that ``context`` gave: ``make_law``, or the same by kept ids."""
    return make_law if context.kept_ids is None else context.kept_ids.make_law


def shared_width(context: Context, vocabulary_size: int) -> int:
    """Return how many columns of a row of ``context`` are of ids below ``vocabulary_size``; those come first."""
    kept = context.kept_ids
    return min(vocabulary_size, context.vocabulary_size) if kept is None else kept.columns_below(vocabulary_size)


def ids_with_logits(context: Context) -> Sequence[int]:
    """Return the ids that ``context`` has logits for: it drafts no others, and may read others at a higher price."""
    return range(context.vocabulary_size) if context.kept_ids is None else context.kept_ids.ids.tolist()


def draft_confidence(row: Row, law: Law, params: SamplingParams) -> float:
    """Return the largest probability of a draft law; for a greedy one, of what ``row`` says at temperature 1."""
    return make_law(row, SamplingParams()).confidence if params.greedy else law.confidence


_RIDES_ALONG = 2  # tokens that the first pass of a draft reads without being dearer for it


class ModelDrafter:
    """Drafts with a small model.

    Args:
        context: the draft model; it must hold as many tokens and sequences as the target's.
        vocabulary_size: ids that the target knows; the draft is kept from proposing others.
        ends_generation: tells the ids after which nothing follows.
    """

    def __init__(self, context: Context, *, vocabulary_size: int, ends_generation: Callable[[int], bool]) -> None:
        self.context = context
        self._width = shared_width(context, vocabulary_size)
        self._make_law = law_maker(context)
        self._ends_generation = ends_generation

    def prefill(self, sequence: int, history: Sequence[int], *, limit: int) -> None:
        """Read a part of a prompt, unless so little is lacking that the first draft pass takes it along."""
        held = self.context.length(sequence)
        if len(history) - held > _RIDES_ALONG:
            read_ahead(self.context, sequence, history[: min(len(history) - 1, held + limit)])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft one token for all sequences that want one, then the next, until none does."""
        drafts = [Draft() for _ in requests]
        active = [(r, d, RecentTokens(r.params, r.history)) for r, d in zip(requests, drafts, strict=True)]
        while active := [entry for entry in active if self._goes_on(entry[0], entry[1])]:
            rows = self.context.decode([Span(r.sequence, self._missing(r, d), 1) for r, d, _ in active])
            active = [entry for entry, row in zip(active, rows, strict=True) if self._draw(*entry, row)]
        return drafts

    def keep(self, sequence: int, length: int) -> None:
        """Truncate the draft's cache."""
        self.context.truncate(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Copy what the draft's cache holds of it."""
        self.context.copy(source, sequence, min(length, self.context.length(source)))

    def _goes_on(self, request: DraftRequest, draft: Draft) -> bool:
        if len(draft.tokens) >= min(request.limit, request.plan.limit):
            return False
        if draft.tokens:
            return request.plan.runs()
        history, held = request.history, self.context.length(request.sequence)
        unread = max(0, request.prompt_length - held)
        if not request.plan.runs(len(history) - held - unread, unread, request.num_expected):
            return False
        if len(history) - held > _RIDES_ALONG:
            # A prompt is read once, and no matter of this step.
            started = perf_counter()
            read_ahead(self.context, request.sequence, history[: request.prompt_length], request.progress)
            draft.prefill_s = perf_counter() - started
            # What was written without drafts comes on top, but for what one pass can take.
            read_ahead(self.context, request.sequence, history[: -self.context.chunk])
        return True

    def _missing(self, request: DraftRequest, draft: Draft) -> list[int]:
        held = self.context.length(request.sequence)
        past = len(request.history)
        return [*request.history[held:], *draft.tokens[max(0, held - past) :]]

    def _draw(self, request: DraftRequest, draft: Draft, recent: RecentTokens, row: Row) -> bool:
        """Extend ``draft`` by a token drawn from ``row``; return whether another may follow."""
        try:
            law = self._make_law(row[: self._width], request.params, recent.then(draft.tokens))
        except InvalidLogitsError:
            return False  # the target's rows decide what becomes of the step
        if not request.plan.draws(lambda: draft_confidence(row[: self._width], law, request.params)):
            return False
        token = request.draw(law, len(draft.tokens))
        draft.tokens.append(token)
        draft.laws.append(law)
        return not self._ends_generation(token)
