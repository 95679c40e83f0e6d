"""Models and drafters whose every number is known.

``MarkovModel`` is the law, ``FakeContext`` a model with a cache that follows it and refuses what llama.cpp would
refuse, ``ScriptedDrafter`` proposes what a test wants proposed, with the laws it was really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localspec.backend import Span
from localspec.drafters import Draft, DraftRequest
from localspec.errors import EvaluationError, RollbackError
from localspec.sampling import KeptIds, Law, SparseLaw

Prefix = Sequence[int]


class MarkovModel:
    """A model whose law depends on the last ``order`` tokens; what lies before the first one counts as token 0.

    Ids out of range count modulo V, so that drafters can go on after having proposed one.

    Args:
        laws: [V, V] for order 1, [V, V, V] for order 2; rows sum to 1.
    """

    def __init__(self, laws: ArrayLike) -> None:
        self.laws = np.asarray(laws, dtype=np.float64)
        self.order = self.laws.ndim - 1
        self.vocabulary_size = self.laws.shape[-1]
        with np.errstate(divide="ignore"):
            self._logits = np.log(self.laws).astype(np.float32)

    @classmethod
    def random(
        cls, seed: int, vocabulary_size: int = 5, *, order: int = 2, spread: float = 1.0, never: Iterable[int] = ()
    ) -> MarkovModel:
        """Return a model with logits of standard deviation ``spread`` that gives no token of ``never``."""
        logits = spread * np.random.default_rng(seed).standard_normal((vocabulary_size,) * (order + 1))
        logits[..., list(never)] = -np.inf
        weights = np.exp(logits)
        return cls(weights / weights.sum(-1, keepdims=True))

    def _at(self, prefix: Prefix) -> tuple[int, ...]:
        last = [0] * self.order + [token % self.vocabulary_size for token in prefix[-self.order :]]
        return tuple(last[-self.order :])

    def law(self, prefix: Prefix) -> NDArray[np.float64]:
        """Return the law of the token after ``prefix``, [V]."""
        return self.laws[self._at(prefix)]

    def logits(self, prefix: Prefix) -> NDArray[np.float32]:
        """Return its logits, float32 [V]."""
        return self._logits[self._at(prefix)]

    def greedy(self, prefix: Prefix) -> int:
        """Return the likeliest token after ``prefix``."""
        return int(self.logits(prefix).argmax())

    def greedy_path(self, prompt: Prefix, length: int) -> list[int]:
        """Return the first ``length`` tokens of greedy decoding."""
        history = list(prompt)
        for _ in range(length):
            history.append(self.greedy(history))
        return history[len(prompt) :]

    def joint(self, prompt: Prefix, length: int, *, end: int | None = None) -> dict[tuple[int, ...], float]:
        """Return the joint law of the next ``length`` tokens; nothing follows the token ``end``."""
        joint: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for path, weight in joint.items():
                if end is not None and path[-1:] == (end,):
                    longer[path] = weight
                    continue
                for token, prob in enumerate(self.law([*prompt, *path])):
                    if prob > 0:
                        longer[(*path, token)] = weight * float(prob)
            joint = longer
        return joint


@dataclass(slots=True)
class Failure:
    """Something that goes wrong in one pass of a ``FakeContext``.

    Attributes:
        at: number of the pass, from 1.
        error: what is raised, once.
        kept: how much of the pass's tokens is in the cache afterwards: an error from llama.cpp leaves none or
            some, an interrupt that arrives while the pass runs is raised when all are in.
    """

    at: int
    error: BaseException
    kept: Literal["none", "half", "all"] = "none"


class FakeContext:
    """A ``Context`` that follows a ``MarkovModel``, checks what is asked of it and counts.

    Args:
        model: the law.
        capacity: the most tokens of a sequence.
        num_sequences: how many sequences.
        chunk: tokens read in one go.
        failure: what goes wrong.
        rollback: "refused" raises on a partial truncation; "wrong" takes it, and goes on with a state that still
            knows the forgotten tokens, as a recurrent model would.
        spoil: tells by the prefix what a row is filled with instead of logits; None leaves it alone.
        kept: ids that it has logits for, by default all.
    """

    def __init__(
        self,
        model: MarkovModel,
        *,
        capacity: int = 64,
        num_sequences: int = 1,
        chunk: int = 4,
        failure: Failure | None = None,
        rollback: Literal["sound", "refused", "wrong"] = "sound",
        spoil: Callable[[Prefix], float | None] = lambda prefix: None,
        kept: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.kept_ids = None if kept is None else KeptIds(np.array(kept, np.int64), model.vocabulary_size)
        self.vocabulary_size = model.vocabulary_size if kept is None else len(kept)
        self.capacity = capacity
        self.num_sequences = num_sequences
        self.chunk = chunk
        self.failure = failure
        self.rollback = rollback
        self.spoil = spoil
        self.passes = 0
        self.rows = 0
        self.tokens_read = 0
        self.copied = 0
        self.held: list[list[int]] = [[] for _ in range(num_sequences)]
        self._scars: list[list[int]] = [[] for _ in range(num_sequences)]  # what a recurrent state has seen
        self._view = np.empty((0, self.vocabulary_size), np.float32)

    def length(self, sequence: int) -> int:
        assert 0 <= sequence < self.num_sequences, "no such sequence"
        return len(self.held[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        assert length >= 0, "a negative length"
        if self.length(sequence) <= length:
            return
        if length and self.rollback == "refused":
            raise RollbackError("this cache does not forget")
        if length == 0 or self.rollback == "sound":
            self._scars[sequence] = self.held[sequence][:length]
        del self.held[sequence][length:]

    def copy(self, source: int, sequence: int, length: int) -> None:
        assert source != sequence, "a copy to itself"
        assert 0 <= length <= self.length(source), "a copy of what is not there"
        self.truncate(sequence, 0)
        if length < self.length(source) and self.rollback == "refused":
            raise RollbackError("this cache does not copy parts")
        self.copied += length
        self.held[sequence] = self.held[source][:length]
        self._scars[sequence] = self._scars[source][:length]

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        self._check(batch)
        self.passes += 1
        failure = self.failure if self.failure and self.failure.at == self.passes else None
        rows = []
        for span in batch:
            kept = len(span.tokens)
            if failure:
                kept = {"none": 0, "half": kept // 2, "all": kept}[failure.kept]
            for i in range(kept):
                self.held[span.sequence].append(int(span.tokens[i]))
                self._scars[span.sequence].append(int(span.tokens[i]))
                if len(span.tokens) - span.rows <= i + span.padding < len(span.tokens):
                    rows.append(self._row(span.sequence))
            self.tokens_read += kept
        if failure:
            raise failure.error
        self._view.fill(np.nan)  # a view is valid until the next decode, and not after it
        self._view = np.array(rows, np.float32).reshape(len(rows), self.vocabulary_size)
        self.rows += len(rows)
        return self._view

    def _row(self, sequence: int) -> NDArray[np.float32]:
        prefix = self._scars[sequence] if self.rollback == "wrong" else self.held[sequence]
        spoiled = self.spoil(prefix)
        if spoiled is not None:
            return np.full(self.vocabulary_size, spoiled, np.float32)
        logits = self.model.logits(prefix)
        return logits if self.kept_ids is None else logits[self.kept_ids.ids]

    def _check(self, batch: Sequence[Span]) -> None:
        assert batch, "an empty batch"
        sequences = [span.sequence for span in batch]
        assert len(set(sequences)) == len(sequences), "a sequence twice in a batch"
        for span in batch:
            assert span.tokens, "a span without tokens"
            assert 0 <= span.rows <= len(span.tokens) - span.padding, "rows out of range"
            assert all(0 <= token < self.model.vocabulary_size for token in span.tokens), f"ids {span.tokens}"
            if self.length(span.sequence) + len(span.tokens) > self.capacity:
                raise EvaluationError(f"{span.tokens} exceed the context of {self.capacity}")


Script = Callable[[list[int], int], "tuple[int, Law] | None"]
"""From the tokens before a position and its number in the step (0, 1, …): the token and its law; None to stop."""


class ScriptedDrafter:
    """A ``Drafter`` that follows a script, and keeps to limits and plans as a real one does.

    Attributes:
        draws: how many tokens were drafted.
        kept: the last length ``keep`` was told, by sequence.
    """

    def __init__(self, script: Callable[[DraftRequest, list[int], int], tuple[int, Law] | None]) -> None:
        self._script = script
        self.draws = 0
        self.kept: dict[int, int] = {}

    def prefill(self, sequence: int, history: Sequence[int], *, limit: int) -> None:
        assert history

    def keep(self, sequence: int, length: int) -> None:
        self.kept[sequence] = length

    def copy(self, source: int, sequence: int, length: int) -> None:
        self.kept[sequence] = length

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Draft:
        assert request.limit >= 1
        draft = Draft()
        limit = min(request.limit, request.plan.limit)
        while len(draft.tokens) < limit and request.plan.runs():
            proposal = self._script(request, [*request.history, *draft.tokens], len(draft.tokens))
            if proposal is None or not request.plan.draws(lambda law=proposal[1]: law.confidence):
                break
            self.draws += 1
            draft.tokens.append(proposal[0])
            draft.laws.append(proposal[1])
        return draft


def scripted(token_at: Callable[[list[int], int], int]) -> ScriptedDrafter:
    """Return a drafter that surely proposes ``token_at(prefix, position)``: its laws are point masses."""

    def script(request: DraftRequest, prefix: list[int], position: int) -> tuple[int, Law]:
        token = token_at(prefix, position)
        return token, SparseLaw.point(token)

    return ScriptedDrafter(script)


def oracle(model: MarkovModel) -> ScriptedDrafter:
    """Propose what the target says at temperature 0."""
    return scripted(lambda prefix, position: model.greedy(prefix))


def always_wrong(model: MarkovModel) -> ScriptedDrafter:
    """Propose what the target does not say at temperature 0."""
    return first_right(model, 0)


def first_right(model: MarkovModel, num_right: int) -> ScriptedDrafter:
    """Propose the target's next ``num_right`` tokens, and wrong ones after them."""

    def token_at(prefix: list[int], position: int) -> int:
        shift = 0 if position < num_right else 1
        return (model.greedy(prefix) + shift) % model.vocabulary_size

    return scripted(token_at)


def token_at_offset(model: MarkovModel, offset: int, token: int) -> ScriptedDrafter:
    """Propose the target's tokens, save ``token`` (an end of generation, an id out of range) at one offset."""
    return scripted(lambda prefix, position: token if position == offset else model.greedy(prefix))


def drawing(law_of: Callable[[list[int]], Law]) -> ScriptedDrafter:
    """Propose tokens drawn from ``law_of(prefix)``, ids out of range included if that law has them."""

    def script(request: DraftRequest, prefix: list[int], position: int) -> tuple[int, Law]:
        law = law_of(prefix)
        return law.draw(request.noise.next()), law

    return ScriptedDrafter(script)
