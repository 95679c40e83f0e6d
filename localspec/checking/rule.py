"""Whether the verification rules are exact: by enumeration, on rows of the real pair; nothing is left to chance."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.checking.findings import Allowance, Finding
from localspec.checking.rows import KEPT, RecordedRows
from localspec.sampling import Law, SamplingParams, make_law, verification_law, verify_laws

__all__ = ["check_rule"]

Floats = NDArray[np.float64]

_DEPTH = 3
_TOLERANCE = 1e-9
_STEP = 1e-6  # how close to a threshold a uniform is put
_PATHS = 12  # of each start, for the draws
_FEWEST = 6  # starts


def check_rule(rows: RecordedRows, temperature: float, allowance: Allowance) -> Finding:
    """Prove on recorded rows that what a step emits has the target's law, and that draws follow the proof.

    First the law of everything a step of three drafted tokens can emit is enumerated with ``verification_law``, and
    every token in it must have the target's law given those before it. Then ``verify_laws``, which draws, is given
    uniforms just below and just above every threshold of that enumeration: it must decide accordingly.
    """
    params = SamplingParams(temperature=temperature, top_k=KEPT)
    p, q = ([make_law(row, params) for row in table] for table in (rows.target, rows.draft))
    worst, outcomes, decisions, starts, problems = 0.0, 0, 0, 0, list[str]()
    for start in range(1, len(p)):
        for rule in ("token", "block"):
            steps = list(_steps(rows, p, q, start, rule))
            error, count = _error(rows, p, start, steps)
            worst, outcomes = max(worst, error), outcomes + count
            for step in steps[:: max(1, len(steps) // _PATHS)]:
                for wrong in (_wrong_decisions(step), _wrong_tokens(step)):
                    for fault in wrong:
                        decisions += 1
                        if fault and len(problems) < 3:
                            problems.append(f"{rule} rule: {fault}")
        starts += 1
        if not allowance.goes_on() and starts >= _FEWEST:
            break
    if not worst <= _TOLERANCE:
        problems.insert(0, f"a step does not emit what the target would: a probability is {worst:.2g} off")
    summary = (
        f"token and block rule on {starts} starts of recorded rows (top-k {KEPT}, {_DEPTH} drafted), enumerated:"
        f" {outcomes} outcomes have the target's law to {worst:.0e}; {decisions} draws at the thresholds follow it"
    )
    return Finding(part="rule", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems))


@dataclass(frozen=True, slots=True)
class _Step:
    """One way to draft, and what the rule makes of it.

    Attributes:
        rule: "token" or "block".
        drafted: symbols.
        chance: of drafting them.
        p: target laws, one more than drafted symbols.
        q: draft laws.
        probs: of 0, 1, … accepted symbols.
        laws: of the next symbol in each case, [γ+1, V].
    """

    rule: str
    drafted: tuple[int, ...]
    chance: float
    p: list[Law]
    q: list[Law]
    probs: Floats
    laws: Floats


def _steps(rows: RecordedRows, p: Sequence[Law], q: Sequence[Law], start: int, rule: str) -> Iterator[_Step]:
    size = rows.target.shape[1]
    for drafted in itertools.product(range(size), repeat=_DEPTH):
        places = list(itertools.accumulate(drafted, rows.after, initial=start))
        p_laws, q_laws = [p[place] for place in places], [q[place] for place in places[:-1]]
        chance = math.prod(law.prob(token) for law, token in zip(q_laws, drafted, strict=True))
        if chance > 0:
            dense = [np.array([law.dense(size) for law in laws]) for laws in (p_laws, q_laws)]
            probs, laws = verification_law(dense[0], dense[1], drafted, rule)
            yield _Step(rule, drafted, chance, p_laws, q_laws, probs, laws)


def _error(rows: RecordedRows, p: Sequence[Law], start: int, steps: Sequence[_Step]) -> tuple[float, int]:
    """Return how far the enumeration is off the target's law at most, and the number of outcomes.

    Let E(x) be the chance that what a step emits begins with x, and F(x) that it goes on behind x. Exact is the rule
    for which E(x·y) = F(x)·p(y | x) for all x and y.
    """
    ends: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for step in steps:
        for num_accepted, prob in enumerate(step.probs):
            for token in np.flatnonzero(step.laws[num_accepted] * prob).tolist():
                weight = step.chance * float(prob) * float(step.laws[num_accepted, token])
                ends[(*step.drafted[:num_accepted], token)] += weight
    begins: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for emitted, weight in ends.items():
        for length in range(len(emitted) + 1):
            begins[emitted[:length]] += weight
    worst = abs(begins[()] - 1.0)
    for prefix in list(begins):
        if len(prefix) > _DEPTH:
            continue
        *_, place = itertools.accumulate(prefix, rows.after, initial=start)
        goes_on = begins[prefix] - ends[prefix]
        for token in range(rows.target.shape[1]):
            worst = max(worst, abs(begins[(*prefix, token)] - goes_on * p[place].prob(token)))
    return float(worst), len(ends)


# --- draws --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """Uniforms that are given."""

    values: Sequence[float]

    def random(self, size: int, /) -> Floats:
        return np.array(self.values[:size])


def _draw(step: _Step, uniforms: Sequence[float]) -> tuple[int, int]:
    result = verify_laws(step.p, step.q, step.drafted, rule=step.rule, uniforms=_Given(uniforms))
    return result.num_accepted, result.next_token


_NEVER = 1 - 2.0**-53  # passes only what surely passes


def _thresholds(step: _Step) -> dict[int, float]:
    """Return below which uniform each position passes, from 1, as far as it is ever asked."""
    found, rest = {}, 1.0
    if step.rule == "token":
        for i in range(1, _DEPTH + 1):
            survives = float(step.probs[i:].sum())
            found[i] = min(1.0, survives / rest)
            rest = survives
            if rest < _TOLERANCE:
                break
        return found
    for i in range(_DEPTH, 0, -1):
        found[i] = min(1.0, float(step.probs[i]) / rest)
        rest -= float(step.probs[i])
        if rest < _TOLERANCE:
            break
    return found


def _uniforms(step: _Step, num_accepted: int) -> list[float]:
    """Return uniforms, without the last one, at which so many drafted tokens are accepted."""
    if step.rule == "token":
        return [0.0 if i <= num_accepted else _NEVER for i in range(1, _DEPTH + 1)]
    return [0.0 if i == num_accepted else _NEVER for i in range(1, _DEPTH + 1)]


def _wrong_decisions(step: _Step) -> Iterator[str | None]:
    """Yield, for a uniform on either side of every threshold, what is wrong about the decision, or None."""
    thresholds = _thresholds(step)
    for i, threshold in thresholds.items():
        others = _uniforms(step, i)
        for passes, uniform in ((True, threshold * (1 - _STEP)), (False, threshold * (1 + _STEP))):
            if passes and threshold == 0:
                continue
            if not passes and uniform >= 1:
                continue
            accepted, _ = _draw(step, [*others[: i - 1], uniform, *others[i:], 0.5])
            if (accepted >= i) != passes:
                verb = "not accepted" if passes else "accepted"
                yield f"drafted token {i} was {verb} at a uniform of {uniform:.6f}, its threshold is {threshold:.6f}"
            else:
                yield None


def _wrong_tokens(step: _Step) -> Iterator[str | None]:
    """Yield, for uniforms at both ends of every token's share of the next law, what is wrong about it, or None."""
    for num_accepted, prob in enumerate(step.probs):
        if prob < _TOLERANCE:
            continue
        others = _uniforms(step, num_accepted)
        edges = np.concatenate([[0.0], np.cumsum(step.laws[num_accepted])])
        for token in np.flatnonzero(step.laws[num_accepted] > 4 * _STEP).tolist():
            for uniform in (edges[token] + _STEP, edges[token + 1] - _STEP):
                drawn = _draw(step, [*others, float(uniform)])
                if drawn != (num_accepted, token):
                    yield (
                        f"after {num_accepted} accepted tokens a uniform of {uniform:.6f} gave {drawn}, which the"
                        f" enumeration gives to {(num_accepted, token)}"
                    )
                else:
                    yield None
