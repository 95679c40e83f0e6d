"""From a line of the prompt file to a request, or to the reason why it is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, Final

from localspec.batch.openai import is_request, request_fields
from localspec.batch.prompts import MAX_LINE_BYTES, Line
from localspec.batching import BatchRequest
from localspec.conversation import parse_messages
from localspec.errors import InvalidOptionError, LocalspecError, PromptError
from localspec.sampling import SamplingParams, check_rule, draft_params, record_seed
from localspec.text import Message, StopStrings
from localspec.wording import shown

__all__ = ["Row", "RowDefaults", "RowReader"]

_SAMPLING: Final = tuple(field.name for field in fields(SamplingParams))
_OWN: Final = ("prompt", "messages", "max_tokens", "seed", "stop", "rule", "draft_temperature", "raw", "special")
_TOO_DEEP: Final = "the line is JSON nested too deep to be a row"
_BOM: Final = b"\xef\xbb\xbf"
_MOST_DIGITS: Final = 1000  # no option needs as many
_NULLABLE: Final = "penalty_last_n"  # where null is a value of its own: all tokens count


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDefaults:
    """What holds for a row that does not say otherwise.

    Attributes:
        params: how laws are made.
        max_tokens: emit no more; None: as many as the context holds.
        stop: strings that end an answer.
        rule: verification rule.
        draft_temperature: None for the target's.
        system: text put in front of rows that bring none of their own; raw rows are taken as they are.
        raw: take prompts as they are, without the chat template.
        special: with ``raw``, let control markers in prompts be control tokens.
    """

    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    rule: str = "block"
    draft_temperature: float | None = None
    system: str | None = None
    raw: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the prompt file.

    Attributes:
        line: its line number, from 1.
        id: as the row gives it; the line number where it gives none, and None where none can be read or another
            row has it.
        content: the request, or why there is none.
        model: the model's name in a request of OpenAI's shape.
    """

    line: int
    id: str | int | None
    content: BatchRequest | LocalspecError
    model: str | None = None


class RowReader:
    """Reads rows, and finds out which ids come twice; needs about 100 bytes of memory per row.

    Args:
        defaults: what rows leave open.
        seed: from which, with the id, the seeds of rows are derived.
    """

    def __init__(self, defaults: RowDefaults, seed: int) -> None:
        self._defaults = defaults
        self._seed = seed
        self._seen: set[bytes] = set()

    def read(self, line: Line) -> Row:
        """Return the row of a line; call it for every line in order, wanted or not, or ids will be missed."""
        row_id: str | int | None = None
        try:
            values = _parse(line.data)
            openai = is_request(values)
            name = "custom_id" if openai else "id"
            found = _id(values, name, line.number)
            self._claim(found, given=values.get(name) is not None)
            row_id = found
            own = request_fields(values) if openai else {key: value for key, value in values.items() if key != "id"}
            request = self._request(str(row_id), own)
        except LocalspecError as error:
            return Row(line.number, row_id, error)
        except RecursionError:
            return Row(line.number, row_id, PromptError(_TOO_DEEP))
        model = values["body"].get("model") if openai else None
        return Row(line.number, row_id, request, model if isinstance(model, str) else None)

    def _claim(self, row_id: str | int, *, given: bool) -> None:
        digest = blake2b(str(row_id).encode(), digest_size=16).digest()
        if digest in self._seen:
            if not given:
                raise PromptError(
                    f"the row has no id, and its line number {row_id} is the id of an earlier row; give it an id"
                )
            raise PromptError(f"the id {shown(row_id)} is that of an earlier row; ids must differ")
        self._seen.add(digest)

    def _request(self, row_id: str, values: Mapping[str, Any]) -> BatchRequest:
        if unknown := values.keys() - {*_OWN, *_SAMPLING}:
            raise InvalidOptionError(
                f"there is no option {shown(min(unknown))}; a row may have id, {', '.join((*_OWN, *_SAMPLING))}"
            )
        values = {key: value for key, value in values.items() if value is not None or key == _NULLABLE}
        defaults = self._defaults
        raw, special = (_flag(values, name, getattr(defaults, name)) for name in ("raw", "special"))
        seed = _whole(values, "seed")
        return BatchRequest(
            id=row_id,
            prompt=_prompt(values, defaults.system, raw=raw),
            params=_params(values, defaults.params),
            max_tokens=_positive(values, "max_tokens", defaults.max_tokens),
            seed=record_seed(self._seed, row_id) if seed is None else seed,
            stop=_stop(values, defaults.stop),
            rule=check_rule(values.get("rule", defaults.rule)),
            draft_temperature=_draft_temperature(values, defaults.draft_temperature),
            raw=raw,
            special=special,
        )


