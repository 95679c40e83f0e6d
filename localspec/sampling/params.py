"""What a user may choose about sampling, validated once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal, TypeGuard, cast, get_args

import numpy as np

from localspec.errors import InvalidOptionError
from localspec.wording import shown

__all__ = [
    "LLAMACPP_DEFAULTS",
    "Rule",
    "SamplerOrder",
    "SamplingParams",
    "Stage",
    "check_rule",
    "draft_params",
    "is_number",
]

Rule = Literal["token", "block", "coupled"]
"""How drafted tokens are verified; all are exact."""

SamplerOrder = Literal["llamacpp", "huggingface"]
"""Whose order the chain follows: see ``SamplingParams``."""

Stage = Literal["top_k", "typical_p", "top_p", "min_p"]
"""A step of the chain that cuts tokens off."""

_STAGES: Mapping[SamplerOrder, tuple[Stage, ...]] = {
    "llamacpp": ("top_k", "typical_p", "top_p", "min_p"),
    "huggingface": ("top_k", "top_p", "min_p", "typical_p"),
}
_MAX_BIAS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a law is made from logits; the default is the model's own distribution, untouched.

    Applied in this order: logit bias and bans, penalties, top-k, typical-p, top-p, min-p, and temperature last, as
    llama.cpp does, so that the cuts look at probabilities at temperature 1. With ``sampler_order="huggingface"``
    temperature comes right after the penalties, and the cuts are top-k, top-p, min-p, typical-p.
    ``docs/sampling.md`` has the details.

    Attributes:
        temperature: 0, or 1e-5 and more; divides the logits. 0 is greedy: the likeliest token, the lowest id
            among equals.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach top_p; in (0, 1], 1 keeps
            all.
        min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1], 0 keeps all.
        typical_p: keep the tokens whose surprise is closest to the entropy, until their probabilities exceed
            typical_p; in (0, 1], 1 keeps all.
        repetition_penalty: a logit of a recent token is divided by it if positive, multiplied by it if not; in
            [0.01, 100], 1 is off.
        frequency_penalty: taken off a recent token's logit once per occurrence; in [−100, 100].
        presence_penalty: taken off a recent token's logit once; in [−100, 100].
        penalty_last_n: how many tokens are recent, the prompt's included; None counts all.
        logit_bias: pairs of a token id and what is added to its logit, within ±1e6; a mapping is taken too. Kept
            sorted.
        banned: ids that are never sampled; kept sorted.
        sampler_order: "llamacpp" or "huggingface".

    Raises:
        InvalidOptionError: a value is out of range, not finite or of the wrong type, or two contradict.

    >>> SamplingParams(temperature=0.7, logit_bias={11: -2, 7: 1.5}).logit_bias
    ((7, 1.5), (11, -2.0))
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int | None = 64
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    sampler_order: SamplerOrder = "llamacpp"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):  # numpy's numbers are as good, but JSON and hashes want Python's
                object.__setattr__(self, field.name, value.item())
        _check("temperature", self.temperature, low=0.0, high=1e6, remedy="0 is greedy, 0.8 is usual")
        if 0 < self.temperature < 1e-5:
            raise InvalidOptionError(f"temperature is {shown(self.temperature)}; use 0 for greedy, or 1e-5 and more")
        for name in ("top_p", "typical_p"):
            _check(name, getattr(self, name), low=0.0, high=1.0, low_open=True, remedy="1 switches it off")
        _check("min_p", self.min_p, low=0.0, high=1.0, remedy="0 switches it off")
        if not _is_count(self.top_k):
            raise InvalidOptionError(f"top_k is {shown(self.top_k)}; use a whole number, 0 switches it off")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            low=0.01,  # far below, positive logits overflow
            high=100.0,
            remedy="1 switches it off, 1.1 is usual",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), low=-100.0, high=100.0, remedy="0 switches it off")
        if self.penalty_last_n is not None and not _is_count(self.penalty_last_n):
            raise InvalidOptionError(
                f"penalty_last_n is {shown(self.penalty_last_n)}; use a whole number, or None for all"
            )
        if self.penalty_last_n == 0 and self.penalises:
            raise InvalidOptionError("penalties that look at the last 0 tokens do nothing; set penalty_last_n")
        if self.sampler_order not in list(_STAGES):  # what cannot be hashed is no order either
            raise InvalidOptionError(f"sampler_order is {shown(self.sampler_order)}; use one of {', '.join(_STAGES)}")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "banned", _ids("banned", self.banned))
        if both := {token for token, _ in self.biases} & set(self.banned):
            raise InvalidOptionError(f"token {shown(min(both))} is banned and has a logit_bias; give one of them")

    @property
    def greedy(self) -> bool:
        """Whether every law is a point mass."""
        return self.temperature == 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The steps that cut tokens off and are switched on, in order."""
        active = {
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
        }
        return tuple(stage for stage in _STAGES[self.sampler_order] if active[stage])

    @property
    def truncates(self) -> bool:
        """Whether tokens may be cut off, which makes laws sparse."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def penalises(self) -> bool:
        """Whether laws depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check_ids(self, vocabulary_size: int) -> None:
        """Raise InvalidOptionError if a bias or a ban is about an id outside the vocabulary."""
        ids = [*(token for token, _ in self.biases), *self.banned]
        if ids and max(ids) >= vocabulary_size:
            raise InvalidOptionError(
                f"token {shown(max(ids))} cannot be biased or banned; this model's ids end at {vocabulary_size - 1}"
            )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)


