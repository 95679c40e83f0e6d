"""Whether laws over the whole vocabulary, and draws from them, are what they should be: nothing is left to chance.

With few tokens everything can be enumerated; but then laws are short lists, and what adds up, subtracts and draws
from 150,000 entries is other code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localspec.checking.draws import EnumeratedStep, wrong_draws
from localspec.checking.findings import Allowance
from localspec.checking.rows import WholeRows
from localspec.sampling import DenseLaw, Law, PositionNoise, SamplingParams, SparseLaw, make_law

__all__ = ["whole_faults"]

# Weights are float32: what they are rounded by adds up to less than a tenth of _NEAR, over a whole vocabulary too.
_NEAR = 1e-4
_LEAST = 1e-2
_TOKENS = 6  # of each law, that are drawn on purpose
_RACES = 4


@dataclass(frozen=True, slots=True)
class _Case:
    """Laws of a step, as the engine would make them."""

    name: str
    tokens: tuple[int, ...]
    p: Sequence[Law]
    q: Sequence[Law]
    rules: Sequence[str] = ("token", "block")


def whole_faults(rows: Sequence[WholeRows], params: SamplingParams, allowance: Allowance) -> Iterator[str | None]:
    """Yield, for everything that is tried, what is wrong about it, or None.

    Laws against a plain softmax, or those over kept ids with those over all; draws of the rules at their thresholds,
    as ``wrong_draws``; the winner of a race for shared noise against every other token.

    Args:
        rows: where; one at least is looked at.
        params: the user's settings; they are tried as they are, and with nothing cut off.
        allowance: the time for it.
    """
    uncut = replace(params, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
    for number, row in enumerate(rows):
        if number and not allowance.goes_on():
            break
        for settings in (params, uncut):
            wrong = list(_wrong_laws(row, settings))
            yield from wrong
            if any(wrong):
                continue  # what is no law cannot be enumerated
            for case in _cases(row, settings):
                size = row.target.shape[1]
                for rule in case.rules:
                    step = EnumeratedStep.of(rule, case.tokens, case.p, case.q, size, near=_NEAR, least=_LEAST)
                    for fault in wrong_draws(step, _TOKENS):
                        yield fault and f"{rule} rule, {case.name}: {fault}"
                for law in (case.p[0], case.q[0]):
                    yield from (_wrong_race(law, position) for position in range(_RACES))


def _cases(rows: WholeRows, params: SamplingParams) -> Iterator[_Case]:
    p = [make_law(row, params) for row in rows.target]
    q = [_drafted(rows, row, params) for row in rows.draft]
    size = rows.target.shape[1]
    # The tokens that the draft overrates most: others may never be rejected where the two models are close.
    overrated = tuple(int((b.dense(size) - a.dense(size)).argmax()) for a, b in zip(p, q, strict=False))
    yield _Case("whole rows", overrated, p, q)
    # Of copies the block rule makes no more than the token rule.
    yield _Case("copies", rows.tokens, p, [SparseLaw.point(token) for token in rows.tokens], ("token",))


def _drafted(rows: WholeRows, row: NDArray[np.float32], params: SamplingParams) -> Law:
    """Return the law of the draft as a drafter makes it: over the ids that there are logits for."""
    if rows.kept is None:
        return make_law(row, params)
    return rows.kept.make_law(row[rows.kept.ids[: rows.kept.columns_below(len(row))]], params)


def _wrong_laws(rows: WholeRows, params: SamplingParams) -> Iterator[str | None]:
    for name, table in (("target", rows.target), ("draft", rows.draft)):
        for row in table:
            law = make_law(row, params) if name == "target" else _drafted(rows, row, params)
            plain = not params.stages and not params.biases and not params.banned
            expected = _softmax(row, params.temperature) if plain else make_law(row, params).dense(len(row))
            error = float(np.abs(law.dense(len(row)) - expected).sum())
            yield (
                None
                if error <= _NEAR
                else f"a law of the {name} over {len(row)} tokens is {error:.2g} off what its logits say"
            )


def _softmax(row: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    weights = np.exp((row.astype(np.float64) - float(row.max())) / temperature)
    softmax: NDArray[np.float64] = weights / weights.sum()
    return softmax


def _wrong_race(law: Law, position: int) -> str | None:
    """Return what is wrong about who wins a race, by asking everyone for their noise."""
    weights = law.weights.astype(np.float64) if isinstance(law, DenseLaw) else law.probs
    ids = np.arange(len(weights)) if isinstance(law, DenseLaw) else law.ids
    noise = PositionNoise(0, position)
    with np.errstate(divide="ignore", over="ignore"):
        first = int(ids[(noise.at(ids) / weights).argmin()])
    won = law.race(noise)
    return None if won == first else f"token {won} won a race for shared noise that {first} should win"