def _parse(data: bytes | None) -> dict[str, Any]:
    if data is None:
        raise PromptError(f"the line has more than {MAX_LINE_BYTES} bytes, more than any context holds; shorten it")
    if not data.strip():
        raise PromptError("the line is blank; every line must be a JSON object")
    if data.startswith(_BOM):
        raise PromptError("the line is not JSON: it begins with a byte order mark; take that away")
    try:
        values = json.loads(data.decode(), parse_int=_number, parse_constant=_refuse_constant)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise PromptError(f"the line is not UTF-8 text (at byte {error.start})") from None
    except UnicodeEncodeError:
        raise PromptError("the row holds half of a surrogate pair, which is not text") from None
    except ValueError as error:
        raise PromptError(f"the line is not JSON: {error}") from None
    except RecursionError:
        raise PromptError(_TOO_DEEP) from None
    if not isinstance(values, dict):
        raise PromptError("the line is JSON, but no object; a row is an object with a prompt or messages")
    return values


def _number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _id(values: Mapping[str, Any], name: str, number: int) -> str | int:
    found = values.get(name)
    if found is None:
        return number
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise PromptError(f"{name} is {shown(found)}; use a text or a whole number, or leave it out")
    return found


def _prompt(values: Mapping[str, Any], system: str | None, *, raw: bool) -> str | list[Message]:
    given = [name for name in ("prompt", "messages") if name in values]
    if len(given) != 1:
        raise PromptError("a row needs a prompt or messages" + ("; this one has both" if given else ""))
    value = values[given[0]]
    if given == ["messages"]:
        if raw:
            raise PromptError("messages need the chat template; leave out raw, or give a prompt")
        messages = parse_messages(value, "the row")
    elif not isinstance(value, str):
        raise PromptError(f"the prompt is {shown(value)}; it must be a text")
    elif raw or system is None or not value.strip():
        return value
    else:
        messages = [Message("user", value)]
    if system is not None and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", system))
    return messages


def _params(values: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    given = {name: values[name] for name in _SAMPLING if name in values}
    bias = given.get("logit_bias")
    if isinstance(bias, dict):  # whose keys are texts in JSON
        if not all(token.isascii() and token.isdigit() and len(token) < _MOST_DIGITS for token in bias):
            raise InvalidOptionError(f"logit_bias is {shown(bias)}; its keys must be token ids")
        given["logit_bias"] = [(int(token), value) for token, value in bias.items()]
    return replace(defaults, **given) if given else defaults


def _stop(values: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    if "stop" not in values:
        return default
    stop = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise InvalidOptionError(f"stop is {shown(stop)}; use a text or a list of texts")
    StopStrings(stop)
    return tuple(stop)


def _flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is {shown(value)}; use true or false")
    return value


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidOptionError(f"{name} is {shown(value)}; use a whole number")
    return value


def _positive(values: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = _whole(values, name)
    if value is not None and value < 1:
        raise InvalidOptionError(f"{name} is {shown(value)}; use 1 or more")
    return default if value is None else value


def _draft_temperature(values: Mapping[str, Any], default: float | None) -> float | None:
    value: float | None = values.get("draft_temperature", default)
    if value is not None:
        draft_params(SamplingParams(), value)
    return value
