"""How well a draft agrees with its target, measured on text that the target writes alone.

Every transcript is sampled from the target at exactly the settings it stands for, one temperature after the other
over the same prompt, and scored once by the draft. ``docs/calibration.md`` says what follows from it and what not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.acceptance import Interval, Rule, Transcript, agreement, agreement_intervals
from localspec.backend import Context, Span
from localspec.calibration.prompts import POOLED, CalibrationPrompt, take_turns
from localspec.drafters import draft_confidence, law_maker, read_ahead, shared_width
from localspec.errors import ContextOverflowError, InvalidLogitsError, InvalidOptionError
from localspec.sampling import LLAMACPP_DEFAULTS, Law, SamplingParams, StepNoise, Stream, make_law, residual
from localspec.theory import expected_tokens
from localspec.wording import counted

__all__ = [
    "DRAFT_SCALES",
    "AgreementPlan",
    "DraftTemperature",
    "KindAgreement",
    "Observation",
    "RuleAgreement",
    "ScoredText",
    "best_draft_temperatures",
    "default_temperatures",
    "observe",
    "observe_each",
    "summarise",
]

Floats = NDArray[np.float64]

DRAFT_SCALES = (0.7, 0.85, 1.15)
"""Draft temperatures that are tried beside the target's own, relative to it."""

_CONFIDENCE = 0.95
_RESAMPLES = 2000


