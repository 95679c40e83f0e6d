"""Noise is a function of (seed, position, stream, index): uniform, independent, and the same in every version."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from localspec.sampling import StepNoise, Stream, fresh_seed
from tests.stats import holm_rejects

GOLDEN = [
    [0.3660577160841394, 0.26405596930022257],
    [0.6216246963930894, 0.9268551749165478],
    [0.9522330857977865, 0.54381606169943],
]
EDGES = [0, 1, 2**32 - 1, 2**63, 2**64 - 1, 2**64, -1, 10**30]


def test_values_are_pinned() -> None:
    """A seed a user wrote down must keep its meaning; these numbers change only on purpose."""
    assert StepNoise(0, 0, Stream.DRAFT).random(2).tolist() == GOLDEN[0]
    assert StepNoise(42, 17, Stream.VERIFY).random(2).tolist() == GOLDEN[1]
    assert StepNoise(-1, 4096, Stream.DRAFT).random(2).tolist() == GOLDEN[2]


@pytest.mark.parametrize("seed", EDGES)
def test_any_integer_is_a_seed(seed: int) -> None:
    values = StepNoise(seed, 3, Stream.VERIFY).random(100)
    assert values.dtype == np.float64
    assert ((values >= 0) & (values < 1)).all()
    assert (values * 2**53 == np.floor(values * 2**53)).all()
    assert np.array_equal(values, StepNoise(seed % 2**64, 3, Stream.VERIFY).random(100)), "the low 64 bits count"


def test_a_call_continues_the_one_before() -> None:
    noise = StepNoise(9, 5, Stream.DRAFT)
    pieces = [noise.next(), *noise.random(3), noise.next(), *noise.random(0)]
    assert pieces == StepNoise(9, 5, Stream.DRAFT).random(5).tolist()


def test_nothing_repeats() -> None:
    keys = itertools.product(range(40), range(40), Stream)
    values = [value for key in keys for value in StepNoise(*key).random(8)]
    assert len(set(values)) == len(values) == 40 * 40 * len(Stream) * 8


def first(seeds: range | list[int], positions: range, stream: Stream, index: int = 0) -> NDArray[np.float64]:
    return np.array([StepNoise(s, p, stream).random(index + 1)[index] for s in seeds for p in positions])


SAMPLES = {
    "adjacent seeds": first(range(4096), range(7, 8), Stream.DRAFT),
    "adjacent seeds, verification": first(range(4096), range(7, 8), Stream.VERIFY),
    "adjacent positions": first([123], range(4096), Stream.DRAFT),
    "adjacent positions, verification": first([123], range(4096), Stream.VERIFY),
    "later numbers of adjacent positions": first([123], range(4096), Stream.VERIFY, 3),
    "seeds far apart": first([s << 48 for s in range(4096)], range(1, 2), Stream.DRAFT),
    "seeds and positions": first(range(64), range(64), Stream.DRAFT),
    "one long step": StepNoise(5, 5, Stream.DRAFT).random(4096),
}


def test_uniform() -> None:
    """Chi-square on 64 cells for each sample; false alarm 1e-3 over all of them."""
    p_values = {}
    for name, values in SAMPLES.items():
        counts = np.bincount((values * 64).astype(int), minlength=64)
        expected = len(values) / 64
        p_values[name] = float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 63))
    assert holm_rejects(p_values, 1e-3) == []


def test_neighbours_are_independent() -> None:
    """Chi-square on 8 × 8 cells of pairs: streams, seeds, positions and indices; false alarm 1e-3 over all."""
    positions = range(4096)
    pairs = {
        "streams": (first([3], positions, Stream.DRAFT), first([3], positions, Stream.VERIFY)),
        "seeds": (first([3], positions, Stream.DRAFT), first([4], positions, Stream.DRAFT)),
        "positions": (first([3], positions, Stream.DRAFT), first([3], range(1, 4097), Stream.DRAFT)),
        "indices": (first([3], positions, Stream.VERIFY, 0), first([3], positions, Stream.VERIFY, 1)),
        "index against position": (first([3], positions, Stream.DRAFT, 1), first([3], range(1, 4097), Stream.DRAFT)),
        "sign": tuple(first([s * i for i in range(1, 4097)], range(9, 10), Stream.DRAFT) for s in (1, -1)),
    }
    p_values = {}
    for name, (left, right) in pairs.items():
        cells = (left * 8).astype(int) * 8 + (right * 8).astype(int)
        counts = np.bincount(cells, minlength=64)
        p_values[name] = float(chi2.sf(((counts - 64) ** 2 / 64).sum(), 63))
    assert holm_rejects(p_values, 1e-3) == []


def test_fresh_seeds_can_be_typed() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) > 40
    assert all(0 <= seed < 2**32 for seed in seeds)
