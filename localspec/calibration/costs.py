"""Seconds of a pass over n tokens, measured on this machine, and the settings under which it is fastest.

Everything is measured in turn: a round visits every size once, in random order, so that a slow minute of the machine
falls on all of them alike. A visit runs its pass a few times and leaves the first out, because llama.cpp builds its
graph anew whenever the size changes, which a step that repeats its size does not pay for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, pi, sqrt
from random import Random
from statistics import median
from time import perf_counter
from typing import Protocol

from localspec.backend import Context, FlashAttention, Span
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.drafters import ids_with_logits, read_ahead
from localspec.errors import InvalidOptionError

__all__ = [
    "DEFAULT_DEPTHS",
    "MeasuredCosts",
    "PassLoad",
    "Setting",
    "SettingCost",
    "TunableContext",
    "choose_setting",
    "measure_costs",
    "thread_candidates",
]

DEFAULT_DEPTHS = (64, 1024)

_RUNS = 3  # of a pass in one visit; the first is not counted
_MIN_ROUNDS = 3  # fewer are no measurement
_SURE_ROUNDS = 6  # fewer may agree by chance, so that their spread is not believed
_ENOUGH = 0.005  # standard error of a median, as a share of it, at which a size is left alone
_SETTING_MARGIN = 0.03  # what a setting must gain to replace the default one
_SEED = 20240901

Clock = Callable[[], float]
Progress = Callable[[float], None]
"""Called with the share of the time budget that is used up."""


@dataclass(frozen=True, slots=True)
class PassLoad:
    """Passes to measure on one context.

    Attributes:
        context: the model; its sequence 0 is emptied before and after.
        sizes: numbers of tokens.
        rows: how many rows of logits a pass over n tokens asks for. Where that is fewer than n, passes without rows
            are measured as well, which is what all but the last of several passes are.
    """

    context: Context
    sizes: Sequence[int]
    rows: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What was measured.

    Attributes:
        curves: one for each load.
        interrupted: whether the user ended it early; what is here was measured as always, with fewer trials.
    """

    curves: tuple[CostCurves, ...]
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """How passes are run."""

    threads: int
    flash_attention: FlashAttention


@dataclass(frozen=True, slots=True)
class SettingCost:
    """What the passes of one setting cost together: the sum of their medians, and its standard error, in seconds."""

    setting: Setting
    seconds: float
    spread_s: float


class TunableContext(Context, Protocol):
    """A context that can change its number of threads."""

    def set_threads(self, threads: int) -> None:
        """Use so many threads from the next pass on."""


def measure_costs(
    loads: Sequence[PassLoad],
    *,
    depths: Sequence[int] = DEFAULT_DEPTHS,
    budget_s: float,
    progress: Progress | None = None,
    clock: Clock = perf_counter,
) -> MeasuredCosts:
    """Measure the passes of all loads, in turn, at every depth that their contexts have room for.

    The first depth gets its least number of rounds whatever the budget, later ones only what time is left; a depth
    that does not get that many is left out. An interrupt ends the measurement and keeps what is complete.

    Args:
        loads: what to measure; a target and its draft together, as they run.
        depths: tokens in the cache; one that a cache has no room for is replaced by the deepest it has.
        budget_s: about how long it may take, filling the caches included.
        progress: told how the time passes.
        clock: gives seconds.

    Raises:
        InvalidOptionError: no sizes or depths, or a context too small for the largest size.
        KeyboardInterrupt: the interrupt came before the first depth was complete.
    """
    usable = _usable_depths(loads, depths)
    started = clock()
    measured: list[tuple[int, list[list[_Series]]]] = []
    interrupted = False
    try:
        for i, depth in enumerate(usable):
            deadline = started + budget_s * (i + 1) / len(usable)
            for context in {id(load.context): load.context for load in loads}.values():
                _fill(context, depth)
            series = [_series_of(load) for load in loads]
            measured.append((depth, series))
            watch = _Watch(started, budget_s, deadline, progress, clock)
            _rounds([_Group([s for one in series for s in one])], watch, forced=i == 0)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for load in loads:
            load.context.truncate(0, 0)
    complete = [(depth, series) for depth, series in measured if all(s.complete for one in series for s in one)]
    if not complete:
        raise KeyboardInterrupt
    curves = [CostCurves(tuple(_curve(depth, series[i]) for depth, series in complete)) for i in range(len(loads))]
    return MeasuredCosts(tuple(curves), interrupted)


