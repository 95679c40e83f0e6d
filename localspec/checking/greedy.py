"""Whether greedy speculation says what greedy decoding says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from localspec.checking.findings import Allowance, Finding
from localspec.checking.ledger import Recorder, Row
from localspec.checking.noise import rows_by_passes
from localspec.checking.subject import Subject
from localspec.sampling import SamplingParams, make_law
from localspec.wording import counted

__all__ = ["NearTie", "check_greedy", "near_tie"]

_MOST_DIFFERENCES = 6  # of one text: beyond, something else is wrong


@dataclass(frozen=True, slots=True)
class NearTie:
    """How far apart two tokens are, and how far kernels differ there: logits.

    Attributes:
        margin: of the plain choice over the other.
        noise: δ, the largest difference of a logit between passes of different sizes over the same prefix.
    """

    margin: float
    noise: float

    @property
    def excuses(self) -> bool:
        """Whether noise can have tipped the choice."""
        return self.margin <= 2 * self.noise


@dataclass(slots=True)
class _Tally:
    same: int = 0
    ties: list[NearTie] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


def check_greedy(subject: Subject, allowance: Allowance) -> Finding:
    """Compare texts with and without drafts at temperature 0, token by token.

    Each first difference is measured on that very prefix: a near-tie is let pass, and the text then goes on from the
    plain one; anything else is a fault. Whatever the texts say, every token must also be the likeliest of the row
    that was evaluated for it.
    """
    tally, num_prompts = _Tally(), 0
    problems: list[str] = []
    lengths = subject.settings.lengths
    for _, prompt in subject.prompts:
        plain = _written(subject, prompt, subject.settings.answer_tokens, 0, problems, _Tally())
        for gamma in lengths:
            _compare(subject, list(prompt), plain, gamma, problems, tally)
        num_prompts += 1
        if problems or not allowance.goes_on():
            break
    other = "other " if tally.ties else ""
    differences = counted(len(problems), f"{other}difference") if problems else f"no {other}differences"
    measured = ""
    if tally.ties:
        margin, noise = max(tie.margin for tie in tally.ties), max(tie.noise for tie in tally.ties)
        measured = f" (margins up to {margin:.2g} logits where passes of different sizes differ by up to {noise:.2g})"
    summary = (
        f"{counted(num_prompts, 'prompt')}, drafts of {', '.join(map(str, lengths))}: {counted(tally.same, 'token')}"
        f" as without drafts ({tally.accepted} of {counted(tally.drafted, 'draft')} accepted),"
        f" {counted(len(tally.ties), 'near-tie')} within kernel noise{measured}, {differences}"
    )
    if not tally.accepted:
        problems.append("no drafted token was ever accepted, so nothing was tested")
    return Finding(part="greedy", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems[:3]))


def _compare(
    subject: Subject, prompt: list[int], plain: list[int], gamma: int, problems: list[str], tally: _Tally
) -> None:
    start = 0
    for _ in range(_MOST_DIFFERENCES):
        expected = plain[start:]
        if not expected:
            return
        tokens = _written(subject, [*prompt, *plain[:start]], len(expected), gamma, problems, tally)
        pairs = zip(expected, tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(tokens)))
        tally.same += same
        if same == len(expected):
            return
        if same == len(tokens):
            problems.append(f"drafts of {gamma}: the text ended {counted(len(expected) - same, 'token')} early")
            return
        at = start + same
        prefix = [*prompt, *plain[:at]]
        tie = near_tie(subject, prefix, (plain[at], tokens[same]), len(prompt), gamma + 1)
        if not tie.excuses:
            problems.append(
                f"drafts of {gamma}, token {at}: {plain[at]} became {tokens[same]}, {tie.margin:.3g} logits less"
                f" likely where kernels differ by {tie.noise:.2g}"
            )
            return
        tally.ties.append(tie)
        start = at + 1
    problems.append(f"drafts of {gamma}: more than {_MOST_DIFFERENCES} differences in one text")


def _written(
    subject: Subject, prompt: Sequence[int], max_tokens: int, gamma: int, problems: list[str], tally: _Tally
) -> list[int]:
    """Generate, and hold every token against the row that was evaluated for it."""
    params = subject.settings.greedy
    max_tokens = min(max_tokens, subject.capacity - len(prompt))
    with Recorder(subject.target, params) as recorder:
        generation = subject.write(prompt, params, max_tokens, gamma)
    history = generation.history
    for length in range(len(prompt), len(history)):
        row = recorder.at(history, length)
        if row is None:
            problems.append(f"drafts of {gamma}: token {length - len(prompt)} came from a row of another prefix")
        elif row.law.prob(history[length]) < 1:
            problems.append(f"drafts of {gamma}: token {length - len(prompt)} is not the likeliest of its own row")
    tally.drafted += generation.stats.drafted
    tally.accepted += generation.stats.accepted
    return generation.tokens


def near_tie(
    subject: Subject, prefix: Sequence[int], tokens: tuple[int, int], prompt_length: int, size: int
) -> NearTie:
    """Measure two tokens after ``prefix``, whose end behind the prompt is read in passes of 1, 2 and ``size``.

    The noise is that of the row's own pass and of what the passes before it left in the cache; the margin is that
    between what bias and penalties have made of the two logits.
    """
    num = len(prefix) - prompt_length + 1
    rows = [rows_by_passes(subject.target, prefix, num, passes)[-1] for passes in (1, 2, size)]
    params = subject.settings.params
    uncut = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
    margin = _logit(rows[0], uncut, prefix, tokens[0]) - _logit(rows[0], uncut, prefix, tokens[1])
    noise = max(float(np.abs(row - rows[0])[np.isfinite(rows[0])].max()) for row in rows[1:])
    return NearTie(margin, noise)


def _logit(row: Row, uncut: SamplingParams, prefix: Sequence[int], token: int) -> float:
    """Return an edited logit, up to a constant of the row."""
    return float(np.log(max(make_law(row, uncut, prefix).prob(token), 1e-300)))
