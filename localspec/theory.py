"""Closed forms of speculative decoding on plain floats: what to expect, and how much to draft.

Symbols are those of ``docs/how-it-works.md``, which also derives every formula:

* ``acceptance_rate`` α in [0, 1]: the chance that a drafted token is accepted.
* ``num_draft_tokens`` γ: tokens drafted in a step; a step emits between 1 and γ + 1 tokens.
* ``cost_ratio`` c in [0, 1]: time of one draft pass / time of one target pass over one token.
* ``verify_cost`` v: v[n - 1] is the time of one target pass over n tokens / its time over one token.
  ``None`` means that checking γ + 1 tokens costs no more than one, which is rarely true on a CPU.

Every function raises :class:`~localspec.errors.InvalidOptionError` for a value out of range.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import SupportsFloat, SupportsIndex

from localspec.errors import InvalidOptionError
from localspec.wording import counted

__all__ = [
    "batch_throughput",
    "best_num_draft_tokens",
    "ceiling",
    "continuous_optimum",
    "expected_tokens",
    "near_best",
    "speedup",
    "speedup_from_tokens",
]

# How far a measured v(1) may be from the 1 it is by definition, before it must be another unit.
_UNIT_TOLERANCE = 0.1

# Beyond any use, and small enough that a list over all draft lengths still fits in memory.
_MAX_COUNT = 1_000_000


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens a step emits on average, 1 + α + … + α^γ, when each draft is accepted with chance α.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return _expected_tokens(_acceptance_rate(acceptance_rate), _count(num_draft_tokens, "num_draft_tokens"))


def speedup(
    acceptance_rate: float,
    num_draft_tokens: int,
    cost_ratio: float,
    verify_cost: Sequence[float] | None = None,
) -> float:
    """Speed relative to plain decoding, ``E[tokens] / (γ·c + v(γ + 1))``; exactly 1 without a draft.

    ``verify_cost`` needs at least γ + 1 entries; more are ignored.

    >>> round(speedup(0.8, 5, 0.1), 2)
    2.46
    """
    alpha = _acceptance_rate(acceptance_rate)
    gamma = _count(num_draft_tokens, "num_draft_tokens")
    cost = _cost_ratio(cost_ratio)
    passes = _verify_cost(verify_cost, gamma)
    return _ratio(_expected_tokens(alpha, gamma), gamma, cost, passes, 0.0)


def best_num_draft_tokens(
    acceptance_rate: float,
    cost_ratio: float,
    max_draft_tokens: int = 12,
    verify_cost: Sequence[float] | None = None,
) -> tuple[int, float]:
    """Return the fastest γ in 0..``max_draft_tokens`` and its speedup; the smallest among equals.

    All are tried, because a measured ``verify_cost`` has steps. γ = 0, with speedup exactly 1, says
    that speculation does not pay.

    >>> best_num_draft_tokens(0.8, 0.1)[0]
    6
    """
    alpha = _acceptance_rate(acceptance_rate)
    limit = _count(max_draft_tokens, "max_draft_tokens")
    tokens = [_expected_tokens(alpha, gamma) for gamma in range(limit + 1)]
    speedups = speedup_from_tokens(tokens, cost_ratio, verify_cost)
    best = max(range(limit + 1), key=lambda gamma: (speedups[gamma], -gamma))
    return best, speedups[best]


def speedup_from_tokens(
    tokens_per_step: Sequence[float],
    cost_ratio: float,
    verify_cost: Sequence[float] | None = None,
    sampler_cost: float = 0.0,
) -> tuple[float, ...]:
    """Speedups for γ = 0, 1, … from measured tokens per step, ``E(γ) / (γ·c + s + v(γ + 1))``.

    ``tokens_per_step[γ]`` is between 1 and γ + 1 (so entry 0 is 1). ``sampler_cost`` s is the time of
    sampling in a speculative step beyond that of a plain one, in target passes over one token.

    >>> speedup_from_tokens([1.0, 1.5], 0.0, [1.0, 1.25])
    (1.0, 1.2)
    """
    if len(tokens_per_step) == 0:
        raise InvalidOptionError("tokens_per_step is empty; it starts with the 1 token of a plain step")
    tokens = [_number(value, f"tokens_per_step[{gamma}]") for gamma, value in enumerate(tokens_per_step)]
    for gamma, value in enumerate(tokens):
        # The slack is for rounding in whoever measured; the largest error it lets through is no more.
        if not 1 - 1e-9 <= value <= (gamma + 1) * (1 + 1e-9):
            raise InvalidOptionError(
                f"tokens_per_step[{gamma}] is {value!r}; a step that drafts {gamma} emits 1 to {gamma + 1}"
            )
    cost = _cost_ratio(cost_ratio)
    extra = _not_negative(sampler_cost, "sampler_cost")
    passes = _verify_cost(verify_cost, len(tokens) - 1)
    return tuple(_ratio(value, gamma, cost, passes, extra) for gamma, value in enumerate(tokens))


def continuous_optimum(acceptance_rate: float, cost_ratio: float) -> float:
    """Return the real γ ≥ 0 at which ``E[tokens] / (γ·c + 1)`` peaks, verification being free.

    ``math.inf`` where longer is always better: α = 1 with c < 1, or c = 0 with α > 0.

    With L = −ln α the peak satisfies ``α^(γ+1)·(L·(c·γ + 1) + c) = c``. Substituting
    u = 1 + L·(γ + 1/c) gives ``u − ln u = 1 + K``, K = L·(1 − c)/c: u = −W₋₁(−e^(−1−K)), the lower real
    branch of Lambert's function. Solved here for z = ln u, because then γ = z/L − 1 without the
    cancellation of 1/c that the textbook form has.

    >>> round(continuous_optimum(0.8, 0.1), 3)
    5.756
    """
    alpha, cost = _acceptance_rate(acceptance_rate), _cost_ratio(cost_ratio)
    if alpha == 0 or cost == 1:
        return 0.0
    if alpha == 1 or cost == 0:
        return math.inf
    decay = -math.log(alpha)
    log_excess = math.log(decay) + math.log1p(-cost) - math.log(cost)
    # Above e^700 the linear terms of e^z − 1 − z = K are far below rounding.
    z = log_excess if log_excess > 700 else _solve_exp_excess(math.exp(log_excess))
    return max(0.0, z / decay - 1)


def ceiling(acceptance_rate: float) -> float:
    """Tokens per step, and so speedup, that no draft length and no free draft can pass: 1/(1 − α).

    >>> ceiling(0.5)
    2.0
    """
    alpha = _acceptance_rate(acceptance_rate)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def near_best(speedups: Sequence[float], tolerance: float = 0.03) -> tuple[int, ...]:
    """Return every γ whose speedup is within ``tolerance`` (a fraction) of the best one's.

    >>> near_best([1.0, 1.98, 2.0, 1.5])
    (1, 2)
    """
    if len(speedups) == 0:
        raise InvalidOptionError("speedups is empty; it holds one value for each draft length from 0")
    values = [_not_negative(value, f"speedups[{gamma}]") for gamma, value in enumerate(speedups)]
    floor = max(values) * (1 - _fraction(tolerance, "tolerance"))
    return tuple(gamma for gamma, value in enumerate(values) if value >= floor)


def batch_throughput(
    acceptance_rate: float,
    num_draft_tokens: int,
    batch_size: int,
    *,
    target_pass_s: Callable[[int], float],
    draft_pass_s: Callable[[int], float],
) -> float:
    """Tokens per second of B sequences together, ``B·E(γ) / (t(B·(γ + 1)) + γ·t_draft(B))``.

    ``target_pass_s(n)`` and ``draft_pass_s(n)`` give the seconds of one pass over n tokens.

    >>> batch_throughput(0.5, 1, 2, target_pass_s=lambda n: 0.1 * n, draft_pass_s=lambda n: 0.1)
    6.0
    """
    alpha = _acceptance_rate(acceptance_rate)
    gamma = _count(num_draft_tokens, "num_draft_tokens")
    batch = _count(batch_size, "batch_size")
    if batch == 0:
        raise InvalidOptionError("batch_size is 0; a batch has at least one sequence")
    seconds = _not_negative(target_pass_s(batch * (gamma + 1)), f"target_pass_s({batch * (gamma + 1)})")
    if gamma:
        seconds += gamma * _not_negative(draft_pass_s(batch), f"draft_pass_s({batch})")
    if seconds == 0:
        raise InvalidOptionError("the passes take 0 seconds; throughput needs a positive time")
    return batch * _expected_tokens(alpha, gamma) / seconds


def _expected_tokens(alpha: float, gamma: int) -> float:
    if gamma == 0 or alpha == 0:
        return 1.0
    if alpha == 1:
        return gamma + 1.0
    # 1 − α^(γ+1) by subtraction would lose every digit as α approaches 1.
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def _ratio(tokens: float, gamma: int, cost: float, passes: Sequence[float] | None, extra: float) -> float:
    if gamma == 0:
        return 1.0  # plain decoding is the unit, whatever was measured for one token
    return tokens / (gamma * cost + extra + (1.0 if passes is None else passes[gamma]))


def _solve_exp_excess(excess: float) -> float:
    """Return z ≥ 0 with e^z − 1 − z = ``excess``."""
    # e^z − 1 − z ≥ z²/2 bounds z from above, and z = ln(1 + K + z) tightens it; from above, Newton's
    # steps on this convex function descend to the root and never pass it.
    z = math.log1p(excess + math.sqrt(2 * excess))
    for _ in range(60):
        if z == 0:
            break
        step = (_exp_excess(z) - excess) / math.expm1(z)
        z -= step
        if abs(step) <= 1e-15 * z:
            break
    return z


def _exp_excess(z: float) -> float:
    """e^z − 1 − z for z ≥ 0, to rounding also where both terms nearly cancel."""
    if z > 1:
        return math.expm1(z) - z
    term, total = z * z / 2, 0.0
    for k in range(3, 24):
        total += term
        term *= z / k
    return total


def _number(value: SupportsFloat, name: str) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidOptionError(f"{name} is {value!r}; it must be a finite number")
    return number


def _not_negative(value: SupportsFloat, name: str) -> float:
    number = _number(value, name)
    if number < 0:
        raise InvalidOptionError(f"{name} is {value!r}; it cannot be negative")
    return number


def _fraction(value: SupportsFloat, name: str) -> float:
    number = _number(value, name)
    if not 0 <= number <= 1:
        raise InvalidOptionError(f"{name} is {value!r}; it must be between 0 and 1")
    return number


def _acceptance_rate(value: SupportsFloat) -> float:
    return _fraction(value, "acceptance_rate")


def _cost_ratio(value: SupportsFloat) -> float:
    number = _not_negative(value, "cost_ratio")
    if number > 1:
        raise InvalidOptionError(
            f"cost_ratio is {value!r}; it is draft time / target time, between 0 and 1. "
            f"Target / draft = {number:g} means a cost ratio of {1 / number:.3g}"
        )
    return number


def _count(value: SupportsIndex, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidOptionError(f"{name} is {value!r}; it must be a whole number")
    number = operator.index(value)
    if not 0 <= number <= _MAX_COUNT:
        raise InvalidOptionError(f"{name} is {number}; it must be between 0 and {_MAX_COUNT}")
    return number


def _verify_cost(values: Sequence[float] | None, gamma: int) -> list[float] | None:
    if values is None:
        return None
    if not hasattr(values, "__len__"):
        raise InvalidOptionError(f"verify_cost is {values!r}; it must be a list of numbers, or None")
    costs = [_number(value, f"verify_cost[{index}]") for index, value in enumerate(values)]
    if len(costs) < gamma + 1:
        raise InvalidOptionError(
            f"verify_cost has {counted(len(costs), 'number')}; drafting {counted(gamma, 'token')} needs"
            f" {gamma + 1}, the cost of a target pass over 1 to {gamma + 1} tokens"
        )
    for index, cost in enumerate(costs):
        if cost <= 0:
            raise InvalidOptionError(f"verify_cost[{index}] is {cost!r}; the cost of a pass is above 0")
    if abs(costs[0] - 1) > _UNIT_TOLERANCE:
        raise InvalidOptionError(
            f"verify_cost[0] is {costs[0]!r}; the unit is a pass over one token, so it must be 1. "
            "Divide the measured times by the first one"
        )
    return costs