def choose_setting(
    contexts: Mapping[FlashAttention, Sequence[TunableContext]],
    *,
    threads: Sequence[int],
    sizes: Sequence[Sequence[int]],
    depth: int,
    budget_s: float,
    progress: Progress | None = None,
    clock: Clock = perf_counter,
) -> list[SettingCost]:
    """Compare attention kernels, then numbers of threads under the better one.

    The first kernel and the first number of threads are the defaults: something else must be faster by more than a
    margin and more than noise. The contexts are left empty and at the chosen number of threads.

    Args:
        contexts: by kernel, the contexts of target and draft (or of one model), on the same weights.
        threads: numbers of threads to try.
        sizes: for each of the contexts, the sizes of the passes that matter; of each all rows are asked for.
        depth: tokens in the cache while it is measured.
        budget_s: about how long it may take.
        progress: told how the time passes.
        clock: gives seconds.

    Returns:
        The settings that were measured, the chosen one first, then the others as they came.
    """
    kernels = list(contexts)
    started = clock()
    depth = min(
        depth, *(c.capacity - max(s) for kernel in kernels for c, s in zip(contexts[kernel], sizes, strict=True))
    )
    try:
        for context in (context for kernel in kernels for context in contexts[kernel]):
            _fill(context, depth)

        def compare(settings: Sequence[Setting], share: float) -> list[SettingCost]:
            groups = [_group_of(contexts[s.flash_attention], s.threads, sizes) for s in settings]
            _rounds(groups, _Watch(started, budget_s, started + share * budget_s, progress, clock), forced=True)
            return [SettingCost(s, *group.cost) for s, group in zip(settings, groups, strict=True)]

        by_kernel = compare([Setting(threads[0], kernel) for kernel in kernels], 0.5) if len(kernels) > 1 else []
        kernel = _choice(by_kernel).setting.flash_attention if by_kernel else kernels[0]
        by_threads = compare([Setting(count, kernel) for count in threads], 1.0)
        chosen = _choice(by_threads)
    finally:
        for context in (context for kernel in kernels for context in contexts[kernel]):
            context.truncate(0, 0)
    for context in contexts[kernel]:
        context.set_threads(chosen.setting.threads)
    known = {cost.setting: cost for cost in (*by_kernel, *by_threads)}  # the later of two measurements counts
    return [chosen, *(cost for setting, cost in known.items() if setting != chosen.setting)]


