"""Whether the verification rules are exact: by enumeration, on rows of the real pair; nothing is left to chance."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from localspec.checking.draws import TOLERANCE, EnumeratedStep, wrong_draws
from localspec.checking.findings import Allowance, Finding
from localspec.checking.rows import KEPT, RecordedRows
from localspec.checking.whole import whole_faults
from localspec.sampling import Law, SamplingParams, make_law

__all__ = ["check_rule"]

_DEPTH = 3
_PATHS = 12  # of each start, for the draws
_FEWEST = 6  # starts


def check_rule(rows: RecordedRows, params: SamplingParams, allowance: Allowance) -> Finding:
    """Prove on recorded rows that what a step emits has the target's law, and that draws follow the proof.

    First the law of everything a step of three drafted tokens can emit is enumerated with ``verification_law``, and
    every token in it must have the target's law given those before it. Then ``verify_laws``, which draws, is given
    uniforms just below and just above every threshold of that enumeration: it must decide accordingly. That is
    done with few tokens, and with all of the vocabulary at the settings ``params`` and at its temperature alone.
    """
    few = SamplingParams(temperature=params.temperature, top_k=KEPT)
    p, q = ([make_law(row, few) for row in table] for table in (rows.target, rows.draft))
    worst, outcomes, decisions, starts, problems = 0.0, 0, 0, 0, list[str]()
    for start in range(1, len(p)):
        for rule in ("token", "block"):
            steps = list(_steps(rows, p, q, start, rule))
            error, count = _error(rows, p, start, steps)
            worst, outcomes = max(worst, error), outcomes + count
            for step in [step for _, step in steps][:: max(1, len(steps) // _PATHS)]:
                for fault in wrong_draws(step):
                    decisions += 1
                    if fault and len(problems) < 3:
                        problems.append(f"{rule} rule: {fault}")
        starts += 1
        if not allowance.goes_on() and starts >= _FEWEST:
            break
    wide = list(whole_faults(rows.whole, params, allowance))
    problems += [fault for fault in wide if fault][:3]
    if not worst <= TOLERANCE:
        problems.insert(0, f"a step does not emit what the target would: a probability is {worst:.2g} off")
    summary = (
        f"token and block rule on {starts} starts of recorded rows (top-k {KEPT}, {_DEPTH} drafted), enumerated:"
        f" {outcomes} outcomes have the target's law to {worst:.0e}; {decisions} draws at the thresholds follow it,"
        f" and {len(wide)} on rows of the whole vocabulary, at your settings and uncut"
    )
    return Finding(part="rule", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems))


def _steps(
    rows: RecordedRows, p: Sequence[Law], q: Sequence[Law], start: int, rule: str
) -> Iterator[tuple[float, EnumeratedStep]]:
    """Yield every way to draft, and the chance that it comes."""
    size = rows.target.shape[1]
    for drafted in itertools.product(range(size), repeat=_DEPTH):
        places = list(itertools.accumulate(drafted, rows.after, initial=start))
        p_laws, q_laws = [p[place] for place in places], [q[place] for place in places[:-1]]
        chance = math.prod(law.prob(token) for law, token in zip(q_laws, drafted, strict=True))
        if chance > 0:
            yield chance, EnumeratedStep.of(rule, drafted, p_laws, q_laws, size)


def _error(
    rows: RecordedRows, p: Sequence[Law], start: int, steps: Sequence[tuple[float, EnumeratedStep]]
) -> tuple[float, int]:
    """Return how far the enumeration is off the target's law at most, and the number of outcomes.

    Let E(x) be the chance that what a step emits begins with x, and F(x) that it goes on behind x. Exact is the rule
    for which E(x·y) = F(x)·p(y | x) for all x and y.
    """
    ends: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for chance, step in steps:
        for num_accepted, prob in enumerate(step.probs):
            for token in np.flatnonzero(step.laws[num_accepted] * prob).tolist():
                weight = chance * float(prob) * float(step.laws[num_accepted, token])
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
