"""Chat templates: messages to prompt text, with a record of what in it came from people.

A template writes control markers (``<|im_start|>``) that must become control tokens. The same marker
typed by a user, or written by a model, is text and must stay text. So rendering returns
the prompt together with its *protected* spans, and :func:`split_control` finds markers outside them only.

**How the spans are found.** Every message is replaced by one private-use character and the template
is rendered without ever seeing what people wrote: markers in that skeleton are the template's own.
The contents are then put where their characters stand, in the form the template gives them: first as
they are or trimmed, checked against an ordinary rendering, else as the ordinary rendering has them, when
only one way of laying it over the skeleton exists (a template that cuts an old answer's
``<think>`` part, say). If neither works, the contents go in unchanged: the prompt may then differ from the
ordinary rendering, but never in which markers are trusted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from localspec.errors import PromptError, TemplateError
from localspec.text.sandbox import SandboxedTemplate
from localspec.wording import shown

__all__ = ["ROLES", "ChatTemplate", "Message", "Piece", "Rendered", "split_control"]

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; raises PromptError for an unknown role or content that is no text."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"a message has the role {shown(self.role)}; it must be one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise PromptError(f"the content of a {self.role} message is {shown(self.content)}; it must be text")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"a {self.role} message holds something that is not text at character {error.start}: "
                "half of a surrogate pair, as bytes that are not UTF-8 leave it"
            ) from None

    @classmethod
    def of(cls, values: object) -> Message:
        """Read a message as OpenAI's interfaces write it.

        A "developer" is who gives the system text, an assistant's content of null is no text, and content in several
        parts of text is joined.

        Raises:
            PromptError: it is no message.
        """
        if not isinstance(values, Mapping) or not {"role", "content"} <= values.keys():
            raise PromptError(f"a message is {reprlib.repr(values)}; it must be an object with role and content")
        role, content = values["role"], values["content"]
        if content is None and role == "assistant":
            content = ""
        elif isinstance(content, list):
            if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
                raise PromptError(f"a {role} message has a part that is not text; only text can be read")
            content = "".join(part["text"] for part in content)
        return cls("system" if role == "developer" else role, content)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and where in it the messages' own text stands."""

    text: str
    protected: tuple[tuple[int, int], ...] = ()
    """Half-open character spans of ``text``, in order, not overlapping; no control token may touch one."""
    merged: bool = False
    """Whether messages had to be joined because the template refused them as they were."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt: one control marker, or ordinary text to be tokenised in one go."""

    text: str
    is_control: bool


class ChatTemplate:
    """A model's chat template, as Jinja source.

    The template sees what Hugging Face Transformers gives one: ``messages``, ``add_generation_prompt``,
    ``bos_token``, ``eos_token`` and ``tools`` (none). A beginning-of-sequence token that the template
    writes is part of the rendered text; whoever tokenises it adds no second one.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._template = SandboxedTemplate(source)
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def mentions(self, text: str) -> bool:
        """Whether the template's own source holds ``text``."""
        return text in self._source

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Rendered:
        """Return the prompt for a conversation.

        A template that refuses the messages, or leaves one out, gets them again with neighbours of the
        same role joined by a blank line, then with all system text at the head of the first user
        message, then with both. Raises TemplateError with the first refusal when none is
        accepted, and PromptError when there are no messages.
        """
        if not messages:
            raise PromptError("there are no messages to make a prompt of")
        now = datetime.now()  # one moment for all renderings, or a clock in the template would differ
        refusal: TemplateError | None = None
        for attempt in _acceptable_forms(tuple(messages)):
            try:
                rendered = self._render(attempt, add_generation_prompt, now)
            except TemplateError as error:
                refusal = refusal or error
                continue
            return Rendered(rendered.text, rendered.protected, attempt != tuple(messages))
        assert refusal is not None
        raise refusal

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime) -> Rendered:
        def run(contents: Iterable[str]) -> str:
            turns = [
                {"role": message.role, "content": content}
                for message, content in zip(messages, contents, strict=True)
            ]
            prompt = {"messages": turns, "add_generation_prompt": add_generation_prompt, "tools": None}
            return self._template.render({**prompt, **self._tokens}, now)

        contents = [message.content for message in messages]
        marks = self._marks(len(messages))
        # An empty content stays empty, as templates ask for it; there is nothing in it to protect.
        skeleton = run(mark if content else "" for mark, content in zip(marks, contents, strict=True))
        literals, order = _take_apart(skeleton, marks)
        shown = set(order)
        for index, message in enumerate(messages):
            if message.content.strip() and index not in shown:
                raise TemplateError(f"the chat template leaves out message {index + 1}, role {message.role}")
        ordered = [contents[index] for index in order]
        plain = run(contents)
        return _lay_known(plain, literals, ordered) or _lay_unique(plain, literals) or _insert(literals, ordered)

    def _marks(self, count: int) -> list[str]:
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in self._source)
        marks = list(islice(free, count))
        if len(marks) < count:
            raise PromptError(f"a conversation of {count} messages is too long; {len(marks)} is the most")
        return marks