def default_temperatures(params: SamplingParams) -> tuple[float, ...]:
    """Return the temperatures to measure: greedy, the user's (0.7 if that is greedy), and the model's own law."""
    return tuple(sorted({0.0, params.temperature or 0.7, 1.0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementPlan:
    """What to measure.

    Attributes:
        params: the user's sampling settings; each of ``temperatures`` takes the place of theirs.
        temperatures: transcripts are sampled at each.
        tokens_per_prompt: length of a transcript; answers may end earlier.
        budget_s: begin no further prompts when they would probably end later than this; None for all prompts.
        seed: of the transcripts.
    """

    params: SamplingParams = LLAMACPP_DEFAULTS
    temperatures: tuple[float, ...] = default_temperatures(LLAMACPP_DEFAULTS)
    tokens_per_prompt: int = 48
    budget_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise InvalidOptionError("no temperature is given; agreement is measured at one at least")
        if self.tokens_per_prompt < 1:
            raise InvalidOptionError(f"tokens_per_prompt is {self.tokens_per_prompt}; use 1 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One transcript and what the two models thought at each of its N positions.

    Attributes:
        kind: of its prompt.
        prompt: number of its prompt; transcripts at other temperatures share it.
        temperature: it was sampled at.
        transcript: probabilities of its tokens.
        overlap: Σ min(p, q), [N].
        confidence: of the draft, [N]; see ``drafters.draft_confidence``.
        rescaled_overlap: Σ min(p, q) with the draft at ``DRAFT_SCALES`` times the temperature, [scales, N]; empty
            at temperature 0 and at extreme ones.
        num_undraftable: positions at which the draft's row makes no law (NaN, or nothing finite). The engine drafts
            nothing there: q(y), overlap and confidence are 0.
    """

    kind: str
    prompt: int
    temperature: float
    transcript: Transcript
    overlap: Floats
    confidence: Floats
    rescaled_overlap: Floats
    num_undraftable: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ScoredText:
    """A text of the target's, and what each of several drafts makes of it.

    Attributes:
        kind: of its prompt.
        temperature: it was sampled at.
        prompt: token ids.
        tokens: written after it, N of them.
        observations: one for each draft.
    """

    kind: str
    temperature: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    observations: tuple[Observation, ...]


@dataclass(frozen=True, slots=True)
class RuleAgreement:
    """What drafting would yield under one verification rule.

    Attributes:
        tokens_per_step: for γ = 0, 1, …
        intervals: of these; None with a single prompt.
        accepted_prefix: S_i, the chance that a step with the largest γ accepts its first i tokens, from S_0 = 1 as
            far as transcripts reach. The textbook takes it to be α^i.
    """

    tokens_per_step: tuple[float, ...]
    intervals: tuple[Interval, ...] | None
    accepted_prefix: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KindAgreement:
    """Agreement on one kind of text at one temperature; intervals are at 95 %, over prompts.

    Attributes:
        kind: of text; ``POOLED`` for all kinds together.
        temperature: of target and draft.
        num_tokens: in all transcripts.
        num_prompts: transcripts, one for each prompt.
        acceptance_rate: α, the mean of Σ min(p, q) over text of the target's.
        acceptance_interval: of α; None with a single prompt.
        token: under the token rule.
        block: under the block rule.
    """

    kind: str
    temperature: float
    num_tokens: int
    num_prompts: int
    acceptance_rate: float
    acceptance_interval: Interval | None
    token: RuleAgreement
    block: RuleAgreement

    def under(self, rule: Rule) -> RuleAgreement:
        """Return the part that ``rule`` names."""
        return self.token if rule == "token" else self.block

    @property
    def iid_tokens_per_step(self) -> tuple[float, ...]:
        """What the textbook formula makes of α for γ = 0, 1, …, as if every position were alike."""
        return tuple(expected_tokens(self.acceptance_rate, gamma) for gamma in range(len(self.token.tokens_per_step)))


@dataclass(frozen=True, slots=True)
class DraftTemperature:
    """A draft temperature other than the target's that agrees better.

    Attributes:
        temperature: the target's.
        draft_temperature: the draft's.
        gain: in α.
        interval: of the gain, wide enough that one of all temperatures tried excludes 0 by chance in 5 % of cases.
    """

    temperature: float
    draft_temperature: float
    gain: float
    interval: Interval


@dataclass(slots=True)
class _Writing:
    """A prompt in one sequence of both contexts, and the transcript growing on it."""

    sequence: int
    number: int
    kind: str
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)


def observe(
    target: Context,
    draft: Context,
    prompts: Sequence[CalibrationPrompt],
    plan: AgreementPlan,
    *,
    encode: Callable[[Any], Sequence[int]],
    ends_generation: Callable[[int], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Observation]:
    """Let the target write and the draft score; yields one observation per prompt and temperature.

    The kinds take turns, so that what was yielded when the budget ends, or an interrupt arrives, is about all of
    them. As many prompts as both contexts have sequences are written together. Both contexts are left empty.

    Args:
        target: writes.
        draft: scores.
        prompts: different ones.
        plan: what to measure.
        encode: makes token ids of the content of a prompt.
        ends_generation: tells the ids after which nothing follows.
        progress: called with the transcripts done and the most there can be.

    Raises:
        ContextOverflowError: a prompt leaves no room for an answer.
        EvaluationError: a model pass failed.
        InvalidLogitsError: no law can be made of a row of the target's.
    """
    each = observe_each(
        target, (draft,), prompts, plan, encode=encode, ends_generation=ends_generation, progress=progress
    )
    yield from (text.observations[0] for text in each)


def observe_each(
    target: Context,
    drafts: Sequence[Context],
    prompts: Sequence[CalibrationPrompt],
    plan: AgreementPlan,
    *,
    encode: Callable[[Any], Sequence[int]],
    ends_generation: Callable[[int], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[ScoredText]:
    """Do as ``observe`` with any number of drafts, even none: all score what the target writes once."""
    contexts = (target, *drafts)
    width = min(context.num_sequences for context in contexts)
    room = min(context.capacity for context in contexts)
    queue = [(number, p.kind, list(encode(p.content))) for number, p in enumerate(take_turns(prompts))]
    for _, _, tokens in queue:
        if len(tokens) >= room:
            raise ContextOverflowError(
                f"a prompt has {counted(len(tokens), 'token')} and the context holds {room}, one of them for the"
                " answer; shorten the prompt, or use a larger --ctx"
            )
    total = len(queue) * len(plan.temperatures)
    started, done, longest_s = monotonic(), 0, 0.0
    try:
        for at in range(0, len(queue), width):
            group_started = monotonic()
            if plan.budget_s is not None and at and group_started - started + longest_s > plan.budget_s:
                break
            group = [
                _Writing(sequence, number, kind, tokens, min(plan.tokens_per_prompt, room - len(tokens)))
                for sequence, (number, kind, tokens) in enumerate(queue[at : at + width])
            ]
            for context, writing in itertools.product(contexts, group):
                context.truncate(writing.sequence, 0)
                read_ahead(context, writing.sequence, writing.prompt[:-1])
            for temperature in plan.temperatures:
                params = replace(plan.params, temperature=temperature)
                _write(target, group, params, plan.seed, ends_generation)
                for writing in group:
                    scores = [_score(draft, writing, params, target.vocabulary_size) for draft in drafts]
                    ids = tuple(writing.prompt), tuple(writing.tokens)
                    yield ScoredText(writing.kind, temperature, *ids, tuple(scores))
                    done += 1
                    progress(done, total)
            longest_s = max(longest_s, monotonic() - group_started)
    finally:
        for context, sequence in itertools.product(contexts, range(width)):
            context.truncate(sequence, 0)


def _write(
    target: Context, group: Sequence[_Writing], params: SamplingParams, seed: int, ends: Callable[[int], bool]
) -> None:
    """Let the target answer all prompts of ``group``, as plain decoding with the seed ``seed + number`` would."""
    for writing in group:
        target.truncate(writing.sequence, len(writing.prompt) - 1)
        writing.tokens, writing.laws = [], []
    active = list(group)
    while active:
        rows = target.decode([Span(w.sequence, [(w.tokens or w.prompt)[-1]], 1) for w in active])
        for writing, row in zip(active, rows, strict=True):
            law = make_law(row, params, [*writing.prompt, *writing.tokens])
            depth = len(writing.prompt) + len(writing.tokens)
            token = law.draw(StepNoise(seed + writing.number, depth, Stream.VERIFY).next())
            writing.tokens.append(token)
            writing.laws.append(law)
        active = [w for w in active if len(w.tokens) < w.limit and not ends(w.tokens[-1])]


def _score(draft: Context, writing: _Writing, params: SamplingParams, vocabulary_size: int) -> Observation:
    draft.truncate(writing.sequence, len(writing.prompt) - 1)
    read = [writing.prompt[-1], *writing.tokens[:-1]]
    rows = draft.decode([Span(writing.sequence, read, len(read))])[:, : shared_width(draft, vocabulary_size)]
    draft_law = law_maker(draft)
    # Far out, at 1e-5 and 1e6, the scaled temperatures would leave the range.
    scales = DRAFT_SCALES if 1e-4 <= params.temperature <= 1e5 else ()
    scaled_params = [replace(params, temperature=params.temperature * scale) for scale in scales]
    p_y, q_y, overlap, confidence = (np.zeros(len(read)) for _ in range(4))
    rescaled = np.zeros((len(scales), len(read)))
    num_undraftable = 0
    for i, (p, row, token) in enumerate(zip(writing.laws, rows, writing.tokens, strict=True)):
        history = [*writing.prompt, *writing.tokens[:i]]
        p_y[i] = p.prob(token)
        try:
            q = draft_law(row, params, history)
        except InvalidLogitsError:
            num_undraftable += 1
            continue
        q_y[i] = q.prob(token)
        overlap[i] = _overlap(p, q)
        confidence[i] = draft_confidence(row, q, params)
        rescaled[:, i] = [_overlap(p, draft_law(row, scaled, history)) for scaled in scaled_params]
    return Observation(
        kind=writing.kind,
        prompt=writing.number,
        temperature=params.temperature,
        transcript=Transcript(p_y, q_y),
        overlap=overlap,
        confidence=confidence,
        rescaled_overlap=rescaled,
        num_undraftable=num_undraftable,
    )


def _overlap(p: Law, q: Law) -> float:
    """Return Σ min(p, q) = 1 − Σ max(p − q, 0)."""
    rest = residual(p, q)
    return max(0.0, 1.0 - rest[1]) if rest else 1.0


def summarise(observations: Sequence[Observation], *, max_draft_tokens: int) -> tuple[KindAgreement, ...]:
    """Return the agreement of every kind and temperature, then of all kinds together at every temperature.

    Kinds come in the order in which they were first observed, temperatures from cold to hot.
    """
    kinds = list(dict.fromkeys(o.kind for o in observations))
    temperatures = sorted({o.temperature for o in observations})
    found = []
    for kind, temperature in itertools.product([*kinds, POOLED], temperatures):
        chosen = [o for o in observations if o.temperature == temperature and kind in (o.kind, POOLED)]
        if chosen:
            found.append(_summary(kind, temperature, chosen, max_draft_tokens))
    return tuple(found)


def _summary(kind: str, temperature: float, chosen: Sequence[Observation], max_draft_tokens: int) -> KindAgreement:
    lengths = np.array([len(o.transcript) for o in chosen], dtype=np.float64)
    sums = np.array([o.overlap.sum() for o in chosen])
    return KindAgreement(
        kind=kind,
        temperature=temperature,
        num_tokens=int(lengths.sum()),
        num_prompts=len(chosen),
        acceptance_rate=float(sums.sum() / lengths.sum()),
        acceptance_interval=_interval(sums, lengths),
        token=_under("token", [o.transcript for o in chosen], max_draft_tokens),
        block=_under("block", [o.transcript for o in chosen], max_draft_tokens),
    )


def _under(rule: Rule, transcripts: Sequence[Transcript], max_draft_tokens: int) -> RuleAgreement:
    found = agreement(transcripts, max_draft_tokens, rule=rule)
    intervals = None
    if len(transcripts) > 1:
        intervals = agreement_intervals(
            transcripts, max_draft_tokens, rule=rule, confidence=_CONFIDENCE, samples=_RESAMPLES
        ).tokens_per_step
    reached = tuple(itertools.takewhile(lambda chance: not np.isnan(chance), found.accepted_prefix))
    return RuleAgreement(found.tokens_per_step, intervals, reached)


def best_draft_temperatures(observations: Sequence[Observation]) -> tuple[DraftTemperature, ...]:
    """Return, for every temperature, the draft temperature that agrees best, where it beats the target's own.

    It counts only if the gain in α, over all kinds, is beyond its bootstrap interval.
    """
    found = []
    for temperature in sorted({o.temperature for o in observations if len(o.rescaled_overlap)}):
        chosen = [o for o in observations if o.temperature == temperature]
        lengths = np.array([len(o.transcript) for o in chosen], dtype=np.float64)
        gains = np.stack([(o.rescaled_overlap - o.overlap).sum(axis=1) for o in chosen])
        best = int(gains.sum(axis=0).argmax())
        # The best of several looks better than it is: each gets its share of the 5 %.
        interval = _interval(gains[:, best], lengths, 1 - (1 - _CONFIDENCE) / len(DRAFT_SCALES))
        if interval and interval.low > 0:
            gain = float(gains[:, best].sum() / lengths.sum())
            found.append(DraftTemperature(temperature, temperature * DRAFT_SCALES[best], gain, interval))
    return tuple(found)


def _interval(sums: Floats, counts: Floats, confidence: float = _CONFIDENCE) -> Interval | None:
    """Bootstrap Σ sums / Σ counts over prompts, [prompts] each; None for a single prompt."""
    if len(sums) < 2:
        return None
    picks = np.random.default_rng(0).integers(0, len(sums), size=(_RESAMPLES, len(sums)))
    ratios = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(low), float(high))
