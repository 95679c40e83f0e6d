"""One line of the output file: an answer or an error, in our shape or OpenAI's."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from localspec.batch.openai import response
from localspec.batch.rows import Row
from localspec.errors import LocalspecError
from localspec.session import GenerationResult

__all__ = ["AnswerFormat", "answer_line"]

AnswerFormat = Literal["localspec", "openai"]


def answer_line(row: Row, answer: GenerationResult | LocalspecError, *, format: AnswerFormat, model: str) -> bytes:
    """Return the line for a row, its end included.

    Args:
        row: what was asked.
        answer: what came of it.
        format: "localspec" or "openai".
        model: the name of the model, for a request that names none.
    """
    if isinstance(answer, LocalspecError):
        answer = type(answer)(f"line {row.line}: {answer}")
    if format == "openai":
        raw = not isinstance(row.content, LocalspecError) and row.content.raw
        values = response(
            id=row.id,
            line=row.line,
            model=row.model or model,
            created=int(time.time()),
            raw=raw,
            answer=answer,
        )
    else:
        values = {"id": row.id, "line": row.line, **_outcome(answer)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def _outcome(answer: GenerationResult | LocalspecError) -> dict[str, Any]:
    if isinstance(answer, LocalspecError):
        error = {"type": type(answer).__name__, "message": str(answer)}
        return {"error": error, "finish_reason": "error"}
    return answer.to_dict()
