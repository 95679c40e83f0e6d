"""The shapes of OpenAI's batch files: requests as rows of ours, answers as responses of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from localspec.errors import LocalspecError, PromptError
from localspec.session import GenerationResult
from localspec.wording import shown

__all__ = ["is_request", "request_fields", "response"]

_ENDPOINTS: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_RENAMED: Final[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}
# Who asks and what is kept of it changes no token.
_WITHOUT_EFFECT: Final = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"}
)
_NULLABLE: Final = "penalty_last_n"  # ours, where null is a value; elsewhere it is what programs write for nothing
# What this program does in one way only: the values that ask for that way.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


def is_request(values: Mapping[str, Any]) -> bool:
    """Whether a row has OpenAI's shape."""
    return "custom_id" in values or "body" in values


def request_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ask for the same in a row of our own shape, the id apart.

    Raises:
        PromptError: the row is no such request, or asks for what cannot be done.
    """
    if unknown := values.keys() - {"custom_id", "method", "url", "body"}:
        raise PromptError(f"a request has custom_id, method, url and body, and not {shown(min(unknown))}")
    if values.get("method", "POST") != "POST":
        raise PromptError(f'the method is {shown(values["method"])}; it must be "POST"')
    url = values.get("url", "/v1/chat/completions")
    if not isinstance(url, str) or url not in _ENDPOINTS:
        raise PromptError(f"the url is {shown(url)}; it must be one of {', '.join(_ENDPOINTS)}")
    body = values.get("body")
    if not isinstance(body, dict):
        raise PromptError('a request needs a "body" that is an object')
    wanted, other = _ENDPOINTS[url], "prompt" if _ENDPOINTS[url] == "messages" else "messages"
    if body.get(other) is not None:
        raise PromptError(f"a request to {url} takes {wanted}, not {other}")
    for name, allowed in _FIXED.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            raise PromptError(f"{name} is {shown(value)}, which this program does not do; leave it out")
    left_out = _WITHOUT_EFFECT | _FIXED.keys()
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in left_out or (value is None and name != _NULLABLE):
            continue
        if fields.setdefault(_RENAMED.get(name, name), value) != value:
            raise PromptError("max_tokens and max_completion_tokens differ; give one of them")
    if wanted == "prompt":
        fields["raw"] = True
    return fields


def response(
    *, id: str | int | None, line: int, model: str, created: int, raw: bool, answer: GenerationResult | LocalspecError
) -> dict[str, Any]:
    """Return one line of an output file; ``line`` and ``localspec`` are not in OpenAI's."""
    name = f"batch_req_{line}"
    custom_id = None if id is None else str(id)
    if isinstance(answer, LocalspecError):
        error = {"code": type(answer).__name__, "message": str(answer)}
        return {"id": name, "custom_id": custom_id, "response": None, "error": error, "line": line}
    content = {"text": answer.text} if raw else {"message": {"role": "assistant", "content": answer.text}}
    reason = "stop" if answer.finish_reason == "stop" else "length"
    stats = answer.to_dict()
    body = {
        "id": ("cmpl-" if raw else "chatcmpl-") + str(line),
        "object": "text_completion" if raw else "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": answer.stats.prompt_tokens,
            "completion_tokens": answer.stats.tokens,
            "total_tokens": answer.stats.prompt_tokens + answer.stats.tokens,
        },
        "localspec": {key: stats[key] for key in ("tokens", "finish_reason", "seed", "stats")},
    }
    return {
        "id": name,
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": name, "body": body},
        "error": None,
        "line": line,
    }
