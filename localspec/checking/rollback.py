"""Whether a cache that drafted and took it back is the cache that never drafted."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backend import Span
from localspec.checking.findings import Allowance, Finding
from localspec.checking.ledger import Ledger, Row, row_distance
from localspec.checking.noise import SAME_ROW
from localspec.checking.subject import Subject, Text

__all__ = ["check_rollback"]

_STRIDES = (3, 7, 17, 41)  # tokens from one depth to the next: dense first, then deep
_DEPTHS = 12  # of each stride


def check_rollback(subject: Subject, texts: Sequence[Text], allowance: Allowance) -> Finding:
    """Compare logits after draft and truncation with those of a fresh evaluation, in both contexts.

    Either reading goes through the text in the same passes, so that the kernels are the same; one of them drafts
    other tokens at every depth, in one pass as a target does or token by token as a draft does, and takes them back.
    """
    gamma = subject.settings.num_draft_tokens
    text = [token for one in texts for token in one.tokens]
    worst, count, deepest, problems = 0.0, 0, 0, list[str]()
    for stride in _STRIDES:
        depths = range(2, min(len(text), subject.capacity - gamma) - 1, stride)[:_DEPTHS]
        for ledger in (subject.target, subject.draft):
            fresh = _rows(ledger, text, depths, 0)
            drafted = _rows(ledger, text, depths, gamma)
            for depth, a, b in zip(depths, fresh, drafted, strict=True):
                distance = row_distance(a, b)
                worst = max(worst, distance)
                if distance > SAME_ROW and len(problems) < 3:
                    problems.append(
                        f"{ledger.name}: after drafting {gamma} tokens at depth {depth} and taking them back, logits"
                        f" are {distance:.1f} standard deviations off"
                    )
            count += len(depths)
        deepest = max(deepest, *depths)
        if not allowance.goes_on():
            break
    exactly = "not at all" if worst == 0 else f"by up to {worst:.2g} standard deviations (up to {SAME_ROW} is noise)"
    summary = (
        f"target and draft, {count} times drafted and taken back, up to depth {deepest}: logits differ {exactly} from"
        " those of a fresh evaluation"
    )
    return Finding(part="rollback", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems))


def _rows(ledger: Ledger, text: Sequence[int], depths: Sequence[int], gamma: int) -> list[Row]:
    """Return the row of the token at each depth, read after ``gamma`` others were drafted there and forgotten."""
    ledger.truncate(0, 0)
    rows = []
    for number, depth in enumerate(depths):
        if ahead := text[ledger.length(0) : depth]:
            ledger.decode([Span(0, ahead, 0)])
        others = [text[(depth + 7 * i + 5) % len(text)] for i in range(gamma)]
        size = max(1, gamma) if number % 2 else 1
        for at in range(0, gamma, size):
            ledger.decode([Span(0, others[at : at + size], size)])
        ledger.truncate(0, depth)
        rows.append(ledger.decode([Span(0, [text[depth]], 1)])[0].copy())
    ledger.truncate(0, 0)
    return rows