def split_control(
    rendered: Rendered, control_strings: Iterable[str], added_strings: Iterable[str] = ()
) -> list[Piece]:
    """Cut a prompt into the control markers that the template wrote and the ordinary text between.

    A marker counts only outside the protected spans; where several fit, the leftmost, then the longest.
    Everything else comes back unsplit, so that a tokeniser merges across the border of template and
    message text exactly as it would in the whole prompt.

    Some models have markers that are no control tokens to their tokeniser, which makes one token of them wherever it
    meets them: ``added_strings``. Those that people wrote are cut after the first character, so that it does not.

    >>> prompt = Rendered("<s>say </s></s>", ((3, 11),))
    >>> [(piece.text, piece.is_control) for piece in split_control(prompt, ["<s>", "</s>"])]
    [('<s>', True), ('say </s>', False), ('</s>', True)]
    """
    text, pieces, done = rendered.text, list[Piece](), 0
    borders = [(cut, cut) for cut in _cuts(rendered, added_strings)]
    if pattern := _any_of(control_strings):
        markers = re.compile(pattern)
        for start, end in _gaps(rendered):
            # With its end position a match cannot reach into a message.
            borders += [match.span() for match in markers.finditer(text, start, end)]
    for start, end in sorted(borders):
        if done < start:
            pieces.append(Piece(text[done:start], is_control=False))
        if start < end:
            pieces.append(Piece(text[start:end], is_control=True))
        done = max(done, end)
    if done < len(text):
        pieces.append(Piece(text[done:], is_control=False))
    return pieces


def _any_of(strings: Iterable[str]) -> str:
    """Return a pattern for the longest of ``strings``; empty if there is none."""
    return "|".join(map(re.escape, sorted(filter(None, set(strings)), key=len, reverse=True)))


def _cuts(rendered: Rendered, added_strings: Iterable[str]) -> list[int]:
    """Return where to cut the added strings that are, at least in part, what people wrote."""
    pattern = _any_of(added_strings)
    found = re.finditer(f"(?=({pattern}))", rendered.text) if pattern else ()  # overlapping ones, too
    return [
        match.start() + 1
        for match in found
        if any(match.start(1) < end and start < match.end(1) for start, end in rendered.protected)
    ]


def _gaps(rendered: Rendered) -> list[tuple[int, int]]:
    """Return the spans between the protected ones."""
    filled = [span for span in rendered.protected if span[0] < span[1]]
    starts = [0, *(end for _, end in filled)]
    ends = [*(start for start, _ in filled), len(rendered.text)]
    return list(zip(starts, ends, strict=True))


def _acceptable_forms(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """Return the messages as they are, then the documented ways of joining them."""
    folded = _fold_system(messages)
    return list(dict.fromkeys([messages, _join_same(messages), folded, _join_same(folded)]))


def _join_same(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join consecutive messages of one role by a blank line."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            message = Message(message.role, f"{joined.pop().content}\n\n{message.content}")
        joined.append(message)
    return tuple(joined)


def _fold_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put all system text at the head of the first user message, or make it one."""
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    rest = [message for message in messages if message.role != "system"]
    if not system:
        return tuple(rest) or tuple(messages)
    for index, message in enumerate(rest):
        if message.role == "user":
            rest[index] = Message("user", f"{system}\n\n{message.content}")
            return tuple(rest)
    return (Message("user", system), *rest)


def _take_apart(skeleton: str, marks: Sequence[str]) -> tuple[list[str], list[int]]:
    """Split a skeleton into its literals, one more than the second result: the messages between them."""
    parts = re.split(f"([{''.join(marks)}])", skeleton)
    index = {mark: number for number, mark in enumerate(marks)}
    return parts[::2], [index[mark] for mark in parts[1::2]]


def _lay_known(plain: str, literals: Sequence[str], contents: Sequence[str]) -> Rendered | None:
    """Lay contents, as they are or trimmed, between the literals; None unless that gives ``plain``."""
    if not plain.startswith(literals[0]):
        return None
    at, spans = len(literals[0]), []
    for content, literal in zip(contents, literals[1:], strict=True):
        forms = (content, content.strip(), content.rstrip(), content.lstrip(), content.strip("\n"))
        form = next((form for form in forms if plain.startswith(form + literal, at)), None)
        if form is None:
            return None
        spans.append((at, at + len(form)))
        at += len(form) + len(literal)
    return Rendered(plain, tuple(spans)) if at == len(plain) else None


def _lay_unique(plain: str, literals: Sequence[str]) -> Rendered | None:
    """Lay the literals over ``plain``, in order and from end to end; None unless one way exists."""
    first, last = len(literals[0]), len(plain) - len(literals[-1])
    if not plain.startswith(literals[0]) or not plain.endswith(literals[-1]) or last < first:
        return None
    inner = literals[1:-1]
    # If the leftmost and the rightmost places agree, there are no others.
    leftmost, at = [], first
    for literal in inner:
        at = plain.find(literal, at, last)
        if at < 0:
            return None
        leftmost.append(at)
        at += len(literal)
    rightmost, at = [], last
    for literal in reversed(inner):
        at = plain.rfind(literal, first, at)
        rightmost.append(at)
    if leftmost != rightmost[::-1]:
        return None
    starts = [first, *(at + len(literal) for at, literal in zip(leftmost, inner, strict=True))]
    return Rendered(plain, tuple(zip(starts, [*leftmost, last], strict=True)))


def _insert(literals: Sequence[str], contents: Sequence[str]) -> Rendered:
    """Put the contents between the literals as they are."""
    text, spans = literals[0], []
    for content, literal in zip(contents, literals[1:], strict=True):
        spans.append((len(text), len(text) + len(content)))
        text += content + literal
    return Rendered(text, tuple(spans))
