"""Random numbers that are a function of where they are used, not of what was drawn before.

Every uniform is a hash of (seed, position, stream, index). Generation therefore does not depend on how many
numbers other sequences consumed, and a run can be resumed anywhere. A decoding step takes the absolute
position at which it starts; since every step emits at least one token, no two steps of a sequence share it.
"""

from __future__ import annotations

import secrets
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepNoise", "Stream", "Uniforms", "fresh_seed"]

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


class Stream(IntEnum):
    """What the numbers are for; different streams are independent."""

    DRAFT = 1
    VERIFY = 2


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
        self._key = _mix(_mix(_mix(seed + _GOLDEN) ^ position) + stream * _GOLDEN)
        self._index = 0

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Return the next ``size`` uniforms in [0, 1), float64 [size]."""
        return np.array([self.next() for _ in range(size)])

    def next(self) -> float:
        """Return the next uniform in [0, 1)."""
        self._index += 1
        return (_mix(self._key + self._index * _GOLDEN) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """Return a seed nobody chose, short enough to be typed again (32 bits)."""
    return secrets.randbits(32)


def _mix(value: int) -> int:
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection on 64 bits that passes BigCrush.
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
