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

_Moves = tuple[int, ...]
"""What is done at one depth: n is a pass over n tokens, -n takes n tokens back. The sum is 0."""


def check_rollback(subject: Subject, texts: Sequence[Text], allowance: Allowance) -> Finding:
    """Compare logits after draft and truncation with those of a fresh evaluation, in both contexts.

    Either reading goes through the text in the same passes, so that the kernels are the same; one of them drafts
    other tokens at every depth, in one pass as a target does or token by token as a draft does, and takes them back,
    several at once or a single one. After every move the cache itself is asked for its length.
    """
    gamma = subject.settings.num_draft_tokens
    moves = _moves(gamma)
    text = [token for one in texts for token in one.tokens]
    worst, count, deepest, problems = 0.0, 0, 0, list[str]()
    for stride in _STRIDES:
        depths = range(2, min(len(text), subject.capacity - gamma - 1) - 1, stride)[:_DEPTHS]
        for ledger in (subject.target, subject.draft):
            fresh = _rows(ledger, text, depths, [()])
            drafted = _rows(ledger, text, depths, moves)
            for number, (depth, a, b) in enumerate(zip(depths, fresh, drafted, strict=True)):
                distance = row_distance(a, b)
                worst = max(worst, distance)
                if distance > SAME_ROW and len(problems) < 3:
                    problems.append(
                        f"{ledger.name}: after {_in_words(moves[number % len(moves)])} at depth {depth}, logits are"
                        f" {distance:.1f} standard deviations off"
                    )
            count += sum(move < 0 for number in range(len(depths)) for move in moves[number % len(moves)])
        deepest = max([deepest, *depths])
        if not allowance.goes_on():
            break
    exactly = "not at all" if worst == 0 else f"by up to {worst:.2g} standard deviations (up to {SAME_ROW} is noise)"
    summary = (
        f"target and draft, {count} times tokens taken back, one or up to {gamma + 1} at once, up to depth {deepest}:"
        f" lengths are right, and logits differ {exactly} from those of a fresh evaluation"
    )
    return Finding(part="rollback", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems))


def _moves(gamma: int) -> list[_Moves]:
    """Return what is done at the depths in turn, with drafts of ``gamma`` tokens."""
    return [
        (gamma, -gamma),
        (1, -1),
        (*[1] * gamma, -gamma),
        (gamma, -1, 2, -gamma - 1),  # one rejected, and a step right after it
        (1, -1, gamma, *[-1] * gamma),
    ]


def _in_words(moves: _Moves) -> str:
    return ", ".join(f"drafting {move}" if move > 0 else f"taking {-move} back" for move in moves)


def _rows(ledger: Ledger, text: Sequence[int], depths: Sequence[int], moves: Sequence[_Moves]) -> list[Row]:
    """Return the row of the token at each depth, read after other tokens were drafted there and forgotten."""
    ledger.truncate(0, 0)
    rows = []
    for number, depth in enumerate(depths):
        if ahead := text[ledger.length(0) : depth]:
            ledger.decode([Span(0, ahead, 0)])
        length = depth
        for at, move in enumerate(moves[number % len(moves)]):
            length += move
            if move > 0:
                others = [text[(length + 7 * i + 5 + 3 * at) % len(text)] for i in range(move)]
                ledger.decode([Span(0, others, move)])
            else:
                ledger.truncate(0, length)
        rows.append(ledger.decode([Span(0, [text[depth]], 1)])[0].copy())
    ledger.truncate(0, 0)
    return rows
