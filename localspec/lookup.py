"""Drafts copied from the text itself: what followed when its end occurred before.

A copied token is a function of the history, so its law is a point mass, and the target accepts it with the
probability it gives it. Nothing is evaluated to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from localspec.averages import ForgettingRatio
from localspec.drafters import Draft, DraftRequest, ModelDrafter
from localspec.sampling import SparseLaw

__all__ = ["LookupDrafter", "LookupOrModel", "Match", "MatchRecord", "Repeats"]

_TRIED = 32  # earlier occurrences of the last two tokens that are compared, the latest first
_LONGEST = 32  # tokens compared: what matches longer is as sure


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the end of a text.

    Attributes:
        source: where it ends: the position of the token that followed.
        length: how many tokens are the same, from 2.
    """

    source: int
    length: int


class Repeats:
    """The tokens of one sequence, and where each pair of neighbours occurred before.

    Adding a token and taking one back cost the same however long the text is; so does looking where nothing matches.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # a pair: the position behind its latest occurrence
        self._before: list[int] = []  # by position: the same of the occurrence before that; 0 where there is none
        self._distance = 0  # between the end of the text and the match last returned

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            end = len(self.tokens) + 1
            earlier = 0
            if end > 1:
                pair = (self.tokens[-1], token)
                earlier = self._latest.get(pair, 0)
                self._latest[pair] = end
            self.tokens.append(token)
            self._before.append(earlier)

    def cut(self, length: int) -> None:
        """Take back all but the first ``length`` tokens."""
        while len(self.tokens) > max(1, length):
            pair = (self.tokens[-2], self.tokens[-1])
            earlier = self._before.pop()
            if earlier:
                self._latest[pair] = earlier
            else:
                del self._latest[pair]
            self.tokens.pop()
        del self.tokens[length:], self._before[length:]

    def match(self) -> Match | None:
        """Return the longest match of the end; among equals the one that the last match leads to, or the latest."""
        best: Match | None = None
        for source in self._candidates():
            length = self._common(source)
            if length >= 2 and (best is None or length > best.length):
                best = Match(source, length)
                if length == _LONGEST:
                    break
        if best is not None:
            self._distance = len(self.tokens) - best.source
        return best

    def _candidates(self) -> Iterator[int]:
        source = self._before[-1] if self._before else 0
        if not source:
            return
        if 0 < self._distance < len(self.tokens):
            yield len(self.tokens) - self._distance
        for _ in range(_TRIED):
            yield source
            source = self._before[source - 1]
            if not source:
                return

    def _common(self, source: int) -> int:
        tokens, end = self.tokens, len(self.tokens)
        most = min(source, _LONGEST)
        length = 0
        while length < most and tokens[source - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def following(self, match: Match, count: int) -> list[int]:
        """Return ``count`` tokens from the match on; where the text ends they go on as it repeats itself."""
        found = self.tokens[match.source : match.source + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return found


class MatchRecord:
    """How often the token after a match was the next one, by the length of the match."""

    def __init__(self) -> None:
        self._rates = [_rate(prior) for prior in _PRIORS]

    def renew(self) -> None:
        """Begin another text: half of what was learned of earlier ones is believed, and soon outweighed.

        Texts differ more than lengths of match do: an edited file is copied line by line, and in prose what matched
        four tokens is mostly chance.
        """
        self._rates = [_rate((rate.value + prior) / 2) for rate, prior in zip(self._rates, _PRIORS, strict=True)]

    def add(self, length: int, right: bool) -> None:
        """Take note of one."""
        self._rates[_BUCKETS[min(length, _LONGEST)]].add(float(right), 1.0)

    def chances(self, length: int, count: int) -> list[float]:
        """Return the chance of each of ``count`` tokens after a match, given that those before it were right."""
        rates = [rate.value for rate in self._rates]
        return [rates[_BUCKETS[min(length + i, _LONGEST)]] for i in range(count)]


_STARTS = (2, 3, 4, 6, 8, 12, 16, 24)  # lengths of match that count as alike begin here
_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_WEIGHT = 4.0  # of what is believed beforehand, in tokens seen
_BUCKETS = [max(0, sum(start <= length for start in _STARTS) - 1) for length in range(_LONGEST + 1)]


def _rate(believed: float) -> ForgettingRatio:
    return ForgettingRatio(_WEIGHT * believed, _WEIGHT, keep=0.98)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A match that was looked at, ``position`` tokens into the text."""

    position: int
    match: Match


