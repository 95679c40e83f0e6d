"""Whether long generations of the real pair follow the law that an independent pass gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localspec.checking.evidence import SHIFTS, Bet, evidence, shifts, smallest_shift
from localspec.checking.findings import Allowance, Finding
from localspec.checking.ledger import Evaluated, Recorder, Row, read_rows, row_distance, sampled
from localspec.checking.noise import SAME_ROW, total_variation
from localspec.checking.replay import THRESHOLD
from localspec.checking.subject import Subject
from localspec.encoding import Prompt
from localspec.sampling import DenseLaw, Law, PositionNoise, Rule, SamplingParams, make_law
from localspec.wording import counted

__all__ = ["check_generations"]

Floats = NDArray[np.float64]

_RULES: tuple[Rule, ...] = ("block", "token", "coupled")


@dataclass(slots=True)
class _Tally:
    """What was found so far.

    Attributes:
        bets: of token and block rule, one for each shift.
        tokens: examined, under any rule.
        coupled: of these, under the coupled rule.
        accepted: drafted tokens that stood.
        distances: between the rows that were evaluated and those of the independent pass.
        variations: between their laws.
        drift: Σ (f − E f) under the independent pass, and Σ of its variances, for each shift.
        problems: what is wrong.
    """

    bets: tuple[Bet, ...] = field(default_factory=lambda: tuple(Bet() for _ in SHIFTS))
    tokens: int = 0
    coupled: int = 0
    accepted: int = 0
    distances: list[float] = field(default_factory=list)
    variations: list[float] = field(default_factory=list)
    drift: list[Floats] = field(default_factory=lambda: [np.zeros(2) for _ in SHIFTS])
    problems: list[str] = field(default_factory=list)


def check_generations(subject: Subject, allowance: Allowance) -> Finding:
    """Generate through the session as a user would, then read every text again in passes of its own.

    A token has to have the law p that was evaluated for it: that is a bet on f = 1{q̂ > p̂}, log p̂ and q̂, with p̂ and q̂
    from the independent pass of target and draft, and odds that kernel noise cannot touch, since expectations are
    taken under p. And p has to be p̂ up to kernel noise: every row is compared with the independent one. Under the
    coupled rule there is no bet: the token must be the one that the shared noise draws from p.
    """
    tally = _Tally()
    settings = subject.settings
    # What users run comes early: the budget may end before the last of them.
    lengths: tuple[int | None, ...] = (settings.num_draft_tokens, None, *settings.lengths)
    number = 0
    while True:
        prompt, tokens = subject.prompts[number % len(subject.prompts)]
        rule = _RULES[number % len(_RULES)]
        gamma = lengths[number // len(_RULES) % len(lengths)]
        _generate(subject, prompt, tokens, rule, gamma, settings.seed + number, tally)
        number += 1
        if len(tally.problems) > 3 or (number >= len(_RULES) and not allowance.goes_on()):
            break
    return _verdict(tally, number)


def _generate(
    subject: Subject,
    prompt: Prompt,
    prompt_tokens: Sequence[int],
    rule: Rule,
    gamma: int | None,
    seed: int,
    tally: _Tally,
) -> None:
    params = subject.settings.sampling
    with Recorder(subject.target, params) as recorder:
        stream = subject.session.stream(
            prompt,
            params,
            raw=subject.raw,
            max_tokens=min(subject.settings.answer_tokens, subject.capacity - len(prompt_tokens)),
            seed=seed,
            num_draft_tokens=gamma,
            rule=rule,
            progress=None if seed % 2 else _watch,
        )
        for _event in stream:
            pass
    history = [*prompt_tokens, *stream.result().tokens]
    tally.accepted += stream.stats.accepted
    num = stream.stats.tokens
    p_rows = read_rows(subject.target, history[:-1], num)
    q_rows = read_rows(subject.draft, history[:-1], num)
    for i, (p_row, q_row) in enumerate(zip(p_rows, q_rows, strict=True)):
        length = len(prompt_tokens) + i
        evaluated = recorder.at(history, length)
        if evaluated is None:
            tally.problems.append(f"{rule} rule: token {i} came from a row of another prefix")
            return
        _examine(evaluated, p_row, q_row, params, history[: length + 1], rule, seed, tally)


def _watch(read: int, total: int) -> None:
    """Do nothing: while somebody watches, even a short prompt is read in several pieces."""


def _examine(
    evaluated: Evaluated,
    p_row: Row,
    q_row: Row,
    params: SamplingParams,
    text: Sequence[int],
    rule: Rule,
    seed: int,
    tally: _Tally,
) -> None:
    """Hold the last token of ``text`` against the row that was evaluated for it, and that against its own."""
    *before, token = text
    tally.tokens += 1
    distance = row_distance(evaluated.sample, sampled(p_row))
    tally.distances.append(distance)
    if distance > SAME_ROW:
        tally.problems.append(
            f"{rule} rule: the row before token {len(before)} is {distance:.1f} standard deviations off that of an"
            " independent pass"
        )
    independent = make_law(p_row, params, before)
    tally.variations.append(total_variation(evaluated.law, independent))
    ids, probs = _support(evaluated.law)
    if not evaluated.law.prob(token) > 0:
        tally.problems.append(f"{rule} rule: token {token} has probability 0 after {len(before)} tokens")
        return
    if rule == "coupled":
        tally.coupled += 1
        if evaluated.law.race(PositionNoise(seed, len(before))) != token:
            tally.problems.append(f"coupled rule: token {len(before)} is not the one that its noise draws")
        return
    p = independent.probs_at(ids)
    q = make_law(q_row[: len(p_row)], params, before).probs_at(ids)
    drawn = int(np.searchsorted(ids, token))
    for bet, drift, values in zip(tally.bets, tally.drift, shifts(p, q), strict=True):
        bet.place(probs, values, drawn)
        mean = float(p @ values) / max(float(p.sum()), 1e-12)
        drift += (values[drawn] - mean, float(p @ (values - mean) ** 2))


def _support(law: Law) -> tuple[NDArray[np.int64], Floats]:
    if isinstance(law, DenseLaw):
        ids = np.flatnonzero(law.weights)
        probs = law.probs_at(ids)
        return ids, probs / probs.sum()
    return law.ids, law.probs


def _verdict(tally: _Tally, number: int) -> Finding:
    found = evidence(tally.bets)
    if found >= THRESHOLD:
        strongest = max(range(len(SHIFTS)), key=lambda i: float(tally.bets[i].log_capital.max()))
        more = "more" if tally.bets[strongest].total > 0 else "less"
        tally.problems.append(
            f"tokens {SHIFTS[strongest]} come out {more} often than they should (Z {tally.bets[strongest].z:+.1f})"
        )
    own = ", ".join(f"{bet.z:+.1f}" for bet in tally.bets)
    other = ", ".join(f"{total / np.sqrt(variance):+.1f}" for total, variance in tally.drift if variance > 0)
    shift = smallest_shift(tally.bets[0], len(tally.bets), THRESHOLD)
    summary = (
        f"{counted(tally.tokens, 'token')} of {counted(number, 'generation')} under three rules ({tally.accepted}"
        f" drafted), read again independently: rows differ by up to {max(tally.distances, default=0.0):.2f} standard"
        f" deviations, laws by {float(np.mean(tally.variations or [0.0])):.2%} on average; Z of the bets {own} (with"
        f" the independent p {other}), {tally.coupled} coupled tokens are those of their noise. A shift of"
        f" {shift:.1%} towards the draft would be noticed"
    )
    if not tally.accepted:
        tally.problems.append("no drafted token was ever accepted, so nothing was tested")
    return Finding(
        part="generations",
        passed=not tally.problems,
        summary=summary,
        false_alarm=1 / THRESHOLD,
        problems=tuple(tally.problems[:4]),
    )
