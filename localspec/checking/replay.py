"""Whether whole generations of the engine have the target's law, on recorded rows whose law is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from localspec.checking.evidence import SHIFTS, Bet, evidence, growth, moments, pearson, shifts, smallest_shift
from localspec.checking.findings import Allowance, Finding
from localspec.checking.rows import KEPT, PROMPT, START, RecordedRows, RowContext, reference_law
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.generation import Generation, Request
from localspec.policy import FixedPolicy, Policy, StepOutcome
from localspec.sampling import Rule, SamplingParams

__all__ = ["THRESHOLD", "check_replay"]

THRESHOLD = 20_000.0
"""Evidence at which a sequence of bets counts as a fault: a sound build gets there once in so many runs at most."""

_ODDS_OF_CHI_SQUARE = 5e-5 / 3  # over all replays; it may be understated threefold, see ``evidence.pearson``
_LENGTH = 4  # tokens of a text, after the start symbol
_DRAFTED = 3
_SEQUENCES = 16
_BATCHES = 8  # of so many texts in a row, of one setting
_FEWEST = 4  # rounds over all settings
_SEEDS = 1_000_000  # of each replay, so that none uses another's

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _WhileSure:
    """Draft on while the draft's law is confident: what a policy may look at, and nothing else."""

    limit: int = _DRAFTED
    lookup_limit: int = 0

    def plan(self, depth: int) -> _WhileSure:
        return self

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def copies(self, chances: Sequence[float]) -> int:
        return 0

    def runs(self, num_lacking: int = 1) -> bool:
        return True

    def draws(self, confidence: Callable[[], float]) -> bool:
        return confidence() > 0.45


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    params: SamplingParams
    draft_params: SamplingParams
    policy: Policy


@dataclass(slots=True)
class _Replay:
    """One rule under one setting, and what came of it."""

    number: int
    rule: Rule
    setting: _Setting
    engine: Engine
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    bets: tuple[Bet, ...] = field(default_factory=lambda: tuple(Bet() for _ in SHIFTS))
    differing: int = 0

    @property
    def name(self) -> str:
        return f"{self.rule} rule, {self.setting.name}"


def check_replay(rows: RecordedRows, temperature: float, allowance: Allowance, *, seed: int) -> Finding:
    """Let the engine generate short texts from recorded rows, and compare with their exact law.

    Under every rule; once plainly, once with penalties, a draft of another temperature and a policy that looks at
    the draft's confidence. The law is enumerated from ``reference_law`` without any speculation. Under the coupled
    rule every text must moreover be the one that plain decoding gives at the same seed.
    """
    references = {setting.name: _Reference(rows, setting.params) for setting in _settings(temperature)}
    kinds = itertools.product(_settings(temperature), get_args(Rule))
    replays = [_Replay(number, rule, setting, _engine(rows)) for number, (setting, rule) in enumerate(kinds)]
    batches = 0
    while True:
        for replay in replays:
            for _ in range(_BATCHES):
                _run(replay, references[replay.setting.name], seed)
        batches += 1
        if not allowance.goes_on() and batches >= _FEWEST:
            break
    return _verdict(replays, references, rows)


def _settings(temperature: float) -> tuple[_Setting, ...]:
    plain = SamplingParams(temperature=temperature, top_k=KEPT)
    penalised = SamplingParams(
        temperature=temperature, top_k=KEPT, repetition_penalty=1.2, presence_penalty=0.8, penalty_last_n=None
    )
    hotter = SamplingParams(temperature=min(1.5 * temperature, 1e6), top_k=KEPT)
    return (
        _Setting("plain", plain, plain, FixedPolicy(_DRAFTED)),
        _Setting("penalties, hotter draft", penalised, hotter, _WhileSure()),
    )


def _engine(rows: RecordedRows) -> Engine:
    capacity = _LENGTH + 2
    target, draft = (
        RowContext(rows, table, capacity=capacity, num_sequences=_SEQUENCES) for table in (rows.target, rows.draft)
    )
    drafter = ModelDrafter(draft, vocabulary_size=target.vocabulary_size, ends_generation=lambda token: False)
    return Engine(target, drafter, ends_generation=lambda token: False)


@dataclass(frozen=True, slots=True)
class _Position:
    """Everything about the token after one prefix: what each symbol adds to every bet."""

    law: Floats
    growth: tuple[Floats, ...]  # of each shift, [symbols, stakes]
    moments: tuple[tuple[tuple[float, float], ...], ...]  # of each shift and symbol