class LookupDrafter:
    """Copies what followed the longest match of the text's end, in the prompt or in what was emitted.

    Each token after a match that was looked at tells, verified or not, whether copying would have been right; the
    emitted token is the copied one exactly where the rule would have accepted it. So the record costs nothing and
    does not depend on what is drafted.

    Args:
        ends_generation: tells the ids after which nothing follows.
    """

    def __init__(self, *, ends_generation: Callable[[int], bool]) -> None:
        self.record = MatchRecord()
        self._ends_generation = ends_generation
        self._texts: dict[int, Repeats] = {}
        self._asked: dict[int, _Asked] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request: empty where nothing matches, or too little."""
        return [self._one(request) for request in requests]

    def prefill(self, sequence: int, history: Sequence[int], *, limit: int) -> None:
        """Do nothing: a text is read when it is asked about."""

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Do nothing, likewise."""

    def keep(self, sequence: int, length: int) -> None:
        """Forget everything past the first ``length`` tokens; where that is more than the last one, a text begins."""
        if sequence in self._texts:
            if len(self._texts[sequence].tokens) > length + 1:
                self.record.renew()
            self._change(sequence, lambda text: text.cut(length))
            if sequence in self._asked and self._asked[sequence].position > length:
                del self._asked[sequence]

    def _one(self, request: DraftRequest) -> Draft:
        limit = min(request.limit, request.plan.lookup_limit)
        if limit < 1:
            return Draft()
        text = self._texts.setdefault(request.sequence, Repeats())
        self._change(request.sequence, lambda text: text.extend(request.history[len(text.tokens) :]))
        self._learn(text, self._asked.pop(request.sequence, None))
        match = text.match()
        if match is None:
            return Draft()
        self._asked[request.sequence] = _Asked(len(text.tokens), match)
        count = request.plan.copies(self.record.chances(match.length, limit))
        tokens = []
        for token in text.following(match, count):
            tokens.append(token)
            if self._ends_generation(token):
                break
        return Draft(tokens, [SparseLaw.point(token) for token in tokens])

    def _change(self, sequence: int, change: Callable[[Repeats], None]) -> None:
        """Change a text; one that an interrupt leaves half changed is forgotten, and later read anew."""
        try:
            change(self._texts[sequence])
        except BaseException:
            del self._texts[sequence]
            self._asked.pop(sequence, None)
            raise

    def _learn(self, text: Repeats, asked: _Asked | None) -> None:
        if asked is None:
            return
        for i, token in enumerate(text.tokens[asked.position :]):
            right = text.tokens[asked.match.source + i] == token
            self.record.add(asked.match.length + i, right)
            if not right:
                return


class LookupOrModel:
    """Copies for the sequences whose plan says so, and drafts for the others with a model.

    Args:
        lookup: tried first: it takes no time.
        model: for the rest.
    """

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter) -> None:
        self.lookup = lookup
        self.model = model

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request."""
        drafts = self.lookup.draft(requests)
        rest = [i for i, request in enumerate(requests) if request.plan.limit and not drafts[i].tokens]
        for i, draft in zip(rest, self.model.draft([requests[i] for i in rest]), strict=True):
            drafts[i] = draft
        return drafts

    def keep(self, sequence: int, length: int) -> None:
        """Forget everything past the first ``length`` tokens of a sequence."""
        self.lookup.keep(sequence, length)
        self.model.keep(sequence, length)

    def prefill(self, sequence: int, history: Sequence[int], *, limit: int) -> None:
        """Let the model read a part of a prompt."""
        self.model.prefill(sequence, history, limit=limit)

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Copy what the model's cache holds."""
        self.model.copy(source, sequence, length)
