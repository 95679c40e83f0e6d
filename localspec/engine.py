"""Speculative decoding: draft, verify, accept, over a set of sequences.

One step of one sequence, with ``history`` its tokens so far, the last of them not yet evaluated:

    draft    X_1..X_γ drawn from q_1..q_γ                   (drafter; γ = 0 is plain decoding)
    verify   p_1..p_{γ+1} from one pass over history[-1], X_1..X_γ
    accept   the longest prefix the exact rule lets stand, and one token more
    forget   what both caches hold past it, when the next step begins

Sequences share passes: every step drafts for all of them together and verifies all of them in one batch. A prompt is
read along with the others' steps, a chunk at a time; what any sequence has read of it is copied, not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.drafters import Draft, Drafter, DraftRequest, chunk_size, read_ahead
from localspec.errors import ContextOverflowError, InvalidLogitsError, InvalidOptionError, RollbackError
from localspec.generation import Generation, Request, Step, StepTimes
from localspec.policy import EXPECTED_TOKENS, StepOutcome
from localspec.sampling import (
    Law,
    RecentTokens,
    SamplingParams,
    StepNoise,
    Stream,
    Verification,
    make_law,
    verify_coupled,
    verify_laws,
)
from localspec.wording import counted, shown

__all__ = ["Engine", "common_prefix"]


class Engine:
    """Runs generations on a target and, optionally, a drafter.

    Args:
        target: the model whose law the output follows.
        drafter: proposes tokens; without one decoding is plain.
        ends_generation: tells the ids that end a generation; such an id is emitted, and nothing after it.
    """

    def __init__(self, target: Context, drafter: Drafter | None, *, ends_generation: Callable[[int], bool]) -> None:
        self.target = target
        self.drafter = drafter
        self._ends_generation = ends_generation
        self._held: dict[int, list[int]] = {}  # by sequence: what the caches hold a prefix of

    def start(self, request: Request, sequence: int = 0) -> Generation:
        """Begin a generation in ``sequence``, keeping what the caches already hold of its prompt.

        If another sequence holds more of it, that is copied.

        Raises:
            ContextOverflowError: the prompt leaves no room for a token.
            InvalidOptionError: the prompt is empty, max_tokens is below 1, a bias or ban names an unknown token, or
                there is no such sequence.
        """
        if not 0 <= sequence < self.target.num_sequences:
            raise InvalidOptionError(f"sequence is {sequence}; use one from 0 to {self.target.num_sequences - 1}")
        prompt = list(request.prompt)
        if not prompt:
            raise InvalidOptionError("the prompt is empty; give at least one token")
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise InvalidOptionError(f"max_tokens is {shown(request.max_tokens)}; use a whole number from 1")
        request.params.check_ids(self.target.vocabulary_size)
        if len(prompt) >= self.target.capacity:
            raise ContextOverflowError(
                f"the prompt has {counted(len(prompt), 'token')} and the context holds {self.target.capacity}, one"
                " of them for the answer; shorten the prompt, or use a larger --ctx"
            )
        self._reuse(sequence, prompt)
        generation = Generation(sequence, request, prompt)
        generation.stats.reused_tokens = self.target.length(sequence)
        self._held[sequence] = generation.history
        return generation

    def held(self, prompt: Sequence[int], sequence: int) -> int:
        """Return how many of a prompt's tokens ``sequence`` has read, the last one not counted."""
        # A history's last token is never in the caches, and the prompt's last is read again for its logits.
        shared = common_prefix(self._held.get(sequence, [])[:-1], prompt[:-1])
        return min(shared, self.target.length(sequence))

    def release(self, sequence: int) -> None:
        """Empty a sequence; a generation in it cannot go on."""
        self._forget(sequence, 0)
        self._held.pop(sequence, None)

    def clear(self) -> None:
        """Empty all sequences; generations that run cannot go on."""
        for sequence in range(self.target.num_sequences):
            self.release(sequence)

    def step(self, generations: Sequence[Generation], *, together: bool | None = None) -> list[Step]:
        """Advance every generation, none of them finished, by one step.

        Args:
            generations: which.
            together: whether nobody shall wait for another one; default whether there are several. Then one step
                reads a chunk of prompts, and the step of a generation that has not come to the end of its prompt has
                no tokens; and what goes wrong with one is the error of its step, and the others' steps stand.
                Otherwise prompts are read at once, by the draft after the first token.

        Raises:
            InvalidLogitsError: no law can be made of the target's logits, if not together.
            EvaluationError: a pass failed; the same step can be tried again.
            RollbackError: a cache cannot forget what was drafted.
            InvalidOptionError: the sequence of a generation has been given to a later one.
        """
        together = len(generations) > 1 if together is None else together
        started = perf_counter()
        for g in generations:
            if self._held.get(g.sequence) is not g.history:
                raise InvalidOptionError(
                    f"sequence {g.sequence} was given to another generation; this one cannot go on, start it again"
                )
            # Past this stand rejected drafts, and whatever a failure or an interrupt left behind.
            self._forget(g.sequence, len(g.history) - 1)
        if not together:
            self._read_prompts(generations)
        read = perf_counter()
        before_s = sum(g.draft_prefill_s for g in generations)
        drafts = self._draft(generations, together)
        drafted = perf_counter()
        spans = self._spans(generations, drafts, together)
        logits = self.target.decode(spans)
        verified = perf_counter()
        draft_s = drafted - read - (sum(g.draft_prefill_s for g in generations) - before_s)
        times = StepTimes(read - started, draft_s, verified - drafted)
        ends = np.cumsum([span.rows for span in spans])
        rows = np.split(logits, ends[:-1])
        return [self._accept(g, d, r, times, together) for g, d, r in zip(generations, drafts, rows, strict=True)]

    def _reuse(self, sequence: int, prompt: list[int]) -> None:
        """Leave in ``sequence`` as much of a prompt as any sequence holds."""
        held = {s: self.held(prompt, s) for s in (sequence, *self._held)}
        source = max(held, key=held.__getitem__)
        try:
            if source == sequence:
                self._forget(sequence, held[sequence])
            else:
                self._forget(sequence, 0)
                self.target.copy(source, sequence, held[source])
                if self.drafter is not None:
                    self.drafter.copy(source, sequence, held[source])
        except RollbackError:
            self._forget(sequence, 0)  # what cannot be cut can still be emptied, and plain decoding needs no more

    def _read_prompts(self, generations: Sequence[Generation]) -> None:
        for g in generations:
            # The last chunk of a prompt is left to the common pass, which yields the first token.
            ahead = len(g.history) - chunk_size(self.target, g.request.progress)
            if ahead > self.target.length(g.sequence):
                read_ahead(self.target, g.sequence, g.history[:ahead], g.request.progress)

    def _spans(self, generations: Sequence[Generation], drafts: Sequence[Draft], together: bool) -> list[Span]:
        """Return the common pass: drafts, and what sequences lack before them, of prompts what a chunk holds."""
        spans = []
        room = self.target.chunk - sum(1 + len(draft.tokens) for draft in drafts)
        for g, draft in zip(generations, drafts, strict=True):
            lacking = g.history[self.target.length(g.sequence) :]
            part = lacking[: 1 + max(0, room)] if together else lacking
            room -= len(part) - 1
            drafted = self._evaluable(draft.tokens)
            rows = len(drafted) + 1 if len(part) == len(lacking) else 0
            spans.append(Span(g.sequence, [*part, *drafted], rows))
        return spans

    def _draft(self, generations: Sequence[Generation], together: bool) -> list[Draft]:
        drafts = [Draft() for _ in generations]
        if self.drafter is None:
            return drafts
        requests: dict[int, DraftRequest] = {}
        for i, g in enumerate(generations):
            reading = g.stats.steps == 0
            # The first token does not wait for the draft to read the prompt, whatever the caches hold; unless others
            # would when drafting begins: then the draft reads along, a chunk at a time.
            if (reading and not together) or (request := self._draft_request(g)) is None:
                continue
            if reading:
                started = perf_counter()
                self.drafter.prefill(g.sequence, g.history, limit=self.target.chunk)
                g.draft_prefill_s += perf_counter() - started
            else:
                requests[i] = request
        if not requests:
            return drafts
        for i, draft in zip(requests, self.drafter.draft(list(requests.values())), strict=True):
            generations[i].draft_prefill_s += draft.prefill_s
            end = len(self._evaluable(draft.tokens)) + 1
            drafts[i] = Draft(draft.tokens[:end], draft.laws[:end])
        return drafts

    def _draft_request(self, g: Generation) -> DraftRequest | None:
        depth = len(g.history)
        room = min(g.request.max_tokens - g.stats.tokens, self.target.capacity - depth) - 1
        plan = g.request.policy.plan(depth)
        limit = min(max(plan.limit, plan.lookup_limit), room)
        if limit < 1:
            return None
        params = g.request.draft_params or g.request.params
        noise = StepNoise(g.request.seed, depth, Stream.DRAFT)
        coupled_seed = g.request.seed if g.request.rule == "coupled" else None
        return DraftRequest(
            g.sequence,
            g.history,
            limit,
            plan,
            params,
            noise,
            coupled_seed=coupled_seed,
            prompt_length=g.stats.prompt_tokens,
            # What has gone on for long goes on: as much again as there is.
            num_expected=min(room + 1, max(EXPECTED_TOKENS, g.stats.tokens)),
            progress=g.request.progress,
        )

    def _evaluable(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first one the target does not have.

        Such a token has probability 0: the rule rejects it, and needs no row for what would follow.
        """
        size = self.target.vocabulary_size
        return list(takewhile(lambda token: 0 <= token < size, tokens))

    def _accept(
        self, g: Generation, draft: Draft, logits: NDArray[np.float32], times: StepTimes, together: bool
    ) -> Step:
        if len(logits) == 0:
            g.count_reading(times)
            return Step([], 0)
        started = perf_counter()
        depth = len(g.history)
        try:
            verification = self._verify(g, draft, logits)
        except InvalidLogitsError as error:
            if not together:
                raise
            return Step([], 0, error)
        emitted = self._emit(g, [*draft.tokens[: verification.num_accepted], verification.next_token])
        num_accepted = min(verification.num_accepted, len(emitted))
        # What was drafted past an end is no evidence about the draft.
        num_drafted = min(len(draft.tokens), len(emitted)) if g.finish_reason == "stop" else len(draft.tokens)
        now = perf_counter()
        prefill_s = g.draft_prefill_s
        g.count(Step(emitted, num_accepted), num_drafted, times, now - started, now)
        if g.stats.steps > 1:  # the first pass read the prompt, and says nothing about decoding
            g.request.policy.observe(
                StepOutcome(
                    num_drafted=num_drafted,
                    num_accepted=num_accepted,
                    num_emitted=len(emitted),
                    depth=depth,
                    draft_s=times.draft_s,
                    verify_s=times.verify_s,
                    sampling_s=now - started,
                    prefill_s=prefill_s,
                )
            )
        return Step(emitted, num_accepted)

    def _verify(self, g: Generation, draft: Draft, logits: NDArray[np.float32]) -> Verification:
        request, depth = g.request, len(g.history)
        laws = _Laws(logits, request.params, g.history, draft.tokens)
        if request.rule == "coupled":
            return verify_coupled(laws, draft.tokens, seed=request.seed, position=depth)
        # Where the target's laws are point masses both rules are the same, and the token rule needs no residuals.
        rule = "token" if request.params.greedy else request.rule
        noise = StepNoise(request.seed, depth, Stream.VERIFY)
        return verify_laws(laws, draft.laws, draft.tokens, rule=rule, uniforms=noise)

    def _emit(self, g: Generation, tokens: list[int]) -> list[int]:
        for i, token in enumerate(tokens):
            num_emitted = g.stats.tokens + i + 1
            watched = g.request.watch is not None and g.request.watch(token)
            if self._ends_generation(token) or watched:
                g.finish_reason = "stop"
            elif num_emitted == g.request.max_tokens:
                g.finish_reason = "length"
            elif len(g.history) + i + 1 == self.target.capacity:
                g.finish_reason = "context"
            if g.finish_reason:
                tokens = tokens[: i + 1]
                break
        # Only now, so that a watcher that raises leaves history and statistics in agreement.
        g.history += tokens
        return tokens

    def _forget(self, sequence: int, length: int) -> None:
        """Drop what both caches hold past ``length`` tokens."""
        self.target.truncate(sequence, length)
        if self.drafter is not None:
            self.drafter.keep(sequence, length)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Laws(Sequence[Law]):
    """The target's laws, each made when the rule first asks for it."""

    def __init__(
        self, logits: NDArray[np.float32], params: SamplingParams, history: Sequence[int], drafted: Sequence[int]
    ) -> None:
        self._logits = logits
        self._params = params
        self._recent = RecentTokens(params, history)
        self._drafted = drafted
        self._laws: dict[int, Law] = {}

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, index: int) -> Law:  # type: ignore[override]  # slices are not asked for
        if index not in self._laws:
            recent = self._recent.then(self._drafted[:index])
            self._laws[index] = make_law(self._logits[index], self._params, recent)
        return self._laws[index]