def thread_candidates(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads worth trying: ``cores``, half of them, and so on down to 1.

    >>> thread_candidates(6)
    (6, 3, 1)
    """
    return (cores, *thread_candidates(cores // 2)) if cores > 1 else (1,)


def _choice(costs: Sequence[SettingCost]) -> SettingCost:
    default = costs[0]
    best = min(costs, key=lambda cost: cost.seconds)
    gain = default.seconds - best.seconds
    sure = max(_SETTING_MARGIN * default.seconds, 2 * hypot(default.spread_s, best.spread_s))
    return best if gain > sure else default


@dataclass(slots=True)
class _Series:
    """The trials of passes of one size on one context."""

    context: Context
    tokens: list[int]
    rows: int
    trials: list[float] = field(default_factory=list)

    def visit(self, clock: Clock) -> None:
        depth = self.context.length(0)
        times = []
        for _ in range(_RUNS):
            started = clock()
            self.context.decode([Span(0, self.tokens, self.rows)])
            times.append(clock() - started)
            self.context.truncate(0, depth)
        self.trials += times[1:]

    @property
    def complete(self) -> bool:
        return len(self.trials) >= _MIN_ROUNDS * (_RUNS - 1)

    @property
    def cost(self) -> PassCost:
        middle = median(self.trials)
        deviation = median(abs(trial - middle) for trial in self.trials)
        # As for normal trials: 1.4826 makes a standard deviation of the median one, √(π/2) is the price of a median.
        spread = 1.4826 * deviation * sqrt(pi / 2 / len(self.trials))
        return PassCost(len(self.tokens), self.rows, middle, spread, len(self.trials))


@dataclass(slots=True)
class _Group:
    """Series that are visited one after the other, once what they have in common is set."""

    series: list[_Series]
    prepare: Callable[[], None] = lambda: None

    @property
    def complete(self) -> bool:
        return all(series.complete for series in self.series)

    @property
    def cost(self) -> tuple[float, float]:
        costs = [series.cost for series in self.series]
        return sum(cost.seconds for cost in costs), hypot(*(cost.spread_s for cost in costs))


@dataclass(frozen=True, slots=True)
class _Watch:
    """The time that is left."""

    started: float
    budget_s: float
    deadline: float
    progress: Progress | None
    clock: Clock

    def expired(self) -> bool:
        now = self.clock()
        if self.progress:
            self.progress(min(1.0, (now - self.started) / self.budget_s) if self.budget_s > 0 else 1.0)
        return now >= self.deadline


def _rounds(groups: Sequence[_Group], watch: _Watch, *, forced: bool) -> None:
    """Visit all series in rounds until every median is good enough or the time is up.

    Time counts only once all are complete, if ``forced``.
    """
    random = Random(_SEED)
    while True:
        open_groups = [(group, [s for s in group.series if not _good_enough(s)]) for group in groups]
        open_groups = [(group, series) for group, series in open_groups if series]
        if not open_groups:
            return
        for group, series in random.sample(open_groups, len(open_groups)):
            group.prepare()
            for one in random.sample(series, len(series)):
                if watch.expired() and not (forced and not all(group.complete for group in groups)):
                    return
                one.visit(watch.clock)


def _good_enough(series: _Series) -> bool:
    sure = len(series.trials) >= _SURE_ROUNDS * (_RUNS - 1)
    return sure and series.cost.spread_s <= _ENOUGH * series.cost.seconds


def _series_of(load: PassLoad) -> list[_Series]:
    """Return a series for each size; and one without rows, if an evaluation of several tokens asks for fewer rows."""
    sizes = sorted(set(load.sizes))
    asked = [(size, load.rows(size)) for size in sizes]
    silent = [(size, 0) for size in sizes] if any(rows < size for size, rows in asked) else []
    return [_Series(load.context, _tokens(load.context, size), rows) for size, rows in (*asked, *silent)]


def _curve(depth: int, series: Sequence[_Series]) -> CostCurve:
    costs = [one.cost for one in series]
    sizes = {cost.num_tokens for cost in costs}
    return CostCurve(depth, tuple(costs[: len(sizes)]), tuple(costs[len(sizes) :]))


def _group_of(contexts: Sequence[TunableContext], threads: int, sizes: Sequence[Sequence[int]]) -> _Group:
    def prepare() -> None:
        for context in contexts:
            context.set_threads(threads)

    loads = [PassLoad(context, own, lambda n: n) for context, own in zip(contexts, sizes, strict=True)]
    return _Group([series for load in loads for series in _series_of(load)], prepare)


def _usable_depths(loads: Sequence[PassLoad], depths: Sequence[int]) -> list[int]:
    if not loads or not depths or not all(load.sizes for load in loads):
        raise InvalidOptionError("there is nothing to measure; name a model, a size and a depth at least")
    room = min(load.context.capacity - max(load.sizes) for load in loads)
    if room < 0 or min(depths) < 0 or min(min(load.sizes) for load in loads) < 1:
        raise InvalidOptionError(
            f"passes of {sorted({size for load in loads for size in load.sizes})} tokens at depths {list(depths)} do"
            f" not fit a context of {min(load.context.capacity for load in loads)} tokens; use a larger --ctx"
        )
    return sorted({min(depth, room) for depth in depths})


def _fill(context: Context, depth: int) -> None:
    context.truncate(0, 0)
    read_ahead(context, 0, _tokens(context, depth))


def _tokens(context: Context, count: int) -> list[int]:
    """Return arbitrary ids, the same ones each time: a mixture of experts would treat equal ones too alike."""
    return Random(_SEED).choices(ids_with_logits(context), k=count)
