"""Plain and speculative decoding in turn, on the same prompts, within one run.

A ratio of two sides measured in turn is a result; an absolute time on a machine that does other things is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

from localspec.calibration.prompts import POOLED, CalibrationPrompt, built_in_prompts
from localspec.errors import InvalidOptionError
from localspec.policy import check_num_draft_tokens
from localspec.sampling import LLAMACPP_DEFAULTS, Rule, SamplingParams
from localspec.session import Session

__all__ = ["BenchmarkSettings", "Cell", "Side", "Spread", "Timings", "alternate", "benchmark", "ratios"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several trials with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def alternate(
    sides: Mapping[str, Callable[[], float]],
    trials: int,
    *,
    warm_up: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run every side once to warm up, then ``trials`` rounds of all sides in turn; what they return, by side.

    Every other round goes backwards, so that a machine that slows down slows no side more than another.
    """
    for side in sides.values() if warm_up else ():
        side()
    results: dict[str, list[float]] = {name: [] for name in sides}
    for trial in range(trials):
        for name in _order(list(sides), trial):
            results[name].append(sides[name]())
        progress()
    return results


def _order(names: Sequence[str], trial: int) -> Sequence[str]:
    return names if trial % 2 == 0 else names[::-1]


def ratios(top: Sequence[float], bottom: Sequence[float]) -> Spread:
    """Return the spread of top/bottom, trial by trial."""
    return Spread.of([a / b for a, b in zip(top, bottom, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """What to time.

    Attributes:
        params: sampling settings; each of ``temperatures`` takes the place of theirs.
        temperatures: one or more.
        lengths: draft lengths beside plain decoding; None is what the session chooses itself.
        prompts: trial i of a kind runs the kind's prompt i.
        max_tokens: of an answer.
        trials: at most so many of each cell.
        budget_s: begin no further round that would probably end later than this; None for all trials.
        rule: under which drafts are verified.
    """

    params: SamplingParams = LLAMACPP_DEFAULTS
    temperatures: tuple[float, ...] = (0.0, LLAMACPP_DEFAULTS.temperature)
    lengths: tuple[int | None, ...] = (None, 2, 4)
    prompts: tuple[CalibrationPrompt, ...] = field(default_factory=built_in_prompts)
    max_tokens: int = 64
    trials: int = 5
    budget_s: float | None = None
    rule: Rule = "block"

    def __post_init__(self) -> None:
        if not self.temperatures or not self.lengths or not self.prompts:
            raise InvalidOptionError("there is nothing to time; give a temperature, a draft length and a prompt")
        for length in self.lengths:
            if length is not None and check_num_draft_tokens(length) == 0:
                raise InvalidOptionError("draft length 0 is plain decoding, which is always timed; leave it out")
        for name, value in (("max_tokens", self.max_tokens - 1), ("trials", self.trials)):
            if value < 1:
                raise InvalidOptionError(
                    f"{name} is {getattr(self, name)}; use {2 if name == 'max_tokens' else 1} or more"
                )
        for temperature in self.temperatures:
            replace(self.params, temperature=temperature)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to draft in one cell.

    Attributes:
        num_draft_tokens: per step; None where the session chose.
        tokens_per_s: after the first token.
        speedup: over plain decoding of the same prompts, trial by trial, after the first token.
        overall: the same of whole answers, with the reading of the prompt, which the draft has to do as well.
        tokens_per_step: emitted per target pass, over all trials.
        drafted_per_step: on average.
        predicted: the speedup that the pair's profile expects, if there is one.
    """

    num_draft_tokens: int | None
    tokens_per_s: Spread
    speedup: Spread
    overall: Spread
    tokens_per_step: float
    drafted_per_step: float
    predicted: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of text at one temperature.

    Attributes:
        kind: of text.
        temperature: of both models.
        trials: that every side ran.
        plain_tokens_per_s: without drafts.
        sides: as in ``BenchmarkSettings.lengths``.
    """

    kind: str
    temperature: float
    trials: int
    plain_tokens_per_s: Spread
    sides: tuple[Side, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """What was timed.

    Attributes:
        cells: those that have a speed.
        untimed: kind and temperature of the others, whose answers all ended at once.
        interrupted: whether the user ended it before all trials.
    """

    cells: tuple[Cell, ...]
    untimed: tuple[tuple[str, float], ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Trial:
    tokens_per_s: float
    tokens: int
    steps: int
    drafted: int
    overall_per_s: float


_Key = tuple[str, float]


def benchmark(
    session: Session,
    settings: BenchmarkSettings,
    *,
    progress: Callable[[str, float], None] = lambda kind, share: None,
) -> Timings:
    """Time a session's pair; whenever the budget ends, all cells have had about as many trials.

    An interrupt ends it as well, if every cell has been tried.

    Raises:
        InvalidOptionError: the session has no draft, or every answer ended at once.
        KeyboardInterrupt: it came before every cell was tried.
    """
    if session.pair.draft is None:
        raise InvalidOptionError("timing speculation needs a draft model; name one with --draft, or use --pair")
    kinds = dict.fromkeys(prompt.kind for prompt in settings.prompts)
    cells: dict[_Key, list[dict[int | None, _Trial]]] = {
        (kind, temperature): [] for kind in kinds for temperature in settings.temperatures
    }
    # Before anything is timed: graphs are built, and without a profile costs are measured.
    for length in settings.lengths:
        _run(session, settings, next(iter(cells)), 0, length, max_tokens=8)
    started = perf_counter()
    interrupted = False
    for trial in range(settings.trials):
        round_started = perf_counter()
        try:
            for number, (key, rounds) in enumerate(cells.items()):
                progress(key[0], (trial + number / len(cells)) / settings.trials)
                rounds.append(_round(session, settings, key, trial))
        except KeyboardInterrupt:
            if not trial:
                raise
            interrupted = True
            break
        now = perf_counter()
        if settings.budget_s is not None and now + (now - round_started) > started + settings.budget_s:
            break
    # An answer of a single token has no speed.
    timed = {
        key: [one for one in rounds if all(trial.tokens_per_s > 0 for trial in one.values())]
        for key, rounds in cells.items()
    }
    if not any(timed.values()):
        raise InvalidOptionError("every answer ended at once, so there is nothing to time; use other --prompts")
    return Timings(
        tuple(_cell(session, key, rounds, settings) for key, rounds in timed.items() if rounds),
        tuple(key for key, rounds in timed.items() if not rounds),
        interrupted,
    )


def _round(session: Session, settings: BenchmarkSettings, key: _Key, trial: int) -> dict[int | None, _Trial]:
    sides: list[int | None] = [0, *settings.lengths]
    if trial % 2:
        sides.reverse()
    return {length: _run(session, settings, key, trial, length, max_tokens=settings.max_tokens) for length in sides}


def _run(
    session: Session,
    settings: BenchmarkSettings,
    key: _Key,
    trial: int,
    num_draft_tokens: int | None,
    *,
    max_tokens: int,
) -> _Trial:
    kind, temperature = key
    prompts = [prompt.content for prompt in settings.prompts if prompt.kind == kind]
    session.clear()  # else the first side would read the prompt for the others
    stats = session.generate(
        prompts[trial % len(prompts)],
        replace(settings.params, temperature=temperature),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        seed=trial,
        rule=settings.rule,
    ).stats
    overall_per_s = stats.tokens / (stats.prefill_s + stats.wall_s)
    return _Trial(stats.tokens_per_s, stats.tokens, stats.steps, stats.drafted, overall_per_s)


def _cell(
    session: Session, key: _Key, timed: Sequence[dict[int | None, _Trial]], settings: BenchmarkSettings
) -> Cell:
    plain = [one[0].tokens_per_s for one in timed]
    plain_overall = [one[0].overall_per_s for one in timed]
    predicted = _predicted(session, key, settings.rule)

    def side(length: int | None) -> Side:
        trials = [one[length] for one in timed]
        steps = sum(trial.steps for trial in trials)
        speeds = [trial.tokens_per_s for trial in trials]
        return Side(
            length,
            Spread.of(speeds),
            ratios(speeds, plain),
            ratios([trial.overall_per_s for trial in trials], plain_overall),
            sum(trial.tokens for trial in trials) / steps,
            sum(trial.drafted for trial in trials) / steps,
            predicted(length),
        )

    return Cell(*key, len(timed), Spread.of(plain), tuple(side(length) for length in settings.lengths))


def _predicted(session: Session, key: _Key, rule: Rule) -> Callable[[int | None], float | None]:
    """Return what gives the profile's prediction for a length: for the kind of text, or else over all kinds.

    It has none for other rules than the block rule, which accept less.
    """
    profile = session.pair.profile.profile if rule == "block" else None
    verdicts = {(v.kind, v.temperature): v.predicted_speedup for v in profile.verdicts} if profile else {}
    speedups = verdicts.get(key) or verdicts.get((POOLED, key[1])) or ()

    def predicted(length: int | None) -> float | None:
        if length is None:
            return max(speedups, default=None)
        return speedups[length] if length < len(speedups) else None

    return predicted
