"""Text out of a stream of tokens: characters that span tokens, and strings that end an answer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from localspec.errors import InvalidOptionError
from localspec.wording import shown

__all__ = ["IncrementalDecoder", "StopResult", "StopStrings"]


class IncrementalDecoder:
    """UTF-8 from pieces that may end inside a character.

    Whatever the pieces, the concatenated results equal ``b"".join(pieces).decode(errors="replace")``.
    So a replacement mark appears only for bytes that are no UTF-8 in any continuation, and from
    :meth:`flush` for a character that the text ends in the middle of.

    >>> decoder = IncrementalDecoder()
    >>> [decoder.feed(piece) for piece in (b"na", b"\\xc3", b"\\xafve")]
    ['na', '', 'ïve']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that ``piece`` completes."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return what is left at the end, a replacement mark for a cut character; then start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one piece of text came to: ``text`` to show, and the stop string that ended it, if any."""

    text: str
    matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the answer is over."""
        return self.matched is not None


class StopStrings:
    """Ends text at the first stop string, and shows nothing of it.

    The stop string that is complete first wins; of several that end together, the longest. That makes
    the outcome a property of the text, however it is cut into pieces, and generation never waits to see
    whether a longer stop string would follow. Text is held back only while it may still turn out to
    be the beginning of a stop string.

    >>> stops = StopStrings(["END"])
    >>> [stops.feed(piece).text for piece in ("an E", "N", "ough ", "EN", "D, not shown")]
    ['an ', '', 'ENough ', '', '']
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        if isinstance(stops, str) or not isinstance(stops, Iterable):
            raise InvalidOptionError(f"stop strings are {shown(stops)}; pass a list of strings")
        self._stops = tuple(dict.fromkeys(stops))
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidOptionError(f"stop string {shown(stop)} is not a text of at least one character")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> StopResult:
        """Take the next piece; after the stop string every piece comes to nothing."""
        if self._matched is not None:
            return StopResult("", self._matched)
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self._matched = min(found)
            self._held = ""
            return StopResult(text[:start], self._matched)
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """Return the text held back, when the answer ends without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins some stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
