"""Whether whole generations of the engine have the target's law, on recorded rows whose law is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from localspec.checking.evidence import SHIFTS, Bet, evidence, pearson, shifts, smallest_shift
from localspec.checking.findings import Allowance, Finding
from localspec.checking.rows import KEPT, PROMPT, START, RecordedRows, RowContext, reference_law
from localspec.checking.steps import STEP_SHIFTS, Draws, Outcomes, StepBets, WatchedDrafter
from localspec.engine import Engine
from localspec.generation import Generation, Request
from localspec.lookup import LookupDrafter, LookupOrModel
from localspec.policy import EXPECTED_TOKENS, FixedPolicy, Policy, StepOutcome
from localspec.sampling import Rule, SamplingParams

__all__ = ["THRESHOLD", "check_replay"]

THRESHOLD = 20_000.0
"""Evidence at which a sequence of bets counts as a fault: a sound build gets there once in so many runs at most."""

_ODDS_OF_CHI_SQUARE = 5e-5 / 3  # over all replays; it may be understated threefold, see ``evidence.pearson``
_LENGTH = 4  # tokens of a text, after the start symbol
_DRAFTED = 3
_RECENT = 2  # tokens that penalties look at: fewer than a text has, so that they move on inside a step
_SEQUENCES = 16
_BATCHES = 8  # of so many texts in a row, of one setting
_FEWEST = 4  # rounds over all settings
_SEEDS = 1_000_000  # of each replay, so that none uses another's


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

    def runs(self, num_lacking: int = 1, num_unread: int = 0, num_expected: int = EXPECTED_TOKENS) -> bool:
        return True

    def draws(self, confidence: Callable[[], float]) -> bool:
        return confidence() > 0.45


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    reference: _Reference
    policy: Policy
    prompt: tuple[int, ...] = (PROMPT,)


@dataclass(slots=True)
class _Replay:
    """One rule under one setting, and what came of it."""

    number: int
    rule: Rule
    setting: _Setting
    engine: Engine
    drafter: WatchedDrafter
    steps: StepBets | None  # under the coupled rule nothing is left to chance given the drafts
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    bets: tuple[Bet, ...] = field(default_factory=lambda: tuple(Bet() for _ in SHIFTS))
    differing: int = 0

    @classmethod
    def of(cls, number: int, rule: Rule, setting: _Setting) -> _Replay:
        engine, drafter = _engine(setting.reference.rows, len(setting.prompt) + 1 + _LENGTH)
        return cls(number, rule, setting, engine, drafter, None if rule == "coupled" else StepBets(rule))

    @property
    def name(self) -> str:
        return f"{self.rule} rule, {self.setting.name}"

    @property
    def named_bets(self) -> Iterator[tuple[str, Bet]]:
        """All bets, with what they are about."""
        yield from ((f"tokens {shift}", bet) for shift, bet in zip(SHIFTS, self.bets, strict=True))
        if self.steps is not None:
            yield from zip(STEP_SHIFTS, self.steps.bets, strict=True)


def check_replay(rows: RecordedRows, temperature: float, allowance: Allowance, *, seed: int) -> Finding:
    """Let the engine generate short texts from recorded rows, and compare with their exact law.

    Under every rule; once plainly, once with penalties, once with a draft that disagrees and has another temperature
    and a policy that looks at its confidence, once with drafts copied from earlier text. The law is enumerated
    from ``reference_law`` without any speculation. Under token and block rule each step is looked at as well: see
    ``StepBets``. Under the coupled rule every text must be the one that plain decoding gives at the same seed.
    """
    kinds = itertools.product(_settings(rows, temperature), get_args(Rule))
    replays = [_Replay.of(number, rule, setting) for number, (setting, rule) in enumerate(kinds)]
    batches = 0
    while True:
        for replay in replays:
            for _ in range(_BATCHES):
                _run(replay, seed)
        batches += 1
        if not allowance.goes_on() and batches >= _FEWEST:
            break
    return _verdict(replays, rows)


def _settings(rows: RecordedRows, temperature: float) -> tuple[_Setting, ...]:
    plain = SamplingParams(temperature=temperature, top_k=KEPT)
    penalised = SamplingParams(
        temperature=temperature, top_k=KEPT, repetition_penalty=1.2, presence_penalty=1.5, penalty_last_n=_RECENT
    )
    hotter = SamplingParams(temperature=min(1.5 * temperature, 1e6), top_k=KEPT)
    reference = _Reference(rows, plain, plain)
    copies = FixedPolicy(_DRAFTED, lookup_limit=_DRAFTED)
    earlier = (PROMPT, START, *reference.uncertain(), PROMPT)
    return (
        _Setting("plain", reference, FixedPolicy(_DRAFTED)),
        _Setting("penalties", _Reference(rows, penalised, penalised), FixedPolicy(_DRAFTED)),
        _Setting("penalties, another draft, hotter", _Reference(rows.disagreeing(), penalised, hotter), _WhileSure()),
        _Setting("copies", reference, copies, earlier),
    )


def _engine(rows: RecordedRows, capacity: int) -> tuple[Engine, WatchedDrafter]:
    target, draft = (
        RowContext(rows, table, capacity=capacity, num_sequences=_SEQUENCES) for table in (rows.target, rows.draft)
    )
    model = WatchedDrafter(draft, vocabulary_size=target.vocabulary_size, ends_generation=_never_ends)
    lookup = LookupDrafter(ends_generation=_never_ends)
    return Engine(target, LookupOrModel(lookup, model), ends_generation=_never_ends), model


def _never_ends(token: int) -> bool:
    return False


class _Reference:
    """The exact law of texts, by plain multiplication.

    Args:
        rows: of both models.
        params: of the target.
        draft_params: of the draft.
    """

    def __init__(self, rows: RecordedRows, params: SamplingParams, draft_params: SamplingParams) -> None:
        self.rows = rows
        self.params = params
        self.draft_params = draft_params
        self._positions: dict[tuple[int, ...], tuple[Outcomes, Draws]] = {}

    def after(self, prefix: tuple[int, ...]) -> Outcomes:
        """Return the law of the symbol after ``prefix``, which begins behind the start symbol."""
        return self._after(prefix)[0]

    def drafted_after(self, prefix: tuple[int, ...]) -> Draws:
        """Return the draft's law there."""
        return self._after(prefix)[1]

    def _after(self, prefix: tuple[int, ...]) -> tuple[Outcomes, Draws]:
        if prefix not in self._positions:
            history = [PROMPT, START, *prefix]
            place = self.rows.place(history)
            p = reference_law(self.rows.target[place], self.params, history)
            q = reference_law(self.rows.draft[place], self.draft_params, history)
            self._positions[prefix] = Outcomes(p, shifts(p, q)), Draws(q)
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

    def uncertain(self) -> tuple[int, ...]:
        """Return a text of symbols that are each about as likely as not: worth copying, and worth rejecting."""
        text: tuple[int, ...] = ()
        for _ in range(_LENGTH):
            text = (*text, int(np.abs(self.after(text).law - 0.5).argmin()))
        return text


