"""How much logits depend on the size of the pass that they come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.backend import Span
from localspec.checking.findings import Allowance, Finding
from localspec.checking.ledger import Ledger, Row, row_distance
from localspec.checking.subject import Subject, Text
from localspec.sampling import Law, make_law, residual

__all__ = ["SAME_ROW", "check_noise", "rows_by_passes", "total_variation"]

SAME_ROW = 0.5
"""The most that two rows of the same tokens may differ by; see ``ledger.row_distance``."""

_ROWS = 24


def check_noise(subject: Subject, texts: Sequence[Text], allowance: Allowance) -> Finding:
    """Compare rows of one-token passes with those of passes over 2..γ+1 tokens, on the same prefixes."""
    settings = subject.settings
    sizes = range(2, settings.num_draft_tokens + 2)
    largest_logit = 0.0
    distances, variations, problems = list[float](), list[float](), list[str]()
    for text in texts:
        num = min(_ROWS, len(text.answer))
        one = rows_by_passes(subject.target, text.tokens, num, 1)
        laws = _laws(subject, text, one)
        for size in sizes:
            rows = rows_by_passes(subject.target, text.tokens, num, size)
            largest_logit = max(largest_logit, float(np.nanmax(np.abs(_differences(rows, one)))))
            distances += [row_distance(a, b) for a, b in zip(one, rows, strict=True)]
            variations += [total_variation(a, b) for a, b in zip(laws, _laws(subject, text, rows), strict=True)]
            if distances[-num:] and max(distances[-num:]) > SAME_ROW and len(problems) < 3:
                problems.append(
                    f"passes over {size} tokens: a row is {max(distances[-num:]):.1f} standard deviations off that of"
                    " a one-token pass: it does not belong to the same tokens"
                )
        if not allowance.goes_on():
            break
    summary = (
        f"{len(distances)} rows of passes over 2 to {sizes[-1]} tokens against one-token passes: logits differ by up"
        f" to {largest_logit:.3g} ({max(distances):.2f} standard deviations), laws by {np.mean(variations):.2%} on"
        f" average and {max(variations):.1%} at most (total variation at your settings)"
    )
    return Finding(
        part="noise", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(dict.fromkeys(problems))
    )


def rows_by_passes(context: Ledger, tokens: Sequence[int], num_rows: int, size: int) -> Row:
    """Return the rows of the last ``num_rows`` tokens, [num_rows, V], read in passes of ``size``.

    A last pass that has fewer tokens left is filled up where there is room.
    """
    first = len(tokens) - num_rows
    context.hold(tokens[:first])
    rows = []
    for at in range(first, len(tokens), size):
        part = list(tokens[at : at + size])
        padding = max(0, min(size, context.capacity - at) - len(part))
        logits = context.decode([Span(0, [*part, *part[-1:] * padding], len(part) + padding)])
        rows.append(logits[: len(part)].copy())
    return np.concatenate(rows)


def total_variation(p: Law, q: Law) -> float:
    """Return TV(p, q) = Σ max(p − q, 0)."""
    rest = residual(p, q)
    return rest[1] if rest else 0.0


def _differences(rows: Row, others: Row) -> Row:
    with np.errstate(invalid="ignore"):  # −inf in both, of masked tokens
        return rows - others


def _laws(subject: Subject, text: Text, rows: Row) -> list[Law]:
    tokens, first = text.tokens, len(text.tokens) - len(rows) + 1
    return [make_law(row, subject.settings.params, tokens[: first + i]) for i, row in enumerate(rows)]