def check_rule(rule: str) -> Rule:
    """Return ``rule`` if it names a verification rule, else raise InvalidOptionError."""
    for known in get_args(Rule):
        if rule == known:
            return cast(Rule, known)
    raise InvalidOptionError(f"rule is {shown(rule)}; use one of {', '.join(get_args(Rule))}")


def draft_params(params: SamplingParams, temperature: float) -> SamplingParams:
    """Return what a draft's laws are made with where only its temperature differs from the target's.

    Raises:
        InvalidOptionError: it is no temperature.
    """
    try:
        return replace(params, temperature=temperature)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"draft_{error}") from None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite int or float (bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(name: str, value: object, *, low: float, high: float, low_open: bool = False, remedy: str) -> None:
    inside = is_number(value) and (low < value if low_open else low <= value) and value <= high
    if not inside:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise InvalidOptionError(f"{name} is {shown(value)}; use a value in {interval} ({remedy})")


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = (
        list(given.items()) if isinstance(given, Mapping) else list(given) if isinstance(given, Iterable) else None
    )
    if pairs is None or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise InvalidOptionError(f"logit_bias is {shown(given)}; use pairs of a token id and a number")
    ids = _ids("logit_bias", [token for token, _ in pairs])
    for token, bias in pairs:
        if not is_number(bias) or abs(bias) > _MAX_BIAS:
            raise InvalidOptionError(
                f"logit_bias of token {shown(token)} is {shown(bias)}; use a number within ±{_MAX_BIAS:g}, or ban the"
                " token"
            )
    values = {token: float(bias) for token, bias in pairs}
    return tuple((token, values[token]) for token in ids)


def _ids(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise InvalidOptionError(f"{name} is {shown(given)}; use token ids")
    ids = list(given)
    for token in ids:
        if not _is_count(token):
            raise InvalidOptionError(f"{name} holds {shown(token)}; use token ids, whole numbers from 0")
    if len(set(ids)) < len(ids):
        repeated = next(token for token, following in pairwise(sorted(ids)) if token == following)
        raise InvalidOptionError(f"{name} names token {shown(repeated)} twice; name it once")
    return tuple(sorted(ids))


LLAMACPP_DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""What llama.cpp's own tools use when nothing is said; the command line does the same."""
