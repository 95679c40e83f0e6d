"""A context whose passes take the time a table says, on a clock that nothing else moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Span
from tests.fakes import FakeContext, MarkovModel


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedContext(FakeContext):
    """A fake whose passes take ``seconds(num_tokens, depth, threads)``, with noise around it.

    Attributes:
        log: number of tokens of every pass.
        ids: that were read.
    """

    def __init__(
        self,
        clock: FakeClock,
        seconds: Callable[[int, int, int], float],
        *,
        capacity: int = 2048,
        noise: float = 0.0,
        seed: int = 0,
        kept: Sequence[int] | None = None,
    ) -> None:
        super().__init__(MarkovModel.random(1, 4, order=1), capacity=capacity, chunk=128, kept=kept)
        self.clock = clock
        self.seconds = seconds
        self.noise = noise
        self.threads = 1
        self.log: list[int] = []
        self.ids: set[int] = set()
        self._random = Random(seed)

    def set_threads(self, threads: int) -> None:
        self.threads = threads

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        (span,) = batch
        self.log.append(len(span.tokens))
        self.ids |= {*span.tokens}
        seconds = self.seconds(len(span.tokens), self.length(span.sequence), self.threads)
        # Disturbances only ever slow a pass down, some of them a lot.
        slow = self._random.random() * self.noise * (10 if self._random.random() < 0.1 else 1)
        self.clock.now += seconds * (1 + slow)
        return super().decode(batch)