def _run(replay: _Replay, seed: int) -> None:
    first = seed + replay.number * _SEEDS + replay.counts.total()
    setting, reference = replay.setting, replay.setting.reference

    def requests(policy: Policy) -> list[Request]:
        return [
            Request(
                prompt=setting.prompt,
                params=reference.params,
                draft_params=reference.draft_params,
                max_tokens=1 + _LENGTH,
                seed=first + i,
                rule=replay.rule,
                policy=policy,
            )
            for i in range(_SEQUENCES)
        ]

    texts = _generate(replay, requests(setting.policy))
    if replay.rule == "coupled":
        plain = _generate(replay, requests(FixedPolicy(0)))
        replay.differing += sum(a != b for a, b in zip(texts, plain, strict=True))
    for text in texts:
        replay.counts[text] += 1
        for i, token in enumerate(text):
            position = reference.after(text[:i])
            if not position.law[token] > 0:
                break  # Pearson's test knows what to make of the impossible
            position.settle(replay.bets, token)


def _generate(replay: _Replay, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    generations = [replay.engine.start(request, i) for i, request in enumerate(requests)]

    def running() -> list[Generation]:
        return [g for g in generations if g.finish_reason is None]

    first: dict[int, float | None] = {}  # by sequence: how early the first draft of its last step was
    while active := running():
        prefixes = [tuple(g.tokens[1:]) for g in active]  # the first is the start symbol
        replay.drafter.forget()
        for g, prefix, step in zip(active, prefixes, replay.engine.step(active), strict=True):
            if replay.steps is not None and (drafted := replay.drafter.drafted.get(g.sequence)):
                paths = [(*prefix, *drafted[:i]) for i in range(len(drafted) + 1)]
                p = [replay.setting.reference.after(path).law for path in paths]
                q = [replay.setting.reference.drafted_after(path) for path in paths[:-1]]
                before = first.get(g.sequence)
                first[g.sequence] = replay.steps.take(prefix, drafted, step.num_accepted, p, q, before)
    return [tuple(g.tokens[1:]) for g in generations]


def _verdict(replays: Sequence[_Replay], rows: RecordedRows) -> Finding:
    problems = []
    laws = {replay.setting.name: replay.setting.reference.texts() for replay in replays}
    for replay in replays:
        p_value = pearson(replay.counts, laws[replay.setting.name])
        if p_value < _ODDS_OF_CHI_SQUARE / len(replays):
            problems.append(f"{replay.name}: texts do not have their law (p = {p_value:.1g})")
        if replay.differing:
            problems.append(f"{replay.name}: {replay.differing} texts are not those of plain decoding")
        if replay.steps is not None and replay.steps.impossible:
            problems.append(f"{replay.name}: {replay.steps.impossible} steps drafted or accepted what they cannot")
    named = [(replay.name, what, bet) for replay in replays for what, bet in replay.named_bets]
    # What is broken is mostly so under every rule: the sequences one after the other show it sooner.
    together: dict[str, Bet] = {}
    for _, what, bet in named:
        together[what] = together[what].joined(bet) if what in together else bet
    named += [("all rules", what, bet) for what, bet in together.items()]
    bets = [bet for *_, bet in named]
    found = evidence(bets)
    if found >= THRESHOLD:
        name, what, strongest = max(named, key=lambda entry: float(entry[2].log_capital.max()))
        more = "more" if strongest.total > 0 else "less"
        problems.append(f"{name}: {what} come out {more} often than they should (Z {strongest.z:+.1f})")
    tokens = sum(replay.counts.total() for replay in replays) * _LENGTH
    noticed = smallest_shift(together[f"tokens {SHIFTS[0]}"], len(bets), THRESHOLD)
    summary = (
        f"the engine on recorded rows (mean total variation of the pair {rows.variation:.2f}), three rules, with"
        f" penalties, another draft and copies: {tokens} tokens follow their exact law, drafts and acceptance theirs,"
        f" largest |Z| {max(abs(bet.z) for bet in bets):.1f}; coupled texts are those of plain decoding. A shift"
        f" of {noticed:.1%} towards the draft would be noticed"
    )
    odds = 1 / THRESHOLD + 3 * _ODDS_OF_CHI_SQUARE
    return Finding(
        part="replay", passed=not problems, summary=summary, false_alarm=odds, problems=tuple(problems[:4])
    )
