"""The exact verification rules: drafted tokens in, accepted tokens and the next one out.

*Accepted* tokens are drafted tokens that stand; the *recovered* token is drawn from the residual after a
rejection; the *bonus* token is drawn from p after full acceptance. The rules leave the output distributed as
the target's alone (token rule: Leviathan et al., arXiv 2211.17192; block rule: Sun et al., arXiv 2403.10444);
the coupled rule makes it the very text that plain sampling with the same noise gives (Daliri et al.,
arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localspec.errors import InvalidOptionError
from localspec.sampling.laws import DenseLaw, Law, SparseLaw, residual
from localspec.sampling.noise import PositionNoise, Uniforms
from localspec.wording import shown

__all__ = ["Verification", "verification_law", "verify", "verify_coupled", "verify_laws"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a step keeps.

    Attributes:
        num_accepted: how many drafted tokens stand, 0..γ.
        next_token: the recovered token, or after full acceptance the bonus token.
    """

    num_accepted: int
    next_token: int


def verify_laws(
    p: Sequence[Law], q: Sequence[Law], drafted: Sequence[int], *, rule: str, uniforms: Uniforms
) -> Verification:
    """Verify γ drafted tokens.

    Args:
        p: target laws, γ+1 of them. Items are asked for only when the rule needs them, so that a
            sequence that makes its laws on demand saves work.
        q: the laws the drafted tokens were drawn from, γ of them.
        drafted: γ token ids.
        rule: "token" or "block".
        uniforms: γ+1 numbers are taken from it.
    """
    num_drafted = len(drafted)
    u = uniforms.random(num_drafted + 1)
    scale = 1.0
    # With point masses both rules are the same, and the token rule needs no residuals.
    if rule == "token" or all(isinstance(law, SparseLaw) and len(law.ids) == 1 for law in q):
        num_accepted = 0
        while num_accepted < num_drafted:
            token = drafted[num_accepted]
            # Strictly less: with <= a token of target probability 0 would pass at u = 0.
            if not u[num_accepted] * q[num_accepted].prob(token) < p[num_accepted].prob(token):
                break
            num_accepted += 1
    else:
        scales = _block_scales(p, q, drafted)
        # The largest i that passes wins: scan from the far end, where the residuals before it are not needed.
        num_accepted = len(scales) - 1
        while num_accepted and not u[num_accepted - 1] < _block_pass(p, q, scales, num_accepted):
            num_accepted -= 1
        scale = scales[num_accepted]
    return Verification(num_accepted, _next_law(p, q, num_accepted, scale).draw(float(u[-1])))


def verify_coupled(p: Sequence[Law], drafted: Sequence[int], *, seed: int, position: int) -> Verification:
    """Keep the drafted tokens that the target draws itself, with noise that belongs to the position.

    The result does not depend on the draft but for how many tokens come out at once; it is exact for any draft,
    and a draft that draws with the same noise agrees often: with probability Σₓ 1 / Σ_y max(p_y/pₓ, q_y/qₓ).

    Args:
        p: target laws, γ+1 of them, asked for only as far as needed.
        drafted: γ token ids.
        seed: of the noise.
        position: absolute position of the first drafted token.
    """
    for i, token in enumerate(drafted):
        own = p[i].race(PositionNoise(seed, position + i))
        if own != token:
            return Verification(i, own)
    return Verification(len(drafted), p[len(drafted)].race(PositionNoise(seed, position + len(drafted))))


