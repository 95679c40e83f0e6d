"""A conversation as a value: what was said, what of it the model still sees, and its form on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.errors import ContextOverflowError, PromptError, StoreError
from localspec.reading import read_whole
from localspec.registry.partial import write_atomically
from localspec.text import Message
from localspec.wording import counted, shown

__all__ = ["Conversation", "Turn", "load_conversation", "parse_messages", "read_messages", "save_conversation"]

_FORMAT = "localspec conversation"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said and what came of it.

    Attributes:
        user: the message.
        answer: the model's; None while there is none.
        interrupted: whether the answer was cut off by the user or a failure.
    """

    user: str
    answer: str | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under a system text; every change is a new value, so that what fails changes nothing.

    Attributes:
        system: the system text; empty for none.
        turns: oldest first; only the last may lack an answer.
        num_dropped: how many of the oldest turns the model no longer sees.
    """

    system: str = ""
    turns: tuple[Turn, ...] = ()
    num_dropped: int = 0

    def ask(self, text: str) -> Conversation:
        """Add a message; one that was never answered gives way to it."""
        turns = self.turns[:-1] if self.is_waiting else self.turns
        return replace(self, turns=(*turns, Turn(text)))._clipped()

    def answer(self, text: str, *, interrupted: bool = False) -> Conversation:
        """Answer the last message."""
        turn = replace(self.turns[-1], answer=text, interrupted=interrupted)
        return replace(self, turns=(*self.turns[:-1], turn))

    def undo(self) -> Conversation:
        """Take back the last message with its answer."""
        return replace(self, turns=self.turns[:-1])._clipped()

    def retry(self) -> Conversation:
        """Take back the last answer."""
        return replace(self, turns=(*self.turns[:-1], Turn(self.turns[-1].user)))._clipped()

    @property
    def is_waiting(self) -> bool:
        """Whether the last message has no answer."""
        return bool(self.turns) and self.turns[-1].answer is None

    def messages(self) -> list[Message]:
        """Return what the model sees."""
        messages = [Message("system", self.system)] if self.system else []
        for turn in self.turns[self.num_dropped :]:
            messages.append(Message("user", turn.user))
            if turn.answer is not None:
                messages.append(Message("assistant", turn.answer))
        return messages

    def fit(self, count: Callable[[Sequence[Message]], int], capacity: int, answer_room: int) -> Conversation:
        """Drop the oldest turns until the prompt leaves room for an answer; at best nothing changes.

        When something must go, the prompt shrinks to half of the context, not just under the limit: what follows
        a dropped turn has to be read again, and so that happens once in many turns instead of in each. The last
        message and the system text always stay, with less room for the answer if need be.

        Args:
            count: tells the tokens of a prompt.
            capacity: tokens the context holds.
            answer_room: tokens to leave for the answer.

        Raises:
            ContextOverflowError: system text and last message leave no room for a token.
        """
        most = capacity - max(1, answer_room)
        if count(self.messages()) <= most:
            return self
        alone = replace(self, num_dropped=max(self.num_dropped, len(self.turns) - 1))
        size = count(alone.messages())
        if size >= capacity:
            what = "the message and the system text take" if self.system else "the message takes"
            raise ContextOverflowError(
                f"{what} {counted(size, 'token')} and the context holds {capacity}, one of them for the answer;"
                " shorten it, or use a larger --ctx"
            )
        goal = capacity // 2 if size <= capacity // 2 else most
        for num_dropped in range(self.num_dropped, alone.num_dropped):
            shorter = replace(self, num_dropped=num_dropped)
            if count(shorter.messages()) <= goal:
                return shorter
        return alone

    def _clipped(self) -> Conversation:
        """Return the conversation with its last turn in sight, even if what came after it was taken back."""
        return replace(self, num_dropped=min(self.num_dropped, max(0, len(self.turns) - 1)))


def save_conversation(conversation: Conversation, path: Path, *, model: str) -> None:
    """Write a conversation as JSON that ``load_conversation`` and OpenAI-style tools can read.

    Raises:
        PromptError: the file exists and is something else.
        StoreError: it cannot be written; what was there before is untouched.
    """
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model,
        "dropped_turns": conversation.num_dropped,
        "messages": list(_documents(conversation)),
    }
    try:
        if path.exists() and not _is_ours(path):
            raise PromptError(f"{path} exists and is no saved conversation; choose another name")
        write_atomically(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    except (StoreError, OSError) as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        raise StoreError(f"{path} cannot be written: {reason}; choose another place") from error


def load_conversation(path: Path) -> Conversation:
    """Read a conversation that ``save_conversation`` wrote, or a JSON list of messages.

    Raises:
        PromptError: the file is no such thing; the message says where it goes wrong.
        OSError: it cannot be read.
    """
    document = _read_json(path)
    entries = _entries(document, path)
    dropped = document.get("dropped_turns", 0) if isinstance(document, dict) else 0
    messages = [_message(entry, i, path) for i, entry in enumerate(entries, 1)]
    system = messages.pop(0).content if messages and messages[0].role == "system" else ""
    offset = len(entries) - len(messages)
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        expected = "assistant" if i % 2 else "user"
        if message.role != expected:
            raise PromptError(
                f"{path}: message {offset + i + 1} has the role {message.role}, where {expected} is due; a"
                " conversation is a system text, if any, and then user and assistant in turns"
            )
        if expected == "user":
            turns.append(Turn(message.content))
        else:
            interrupted = entries[offset + i].get("interrupted", False) is True
            turns[-1] = replace(turns[-1], answer=message.content, interrupted=interrupted)
    if isinstance(dropped, bool) or not isinstance(dropped, int) or not 0 <= dropped <= len(turns):
        raise PromptError(f"{path}: dropped_turns is {shown(dropped)}; it must be a number from 0 to {len(turns)}")
    return Conversation(system, tuple(turns), dropped)


def read_messages(path: Path | None, text: str | None = None) -> list[Message]:
    """Read OpenAI-style messages: a JSON list, or an object with "messages", from a file or from ``text``.

    Raises:
        PromptError: it is no such thing.
        OSError: the file cannot be read.
    """
    name = path or "standard input"
    return parse_messages(_read_json(path) if path else _parse(text or "", name), name)


def parse_messages(document: Any, name: object) -> list[Message]:
    """Take messages out of parsed JSON of either form that ``read_messages`` knows; ``name`` is for messages.

    Raises:
        PromptError: there are none, or one is no message.
    """
    messages = [_message(entry, i, name) for i, entry in enumerate(_entries(document, name), 1)]
    if not messages:
        raise PromptError(f"{name} holds no messages; give at least one")
    return messages


def _documents(conversation: Conversation) -> Iterable[dict[str, Any]]:
    if conversation.system:
        yield {"role": "system", "content": conversation.system}
    for turn in conversation.turns:
        yield {"role": "user", "content": turn.user}
        if turn.answer is not None:
            mark = {"interrupted": True} if turn.interrupted else {}
            yield {"role": "assistant", "content": turn.answer, **mark}


def _is_ours(path: Path) -> bool:
    try:
        document = _read_json(path)
    except (PromptError, OSError):
        return False
    return isinstance(document, dict) and document.get("format") == _FORMAT


def _read_json(path: Path) -> Any:
    try:
        return _parse(read_whole(path).decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text (at byte {error.start}), so not JSON either") from None


def _parse(text: str, name: object) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PromptError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise PromptError(f"{name} is JSON nested too deep to be a conversation") from None


def _entries(document: Any, name: object) -> list[Any]:
    if isinstance(document, dict):
        version = document.get("version", _VERSION)
        if document.get("format") == _FORMAT and version != _VERSION:
            raise PromptError(f"{name} is a conversation of version {shown(version)}; this program reads {_VERSION}")
        document = document.get("messages")
    if not isinstance(document, list):
        raise PromptError(f'{name} holds no messages; it must be a JSON list of them, or an object with "messages"')
    return document


def _message(entry: Any, number: int, name: object) -> Message:
    try:
        return Message.of(entry)
    except PromptError as error:
        raise PromptError(f"{name}: message {number}: {error}") from None