class _Reference:
    """The exact law of texts, by plain multiplication."""

    def __init__(self, rows: RecordedRows, params: SamplingParams) -> None:
        self._rows = rows
        self._params = params
        self._positions: dict[tuple[int, ...], _Position] = {}

    def after(self, prefix: tuple[int, ...]) -> _Position:
        """Return the law of the symbol after ``prefix``, which begins behind the start symbol."""
        if prefix not in self._positions:
            history = [PROMPT, START, *prefix]
            place = self._rows.place(history)
            law = reference_law(self._rows.target[place], self._params, history)
            q = reference_law(self._rows.draft[place], self._params, history)
            functions = shifts(law, q)
            self._positions[prefix] = _Position(
                law,
                tuple(growth(law, values) for values in functions),
                tuple(tuple(moments(law, values, token) for token in range(len(law))) for values in functions),
            )
        return self._positions[prefix]

    def texts(self) -> dict[tuple[int, ...], float]:
        """Return the law of whole texts."""
        joint: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(_LENGTH):
            joint = {
                (*prefix, int(token)): weight * float(self.after(prefix).law[token])
                for prefix, weight in joint.items()
                for token in np.flatnonzero(self.after(prefix).law)
            }
        return joint


def _run(replay: _Replay, reference: _Reference, seed: int) -> None:
    first = seed + replay.number * _SEEDS + replay.counts.total()
    setting = replay.setting

    def requests(policy: Policy) -> list[Request]:
        return [
            Request(
                prompt=[PROMPT],
                params=setting.params,
                draft_params=setting.draft_params,
                max_tokens=1 + _LENGTH,
                seed=first + i,
                rule=replay.rule,
                policy=policy,
            )
            for i in range(_SEQUENCES)
        ]

    texts = _generate(replay.engine, requests(setting.policy))
    if replay.rule == "coupled":
        plain = _generate(replay.engine, requests(FixedPolicy(0)))
        replay.differing += sum(a != b for a, b in zip(texts, plain, strict=True))
    for text in texts:
        replay.counts[text] += 1
        for i, token in enumerate(text):
            position = reference.after(text[:i])
            if not position.law[token] > 0:
                break  # Pearson's test knows what to make of the impossible
            for bet, grown, moment in zip(replay.bets, position.growth, position.moments, strict=True):
                bet.settle(grown[token], *moment[token])


def _generate(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    generations = [engine.start(request, i) for i, request in enumerate(requests)]

    def running() -> list[Generation]:
        return [g for g in generations if g.finish_reason is None]

    while active := running():
        engine.step(active)
    return [tuple(g.tokens[1:]) for g in generations]  # the first is the start symbol


def _verdict(replays: Sequence[_Replay], references: dict[str, _Reference], rows: RecordedRows) -> Finding:
    problems = []
    laws = {name: reference.texts() for name, reference in references.items()}
    for replay in replays:
        p_value = pearson(replay.counts, laws[replay.setting.name])
        if p_value < _ODDS_OF_CHI_SQUARE / len(replays):
            problems.append(f"{replay.name}: texts do not have their law (p = {p_value:.1g})")
        if replay.differing:
            problems.append(f"{replay.name}: {replay.differing} texts are not those of plain decoding")
    named = [(replay.name, shift, bet) for replay in replays for shift, bet in zip(SHIFTS, replay.bets, strict=True)]
    # What is broken is mostly so under every rule: the sequences one after the other show it sooner.
    for i, shift in enumerate(SHIFTS):
        named.append(("all rules", shift, reduce(Bet.joined, [replay.bets[i] for replay in replays])))
    bets = [bet for *_, bet in named]
    found = evidence(bets)
    if found >= THRESHOLD:
        name, shift, strongest = max(named, key=lambda entry: float(entry[2].log_capital.max()))
        more = "more" if strongest.total > 0 else "less"
        problems.append(f"{name}: tokens {shift} come out {more} often than they should (Z {strongest.z:+.1f})")
    tokens = sum(replay.counts.total() for replay in replays) * _LENGTH
    noticed = smallest_shift(bets[-len(SHIFTS)], len(bets), THRESHOLD)
    summary = (
        f"the engine on recorded rows (mean total variation of the pair {rows.variation:.2f}), three rules, with"
        f" and without penalties: {tokens} tokens follow their exact law, largest |Z|"
        f" {max(abs(bet.z) for bet in bets):.1f}; coupled texts are those of plain decoding. A shift"
        f" of {noticed:.1%} towards the draft would be noticed"
    )
    odds = 1 / THRESHOLD + 3 * _ODDS_OF_CHI_SQUARE
    return Finding(
        part="replay", passed=not problems, summary=summary, false_alarm=odds, problems=tuple(problems[:4])
    )
