"""From a prompt to token ids: the chat template's own markers become control tokens, what people wrote never does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from localspec.backend.vocabulary import Vocabulary
from localspec.errors import ContextOverflowError, PromptError, TemplateError
from localspec.text import TEMPLATE_NAMES, ChatTemplate, Message, split_control
from localspec.wording import counted, shown

__all__ = ["Prompt", "PromptEncoder"]

_ASCII_SPACE = " \t\n\v\f\r"

Prompt = str | Sequence[Message | Mapping[str, Any]]
"""A text, or the messages of a conversation."""


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        vocabulary: the model's.
        template: its chat template, or None if it has none.
        name: what to call the model.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None, *, name: str) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._name = name

    def encode(
        self, prompt: Prompt, *, raw: bool = False, special: bool = False, capacity: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, BOS included where the model wants it.

        Args:
            prompt: a text, which becomes one user message; or messages, as ``Message`` or as mappings that
                ``Message.of`` reads.
            raw: take a text as it is, without the chat template.
            special: with ``raw``, let control markers in the text become control tokens. Markers in messages
                never do.
            capacity: tokens that there is room for, if it is known; what fits may still be too much.

        Raises:
            PromptError: the prompt is empty or no text.
            ContextOverflowError: the prompt has more characters than so many tokens can stand for.
            TemplateError: the model has no chat template, or it refuses the messages.
        """
        if raw:
            if not isinstance(prompt, str):
                raise PromptError("a raw prompt must be one text, not messages; leave out raw")
            if not prompt:
                raise PromptError("the prompt is empty; give it some text")
            self._check_size(prompt, capacity)
            tokens = self._vocabulary.tokenize(prompt, control=special)
        else:
            tokens = self._encode_messages(_as_messages(prompt), capacity)
        bos = self._vocabulary.bos
        if bos is not None and self._vocabulary.adds_bos and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

    def _encode_messages(self, messages: Sequence[Message], capacity: int | None) -> list[int]:
        if self._template is None:
            raise TemplateError(
                f"{self._name} has no chat template; name one with --template ({', '.join(TEMPLATE_NAMES)}, or a"
                " Jinja file), or have `localspec generate --raw` continue a text as it stands"
            )
        rendered = self._template.render(messages)
        self._check_size(rendered.text, capacity)
        markers = self._vocabulary.control_tokens
        tokens: list[int] = []
        swallows = False
        for piece in split_control(rendered, markers, self._added):
            if piece.is_control:
                tokens.append(markers[piece.text])
            else:
                tokens += self._vocabulary.tokenize(piece.text.lstrip(_ASCII_SPACE) if swallows else piece.text)
            swallows = piece.is_control and self._vocabulary.swallows_space(tokens[-1])
        return tokens

    def _check_size(self, text: str, capacity: int | None) -> None:
        """Refuse a text that cannot fit: to make ids of megabytes takes seconds and a hundred times the room."""
        # Hardly any token has 64 characters, so that the longest one is looked for in vain only rarely.
        if capacity is None or len(text) <= 64 * capacity or len(text) <= self._vocabulary.longest_piece * capacity:
            return
        raise ContextOverflowError(
            f"the prompt has {counted(len(text), 'character')}, more than the {capacity} tokens of the context can"
            " hold; shorten it, or use a larger --ctx"
        )

    @cached_property
    def _added(self) -> list[str]:
        """The template's own markers that are not control tokens.

        Other user-defined tokens, for runs of spaces or HTML, are how the model reads any text.
        """
        template, tokens = self._template, self._vocabulary.user_defined_tokens
        return [text for text in tokens if text.strip() and template is not None and template.mentions(text)]


def _as_messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise PromptError("the prompt is empty; give it some text")
        return [Message("user", prompt)]
    if not isinstance(prompt, Sequence):
        raise PromptError(f"the prompt is {shown(prompt)}; it must be a text or a list of messages")
    messages = [m if isinstance(m, Message) else Message.of(m) for m in prompt]
    if not any(m.content.strip() for m in messages):
        raise PromptError("the prompt is empty; no message has any text")
    return messages
