"""What a step costs beside its passes: laws, draws, the rule, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Context, Span
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import InvalidOptionError
from localspec.generation import Request
from localspec.policy import FixedPolicy
from localspec.profile import SamplerCost
from localspec.sampling import SamplingParams
from localspec.wording import counted

__all__ = ["measure_sampler"]

_SHORT, _LONG = 2, 6  # draft lengths between which the cost of a drafted token shows
_WARM_UP_STEPS = 2  # the first reads the prompt into the target, the second into the draft


def measure_sampler(
    target: Context,
    draft: Context,
    *,
    prompt: Sequence[int],
    params: SamplingParams,
    num_steps: int = 12,
    seed: int = 0,
    clock: Callable[[], float] = perf_counter,
) -> SamplerCost:
    """Generate from ``prompt`` plainly and with drafts of two lengths, and time what is not inside a pass.

    Args:
        target: the target; both contexts are left empty.
        draft: the draft.
        prompt: token ids.
        params: how laws are made, which is most of the cost.
        num_steps: timed for each of the three.
        seed: of the noise.
        clock: gives seconds.

    Raises:
        InvalidOptionError: the context has no room for the steps.
    """
    if len(prompt) + (_LONG + 1) * (num_steps + _WARM_UP_STEPS) >= target.capacity:
        raise InvalidOptionError(
            f"{counted(num_steps, 'step')} and a prompt of {counted(len(prompt), 'token')} do not fit a context of"
            f" {target.capacity} tokens; use a larger --ctx"
        )

    def per_step(num_draft_tokens: int) -> float:
        request = Request(
            prompt=prompt,
            params=params,
            max_tokens=target.capacity,
            seed=seed,
            policy=FixedPolicy(num_draft_tokens),
        )
        return _beside_passes(target, draft, request, num_steps, clock)

    try:
        plain, short, long = per_step(0), per_step(_SHORT), per_step(_LONG)
    finally:
        target.truncate(0, 0)
        draft.truncate(0, 0)
    each = max(0.0, (long - short) / (_LONG - _SHORT))
    return SamplerCost(plain_s=plain, step_s=max(0.0, short - _SHORT * each), draft_s=each)


def _beside_passes(
    target: Context, draft: Context, request: Request, num_steps: int, clock: Callable[[], float]
) -> float:
    """Return the median seconds of a step that are spent outside passes."""
    contexts = _Stopwatch(target, clock), _Stopwatch(draft, clock)
    drafter = ModelDrafter(contexts[1], vocabulary_size=target.vocabulary_size, ends_generation=_never)
    engine = Engine(contexts[0], drafter, ends_generation=_never)
    generation = engine.start(request)
    times = []
    for _ in range(_WARM_UP_STEPS + num_steps):
        before, started = sum(context.seconds for context in contexts), clock()
        engine.step([generation])
        inside = sum(context.seconds for context in contexts) - before
        times.append(clock() - started - inside)
    return float(np.median(times[_WARM_UP_STEPS:]))


def _never(token: int) -> bool:
    return False


@dataclass(slots=True)
class _Stopwatch:
    """A context that adds up the seconds of its passes."""

    context: Context
    clock: Callable[[], float]
    seconds: float = 0.0

    @property
    def vocabulary_size(self) -> int:
        return self.context.vocabulary_size

    @property
    def capacity(self) -> int:
        return self.context.capacity

    @property
    def num_sequences(self) -> int:
        return self.context.num_sequences

    @property
    def chunk(self) -> int:
        return self.context.chunk

    @property
    def length(self) -> Callable[[int], int]:
        return self.context.length

    @property
    def truncate(self) -> Callable[[int, int], None]:
        return self.context.truncate

    @property
    def copy(self) -> Callable[[int, int, int], None]:
        return self.context.copy

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        started = self.clock()
        try:
            return self.context.decode(batch)
        finally:
            self.seconds += self.clock() - started
