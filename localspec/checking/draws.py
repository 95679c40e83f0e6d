"""Whether the verification that draws decides as the enumeration of the same step says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.sampling import Law, verification_law, verify_laws

__all__ = ["TOLERANCE", "EnumeratedStep", "wrong_draws"]

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""What is as good as 0 in an enumeration."""

_NEVER = 1 - 2.0**-53  # passes only what surely passes


@dataclass(frozen=True, slots=True)
class EnumeratedStep:
    """One way to draft, and what the rule makes of it.

    Attributes:
        rule: "token" or "block".
        drafted: γ token ids.
        p: target laws, γ+1 of them.
        q: draft laws.
        probs: of 0, 1, … accepted tokens, [γ+1].
        laws: of the next token in each case, [γ+1, V].
        near: how close to a threshold a uniform is put.
        least: decisions and outcomes of a smaller chance are left out.
    """

    rule: str
    drafted: tuple[int, ...]
    p: Sequence[Law]
    q: Sequence[Law]
    probs: Floats
    laws: Floats
    near: float
    least: float

    @classmethod
    def of(
        cls,
        rule: str,
        drafted: tuple[int, ...],
        p: Sequence[Law],
        q: Sequence[Law],
        size: int,
        *,
        near: float = 1e-12,
        least: float = TOLERANCE,
    ) -> EnumeratedStep:
        """Enumerate a step, of a vocabulary of ``size`` tokens, with ``verification_law``."""
        dense = [np.array([law.dense(size) for law in laws]) for laws in (p, q)]
        probs, laws = verification_law(dense[0], dense[1], drafted, rule)
        return cls(rule, drafted, p, q, probs, laws, near, least)


def wrong_draws(step: EnumeratedStep, most: int = 1000) -> Iterator[str | None]:
    """Yield, for uniforms at both sides of every threshold, what is wrong about the decision, or None.

    So also at both ends of the share of the next law that a token has, for ``most`` tokens of each.
    """
    yield from _wrong_decisions(step)
    yield from _wrong_tokens(step, most)


@dataclass(frozen=True, slots=True)
class _Given:
    """Uniforms that are given."""

    values: Sequence[float]

    def random(self, size: int, /) -> Floats:
        return np.array(self.values[:size])


def _draw(step: EnumeratedStep, uniforms: Sequence[float]) -> tuple[int, int]:
    result = verify_laws(step.p, step.q, step.drafted, rule=step.rule, uniforms=_Given(uniforms))
    return result.num_accepted, result.next_token


def _thresholds(step: EnumeratedStep) -> dict[int, float]:
    """Return below which uniform each position passes, from 1, as far as it is ever asked."""
    found, rest = {}, 1.0
    if step.rule == "token":
        for i in range(1, len(step.drafted) + 1):
            survives = float(step.probs[i:].sum())
            found[i] = min(1.0, survives / rest)
            rest = survives
            if rest < step.least:
                break
        return found
    for i in range(len(step.drafted), 0, -1):
        found[i] = min(1.0, float(step.probs[i]) / rest)
        rest -= float(step.probs[i])
        if rest < step.least:
            break
    return found


def _uniforms(step: EnumeratedStep, num_accepted: int) -> list[float]:
    """Return uniforms, without the last one, at which so many drafted tokens are accepted."""
    if step.rule == "token":
        return [0.0 if i <= num_accepted else _NEVER for i in range(1, len(step.drafted) + 1)]
    return [0.0 if i == num_accepted else _NEVER for i in range(1, len(step.drafted) + 1)]


def _wrong_decisions(step: EnumeratedStep) -> Iterator[str | None]:
    thresholds = _thresholds(step)
    for i, threshold in thresholds.items():
        others = _uniforms(step, i)
        above = threshold + step.near if threshold > 0 else 0.0
        for passes, uniform in ((True, threshold - step.near), (False, above)):
            if not 0 <= uniform < 1:
                continue
            accepted, _ = _draw(step, [*others[: i - 1], uniform, *others[i:], 0.5])
            if (accepted >= i) != passes:
                verb = "not accepted" if passes else "accepted"
                yield f"drafted token {i} was {verb} at a uniform of {uniform:.6f}, its threshold is {threshold:.6f}"
            else:
                yield None


def _wrong_tokens(step: EnumeratedStep, most: int) -> Iterator[str | None]:
    for num_accepted, prob in enumerate(step.probs):
        if prob < step.least:
            continue
        others = _uniforms(step, num_accepted)
        edges = np.concatenate([[0.0], np.cumsum(step.laws[num_accepted])])
        tokens = np.flatnonzero(step.laws[num_accepted] > 4 * step.near)
        for token in tokens[:: len(tokens) // most + 1].tolist():
            for uniform in (edges[token] + step.near, edges[token + 1] - step.near):
                drawn = _draw(step, [*others, float(uniform)])
                if drawn != (num_accepted, token):
                    yield (
                        f"after {num_accepted} accepted tokens a uniform of {uniform:.6f} gave {drawn}, which the"
                        f" enumeration gives to {(num_accepted, token)}"
                    )
                else:
                    yield None
