"""What a user may choose about sampling, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard, cast, get_args

from localspec.errors import InvalidOptionError

__all__ = ["LLAMACPP_DEFAULTS", "Rule", "SamplingParams", "check_rule", "is_number"]

Rule = Literal["token", "block"]
"""How drafted tokens are verified; both are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a law is made from logits; the default is the model's own distribution, untouched.

    Applied in llama.cpp's order: top-k, top-p, min-p, and temperature last, so that top-p and min-p look at
    the probabilities at temperature 1.

    Attributes:
        temperature: 0, or 1e-5 and more; divides the logits. 0 is greedy: the likeliest token, the lowest id
            among equals.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach top_p; in (0, 1], 1 keeps
            all.
        min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1], 0 keeps all.

    Raises:
        InvalidOptionError: a value is out of range, not finite or of the wrong type.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, low=0.0, high=1e6, remedy="0 is greedy, 0.8 is usual")
        if 0 < self.temperature < 1e-5:
            raise InvalidOptionError(f"temperature is {self.temperature!r}; use 0 for greedy, or 1e-5 and more")
        _check("top_p", self.top_p, low=0.0, high=1.0, low_open=True, remedy="1 switches it off")
        _check("min_p", self.min_p, low=0.0, high=1.0, remedy="0 switches it off")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InvalidOptionError(f"top_k is {self.top_k!r}; use a whole number, 0 switches it off")

    @property
    def greedy(self) -> bool:
        """Whether every law is a point mass."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens may be cut off, which makes laws sparse."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_rule(rule: str) -> Rule:
    """Return ``rule`` if it names a verification rule, else raise InvalidOptionError."""
    for known in get_args(Rule):
        if rule == known:
            return cast(Rule, known)
    raise InvalidOptionError(f"rule is {rule!r}; use one of {', '.join(get_args(Rule))}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite int or float (bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: object, *, low: float, high: float, low_open: bool = False, remedy: str) -> None:
    inside = is_number(value) and (low < value if low_open else low <= value) and value <= high
    if not inside:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise InvalidOptionError(f"{name} is {value!r}; use a value in {interval} ({remedy})")


LLAMACPP_DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""What llama.cpp's own tools use when nothing is said; the command line does the same."""
