"""What comes out of a generation: tokens as they are verified, text, and the finished answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from localspec.backend.vocabulary import Vocabulary
from localspec.errors import InvalidOptionError
from localspec.generation import FinishReason, Generation, Stats, Step
from localspec.policy import Policy
from localspec.text import IncrementalDecoder, StopStrings

__all__ = ["GenerationResult", "Stream", "TokenEvent", "Transcript"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        token: its id.
        text: what it adds to the text: nothing while a character or a stop string may still be incomplete, and
            then more than its own.
        drafted: whether the draft proposed it, rather than the target having the word.
        finish_reason: set on the last event: "stop", "length" or "context".
    """

    token: int
    text: str
    drafted: bool
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: the answer, without control tokens and stop strings.
        tokens: ids emitted, an end-of-generation token included.
        finish_reason: "stop" (end-of-generation token or stop string), "length" or "context".
        seed: gives the same draws again.
        stats: what it took.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Return what ``generate --json`` prints."""
        derived = {"tokens_per_s": self.stats.tokens_per_s, "tokens_per_step": self.stats.tokens_per_step}
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": asdict(self.stats) | derived,
        }


class Transcript:
    """Turns the tokens of a generation into text and watches for stop strings."""

    def __init__(self, vocabulary: Vocabulary, stop: Iterable[str]) -> None:
        self._vocabulary = vocabulary
        self._decoder = IncrementalDecoder()
        self._stops = StopStrings(stop)
        self.pending: list[str] = []  # text of the tokens not yet handed out

    def watch(self, token: int) -> bool:
        """Take the next token; return whether a stop string is complete."""
        ends = self._vocabulary.ends_generation(token)
        result = self._stops.feed("" if ends else self._decoder.feed(self._vocabulary.piece(token)))
        self.pending.append(result.text)
        return result.stopped

    def take(self, *, last: bool) -> list[str]:
        """Return the text of each token since the last call; at the end, what was held back goes to the last one."""
        if last:
            self.pending[-1] += self._stops.feed(self._decoder.flush()).text + self._stops.flush()
        taken, self.pending = self.pending, []
        return taken


class Stream(Iterator[TokenEvent]):
    """The tokens of one generation, as they are verified.

    A session can be asked for something else before a stream is exhausted; the stream cannot go on then.
    """

    def __init__(self, advance: Callable[[Generation], Step], generation: Generation, transcript: Transcript) -> None:
        self._advance = advance
        self._generation = generation
        self._transcript = transcript
        self._events: deque[TokenEvent] = deque()
        self._text: list[str] = []

    def __next__(self) -> TokenEvent:
        if not self._events:
            if self.finished:
                raise StopIteration
            self._step()
        return self._events.popleft()

    def _step(self) -> None:
        step = self._advance(self._generation)
        reason = self._generation.finish_reason
        texts = self._transcript.take(last=reason is not None)
        self._text += texts
        last = len(step.tokens) - 1
        for i, (token, text) in enumerate(zip(step.tokens, texts, strict=True)):
            self._events.append(TokenEvent(token, text, i < step.num_accepted, reason if i == last else None))

    @property
    def finished(self) -> bool:
        """Whether the generation has ended; events may still be waiting to be read."""
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs."""
        return self._generation.finish_reason

    @property
    def stats(self) -> Stats:
        """What it took so far."""
        return self._generation.stats

    @property
    def policy(self) -> Policy:
        """What decides how much to draft."""
        return self._generation.request.policy

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._generation.request.seed

    def result(self) -> GenerationResult:
        """Return the whole answer; raises InvalidOptionError before the end."""
        g = self._generation
        if g.finish_reason is None:
            raise InvalidOptionError("the generation is not finished; read the stream to its end first")
        return GenerationResult("".join(self._text), g.tokens, g.finish_reason, g.request.seed, g.stats)