def verification_law(
    p: ArrayLike, q: ArrayLike, drafted: Sequence[int], rule: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the law that ``verify`` samples from, without sampling.

    Args:
        p: target laws, [γ+1, V], rows summing to 1.
        q: draft laws, [γ, V], rows summing to 1.
        drafted: γ token ids.
        rule: "token" or "block".

    Returns:
        The probabilities of 0..γ accepted tokens, float64 [γ+1], and the law of the next token for each of
        these cases, float64 [γ+1, V].

    Raises:
        InvalidOptionError: shapes do not fit, an entry is negative or not finite, or the rule is unknown.

    >>> probs, laws = verification_law([[0.5, 0.5], [1, 0]], [[1.0, 0.0]], [0], "token")
    >>> probs, laws[0]
    (array([0.5, 0.5]), array([0., 1.]))
    """
    _check_sampling_rule(rule)
    p_laws, q_laws, size = _checked(p, q, drafted)
    num_drafted = len(drafted)
    if rule == "token":
        passes = [_token_pass(p_laws[i], q_laws[i], drafted[i]) for i in range(num_drafted)]
        reached = np.cumprod([1.0, *passes])
        probs = reached * (1.0 - np.array([*passes, 0.0]))
        scales = [1.0] * (num_drafted + 1)
    else:
        scales = _block_scales(p_laws, q_laws, drafted)
        scales += [0.0] * (num_drafted + 1 - len(scales))
        block = [1.0, *(_block_pass(p_laws, q_laws, scales, i) for i in range(1, num_drafted + 1))]
        later_fail = np.cumprod([1.0, *(1.0 - h for h in block[:0:-1])])[::-1]
        probs = np.array(block) * later_fail
    laws = [_next_law(p_laws, q_laws, i, scales[i]).dense(size) for i in range(num_drafted + 1)]
    return probs, np.stack(laws)


def verify(p: ArrayLike, q: ArrayLike, drafted: Sequence[int], rule: str, rng: Uniforms) -> Verification:
    """Verify γ drafted tokens against dense laws; arguments and errors as ``verification_law``.

    Args:
        p: target laws, [γ+1, V].
        q: draft laws, [γ, V].
        drafted: γ token ids.
        rule: "token" or "block".
        rng: a ``numpy.random.Generator``, or anything with its ``random(size)``.
    """
    _check_sampling_rule(rule)
    p_laws, q_laws, _ = _checked(p, q, drafted)
    return verify_laws(p_laws, q_laws, drafted, rule=rule, uniforms=rng)


def _token_pass(p: Law, q: Law, token: int) -> float:
    """Return min(1, p(x)/q(x)): the probability that u·q(x) < p(x)."""
    p_x, q_x = p.prob(token), q.prob(token)
    return 1.0 if p_x >= q_x and p_x > 0 else p_x / q_x if q_x > 0 else 0.0


def _block_scales(p: Sequence[Law], q: Sequence[Law], drafted: Sequence[int]) -> list[float]:
    """Return P[0..γ]: P[0] = 1, P[i] = min(1, P[i−1]·p_i(X_i)/q_i(X_i)); the zeros at the end are left out.

    A prefix with P = 0 does not pass, so laws after it are not asked for.
    """
    scales = [1.0]
    for i, token in enumerate(drafted):
        p_x, q_x = scales[-1] * p[i].prob(token), q[i].prob(token)
        if not p_x > 0:
            break
        scales.append(1.0 if p_x >= q_x else p_x / q_x)
    return scales


def _block_pass(p: Sequence[Law], q: Sequence[Law], scales: Sequence[float], i: int) -> float:
    """Return h_i, the probability that the prefix of length i ≥ 1 passes."""
    if i == len(q) or scales[i] == 0:
        return scales[i]
    rest = residual(p[i], q[i], scales[i])
    mass = rest[1] if rest else 0.0
    lacking = 1.0 - scales[i]
    return mass / (mass + lacking) if mass + lacking > 0 else 1.0


def _next_law(p: Sequence[Law], q: Sequence[Law], num_accepted: int, scale: float) -> Law:
    """Return the law of the token after ``num_accepted`` accepted ones."""
    if num_accepted == len(q):
        return p[num_accepted]
    rest = residual(p[num_accepted], q[num_accepted], scale)
    # Nothing left over means p and q agree to rounding, and then p is what the residual tends to.
    return rest[0] if rest else p[num_accepted]


def _check_sampling_rule(rule: str) -> None:
    if rule not in ("token", "block"):
        raise InvalidOptionError(f"rule is {shown(rule)}; use one of token, block")


def _rows(values: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"{name} is not an array of numbers: {error}") from None


def _checked(p: ArrayLike, q: ArrayLike, drafted: Sequence[int]) -> tuple[list[Law], list[Law], int]:
    p_rows, q_rows = _rows(p, "p"), _rows(q, "q")
    num_drafted = len(drafted)
    if p_rows.ndim != 2 or p_rows.shape[0] != num_drafted + 1:
        raise InvalidOptionError(
            f"p has shape {p_rows.shape}; {num_drafted} drafted tokens need ({num_drafted + 1}, V)"
        )
    size = p_rows.shape[1]
    if q_rows.size == 0 and num_drafted == 0:
        q_rows = q_rows.reshape(0, size)
    if q_rows.shape != (num_drafted, size):
        raise InvalidOptionError(f"q has shape {q_rows.shape}; it must be ({num_drafted}, {size}) to fit p")
    for name, rows in (("p", p_rows), ("q", q_rows)):
        sums = rows.sum(axis=1)
        if not (np.isfinite(rows).all() and (rows >= 0).all() and np.allclose(sums, 1.0, atol=1e-6)):
            raise InvalidOptionError(f"a row of {name} is not a law: entries must be ≥ 0 and sum to 1")
    if any(not hasattr(token, "__index__") or not 0 <= token < size for token in drafted):
        raise InvalidOptionError(f"drafted is {list(drafted)}; ids must lie in 0..{size - 1}")
    return [DenseLaw.of(row) for row in p_rows], [DenseLaw.of(row) for row in q_rows], size
