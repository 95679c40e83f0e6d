"""Prompts to measure agreement on: built in, by kind of text, or the user's own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

from localspec.errors import PromptError
from localspec.reading import read_whole
from localspec.text import Message
from localspec.wording import shown

__all__ = ["OWN_KIND", "POOLED", "CalibrationPrompt", "built_in_prompts", "read_prompts", "take_turns"]

POOLED = "all"
"""Kind under which results over all kinds together are reported."""

OWN_KIND = "own prompts"
"""Kind of a user's prompts that name none."""


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """One prompt.

    Attributes:
        kind: what sort of text it asks for; results are reported by kind.
        content: a text, which becomes one user message, or the messages of a conversation.
    """

    kind: str
    content: str | tuple[Message, ...]


def built_in_prompts() -> tuple[CalibrationPrompt, ...]:
    """Return the prompts that come with localspec: code, editing, prose, questions, summarising."""
    kinds = tomllib.loads(files(__package__).joinpath("prompts.toml").read_text(encoding="utf-8"))
    return tuple(CalibrationPrompt(kind, text.strip()) for kind, texts in kinds.items() for text in texts)


def read_prompts(path: Path) -> tuple[CalibrationPrompt, ...]:
    """Return the prompts in a file, each different one once.

    A text file holds prompts separated by blank lines. A JSONL file (ending .jsonl, or beginning with "{") has
    one object a line, with "prompt", a text, or "messages", a list of {"role", "content"}; "kind" groups them,
    and other keys are ignored.

    Raises:
        PromptError: the file cannot be read, a line is malformed, or there are fewer than two different prompts.
    """
    try:
        text = read_whole(path).decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read the prompts in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if path.suffix.lower() == ".jsonl" or text.lstrip().startswith("{"):
        lines = enumerate(text.split("\n"), 1)  # not splitlines: JSON strings may hold U+2028
        prompts = [_from_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    else:
        prompts = [CalibrationPrompt(OWN_KIND, block) for block in _blocks(text)]
    different = tuple(dict.fromkeys(prompts))
    if len(different) < 2:
        raise PromptError(
            f"{path} holds {len(different)} different prompt{'s' * (len(different) != 1)}; agreement needs 2 or more,"
            " and ten for a useful interval. Separate them by blank lines, or give one JSON object a line"
        )
    return different


def take_turns(prompts: Iterable[CalibrationPrompt]) -> list[CalibrationPrompt]:
    """Order prompts so that the kinds take turns: wherever measuring stops, all kinds have had their share."""
    by_kind: dict[str, list[CalibrationPrompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    return [prompt for turn in zip_longest(*by_kind.values()) for prompt in turn if prompt is not None]


def _blocks(text: str) -> list[str]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


def _from_json(line: str, where: str) -> CalibrationPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f'{where}: not JSON ({error}); use one object a line, such as {{"prompt": "…"}}') from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise PromptError(f'{where}: must be an object with either "prompt" or "messages"')
    kind = record.get("kind", OWN_KIND)
    if not isinstance(kind, str) or not kind.strip() or kind == POOLED:
        raise PromptError(f'{where}: "kind" is {shown(kind)}; it must be a name other than "{POOLED}"')
    if "messages" in record:
        return CalibrationPrompt(kind, _messages(record["messages"], where))
    content = record["prompt"]
    if not isinstance(content, str) or not content.strip():
        raise PromptError(f'{where}: "prompt" is {shown(content)}; it must be a text that is not empty')
    return CalibrationPrompt(kind, content)


def _messages(values: object, where: str) -> tuple[Message, ...]:
    if not isinstance(values, list) or not values:
        raise PromptError(f'{where}: "messages" is {shown(values)}; it must be a list of messages')
    try:
        return tuple(Message.of(value) for value in values)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None
