"""Random numbers that are a function of where they are used, not of what was drawn before.

Every number is a hash of (seed, position, stream, index). Generation therefore does not depend on how many
numbers other sequences consumed, and a run can be resumed anywhere. A decoding step takes the absolute
position at which it starts; since every step emits at least one token, no two steps of a sequence share it.
The coupled rule takes numbers by the position of the token itself and by token id.
"""

from __future__ import annotations

import hashlib
import operator
import secrets
from enum import IntEnum
from typing import Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from localspec.errors import InvalidOptionError
from localspec.wording import shown

__all__ = ["GROUP", "PositionNoise", "StepNoise", "Stream", "Uniforms", "check_seed", "fresh_seed", "record_seed"]

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15

GROUP = 64
"""Neighbouring ids whose least noise is known without asking for each of them."""


class Stream(IntEnum):
    """What the numbers are for; different streams are independent."""

    DRAFT = 1
    VERIFY = 2
    TOKEN = 3
    TOKEN_GROUP = 4


class Uniforms(Protocol):
    """The part of ``numpy.random.Generator`` that verification needs."""

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Return ``size`` independent uniforms in [0, 1), float64."""


class StepNoise:
    """The uniforms of one decoding step: [0, 1), float64, 53 bits.

    Args:
        seed: any integer; its low 64 bits count.
        position: absolute position of the first token the step decides.
        stream: what the numbers are for.
    """

    __slots__ = ("_index", "_key")

    def __init__(self, seed: int, position: int, stream: Stream) -> None:
        self._key = _key(seed, position, stream)
        self._index = 0

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Return the next ``size`` uniforms in [0, 1), float64 [size]."""
        return np.array([self.next() for _ in range(size)])

    def next(self) -> float:
        """Return the next uniform in [0, 1)."""
        self._index += 1
        return (_mix(self._key + self._index * _GOLDEN) >> 11) * 2.0**-53


class PositionNoise:
    """The noise of one position of a sequence, by token id: independent exponentials E(x) of mean 1, float64.

    −log E(x) is Gumbel noise, so the x with the least E(x)/p(x) is a draw from p. E(x) does not depend on which
    other ids take part: two laws that share noise often draw the same token, whatever either cuts off.

    The least of ``GROUP`` exponentials is an exponential of 1/GROUP that mean, any of them has it with the same
    chance, and the others exceed it by exponentials again. So one hash gives the least of a group and who has it,
    and a race over a whole vocabulary asks only for groups that can win.

    Args:
        seed: any integer; its low 64 bits count.
        position: absolute position of the token to be drawn.
    """

    __slots__ = ("_group_key", "_token_key")

    def __init__(self, seed: int, position: int) -> None:
        self._token_key = np.uint64(_key(seed, position, Stream.TOKEN))
        self._group_key = np.uint64(_key(seed, position, Stream.TOKEN_GROUP))

    def least(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the least E of each group [n], and the id that has it; group g holds ids from g·GROUP on."""
        bits = _hashes(self._group_key, groups)
        owner = (bits & np.uint64(GROUP - 1)).astype(np.int64)  # the exponential uses higher bits
        return _exponentials(bits) / GROUP, groups * GROUP + owner

    def at(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return E of the ids [n], all ≥ 0."""
        least, owners = self.least(ids // GROUP)
        return least + np.where(ids == owners, 0.0, _exponentials(_hashes(self._token_key, ids)))


def fresh_seed() -> int:
    """Return a seed nobody chose, short enough to be typed again (32 bits)."""
    return secrets.randbits(32)


def check_seed(value: SupportsIndex) -> int:
    """Return a whole number of any kind, numpy's too, as Python's: hashing needs more than 64 bits, JSON an int.

    Raises:
        InvalidOptionError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidOptionError(f"the seed is {shown(value)}; use a whole number") from None


def record_seed(seed: int, id: str) -> int:
    """Return the seed of the record ``id`` in a batch that has ``seed``: 53 bits, which JSON readers keep exact.

    BLAKE2b over the low 64 bits of the seed, little-endian, and the id in UTF-8. It depends on nothing else: neither
    on the order of records nor on what runs beside them, the platform or the version of Python.

    >>> record_seed(1, "a")
    4513573357067917
    """
    if not isinstance(id, str):
        raise InvalidOptionError(f"the id of a record is {shown(id)}; use a text")
    text = (seed & _MASK).to_bytes(8, "little") + id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11


def _key(seed: int, position: int, stream: Stream) -> int:
    return _mix(_mix(_mix(seed + _GOLDEN) ^ position) + stream * _GOLDEN)


def _mix(value: int) -> int:
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection on 64 bits that passes BigCrush.
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _hashes(key: np.uint64, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return ``_mix(key + (index + 1) * _GOLDEN)`` of every index [n]."""
    value = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _exponentials(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return exponentials of mean 1 from the high 53 bits of each number; above 0, since the least one decides."""
    with np.errstate(divide="ignore"):  # the largest of all 2^53 values is infinite: it never wins
        return -np.log1p(-((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)
