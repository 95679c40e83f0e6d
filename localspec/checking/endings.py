"""Whether a generation ends where it should, and says so: end tokens, stop strings, limits, a full context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from localspec.backend import Span
from localspec.checking.findings import Allowance, Finding
from localspec.checking.subject import Subject
from localspec.sampling import Rule, SamplingParams
from localspec.session import GenerationResult, TokenEvent
from localspec.wording import counted

__all__ = ["check_endings", "contradictions"]

_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished generation.

    Attributes:
        what: the case, in words.
        result: of the session.
        events: all of them.
        last_drafted: how many tokens the last step drafted, by the statistics.
        last_emitted: how many it emitted.
        prompt_length: tokens of the prompt.
        max_tokens: the limit.
        capacity: tokens of the context.
        stop: a stop string.
        ended: by an end-of-generation token, as the events have it.
    """

    what: str
    result: GenerationResult
    events: tuple[TokenEvent, ...]
    last_drafted: int
    last_emitted: int
    prompt_length: int
    max_tokens: int
    capacity: int
    stop: str | None


def check_endings(subject: Subject, allowance: Allowance) -> Finding:
    """Run generations into every kind of end, most of them inside a draft, and look for contradictions."""
    problems: list[str] = []
    reasons: dict[str, int] = {}
    inside = count = 0
    for number in range(len(subject.prompts)):
        for run in _runs(subject, number):
            found = [f"{run.what}: {fault}" for fault in contradictions(subject, run)]
            problems += found
            reason = run.result.finish_reason
            reasons[reason] = reasons.get(reason, 0) + 1
            inside += run.last_emitted > 1 or run.last_drafted > 0
            count += 1
        if problems or not allowance.goes_on():
            break
    missing = [reason for reason in ("stop", "length", "context") if reason not in reasons]
    problems += [f"no generation ended by {reason!r}, so that was not tested" for reason in missing]
    listed = ", ".join(f"{number} by {reason!r}" for reason, number in sorted(reasons.items()))
    summary = (
        f"{counted(count, 'generation')} forced to an end ({listed}), {inside} of them inside a draft: nothing comes"
        " after the end, reasons, text and statistics agree"
    )
    return Finding(
        part="endings", passed=not problems, summary=summary, false_alarm=0.0, problems=tuple(problems[:4])
    )


def _runs(subject: Subject, number: int) -> Iterator[Run]:
    gamma = max(subject.settings.lengths)
    greedy = subject.settings.greedy
    for max_tokens in (1, 2, gamma, gamma + 2):
        yield _run(
            subject, number, greedy, f"at most {counted(max_tokens, 'token')}", gamma=gamma, max_tokens=max_tokens
        )
    plain = _run(subject, number, greedy, "without an end", gamma=gamma)
    yield plain
    for stop in _stops(subject, plain.result):
        yield _run(subject, number, greedy, f"stop string {stop!r}", gamma=gamma, stop=stop)
    for room in (1, 2, gamma, gamma + 3):
        yield _run(subject, number, greedy, f"context with room for {room}", gamma=gamma, room=room)
    for i, params in enumerate(_ending(subject, number)):
        rule = get_args(Rule)[(i + number) % len(get_args(Rule))]
        what = f"end token made likely ({i}), {rule} rule"
        yield _run(subject, number, params, what, gamma=gamma, rule=rule)


def _run(
    subject: Subject,
    number: int,
    params: SamplingParams,
    what: str,
    *,
    gamma: int,
    max_tokens: int = _TOKENS,
    stop: str | None = None,
    room: int | None = None,
    rule: str = "block",
) -> Run:
    prompt, tokens = subject.prompts[number]
    ledgers = (subject.target, subject.draft)
    whole = subject.capacity
    for ledger in ledgers:
        ledger.capacity = whole if room is None else len(tokens) + room
    try:
        stream = subject.session.stream(
            prompt,
            params,
            raw=subject.raw,
            max_tokens=max_tokens if room is None else whole,
            seed=subject.settings.seed + number,
            num_draft_tokens=gamma,
            rule=rule,
            stop=() if stop is None else (stop,),
        )
        events: list[TokenEvent] = []
        steps = drafted = last_drafted = last_emitted = 0
        for event in stream:
            events.append(event)
            if stream.stats.steps != steps:
                last_drafted, last_emitted = stream.stats.drafted - drafted, 0
                steps, drafted = stream.stats.steps, stream.stats.drafted
            last_emitted += 1
    finally:
        capacity = subject.target.capacity
        for ledger in ledgers:
            ledger.capacity = ledger.context.capacity
    return Run(
        what=what,
        result=stream.result(),
        events=tuple(events),
        last_drafted=last_drafted,
        last_emitted=last_emitted,
        prompt_length=len(tokens),
        max_tokens=max_tokens if room is None else whole,
        capacity=capacity,
        stop=stop,
    )


def _stops(subject: Subject, result: GenerationResult) -> list[str]:
    """Return stop strings that end within a token and across two, out of the middle of a text."""
    pieces = [_text(subject, [token]) for token in result.tokens]
    found = []
    for i in (3, 6, 9):
        if i + 1 < len(pieces):
            found += [pieces[i], pieces[i][-1:] + pieces[i + 1][:1]]
    return [stop for stop in dict.fromkeys(found) if stop and "\ufffd" not in stop]


def _ending(subject: Subject, number: int) -> list[SamplingParams]:
    """Return settings that make the end token about as likely as the others, and all but certain."""
    ends = subject.session.vocabulary.ends_generation
    end = next((token for token in range(subject.target.vocabulary_size) if ends(token)), None)
    if end is None:
        return []
    params = subject.settings.sampling
    tokens = subject.prompts[number][1]
    subject.target.truncate(0, 0)
    row = subject.target.decode([Span(0, tokens, 1)])[-1]
    lead = float(row.max() - row[end]) if np.isfinite(row[end]) else 0.0
    other: Mapping[int, float] = {token: bias for token, bias in params.biases if token != end}
    return [
        replace(params, logit_bias={**other, end: max(0.0, min(lead + offset, 1e5))}, banned=_without(params, end))
        for offset in (-1.5, 0.5, 3.0, 50.0)
    ]


def _without(params: SamplingParams, token: int) -> tuple[int, ...]:
    return tuple(banned for banned in params.banned if banned != token)


def _text(subject: Subject, tokens: list[int]) -> str:
    vocabulary: Any = subject.session.vocabulary
    pieces = [b"" if vocabulary.ends_generation(token) else vocabulary.piece(token) for token in tokens]
    return b"".join(pieces).decode(errors="replace")


def contradictions(subject: Subject, run: Run) -> Iterator[str]:
    """Yield what does not fit together in a finished generation."""
    yield from _about_the_end(subject, run)
    yield from _about_the_text(subject, run)
    yield from _about_the_statistics(run)


def _about_the_end(subject: Subject, run: Run) -> Iterator[str]:
    tokens, reason = run.result.tokens, run.result.finish_reason
    ends = [i for i, token in enumerate(tokens) if subject.session.vocabulary.ends_generation(token)]
    stopped = run.stop is not None and run.stop in _text(subject, tokens)
    if ends and ends[0] != len(tokens) - 1:
        yield f"{len(tokens) - 1 - ends[0]} tokens follow the end token"
    expected = (
        "stop"
        if ends or stopped
        else "length"
        if len(tokens) >= run.max_tokens
        else "context"
        if run.prompt_length + len(tokens) >= run.capacity
        else "none"
    )
    if reason != expected:
        yield f"it ended by {reason!r} after {counted(len(tokens), 'token')}, and the reason is {expected!r}"
    if len(tokens) > run.max_tokens or run.prompt_length + len(tokens) > run.capacity:
        yield f"{len(tokens)} tokens are more than there is room for"


def _about_the_text(subject: Subject, run: Run) -> Iterator[str]:
    result = run.result
    whole = _text(subject, result.tokens)
    if run.stop is not None and run.stop in whole:
        if run.stop in _text(subject, result.tokens[:-1]):
            yield "tokens follow the one that completes the stop string"
        whole = whole[: whole.index(run.stop)]
    if result.text != whole:
        yield f"the text is {result.text[-20:]!r} at its end, and its tokens say {whole[-20:]!r}"
    if "".join(event.text for event in run.events) != result.text:
        yield "the text that was streamed is not the text of the result"
    if [event.token for event in run.events] != result.tokens:
        yield "the tokens that were streamed are not those of the result"


def _about_the_statistics(run: Run) -> Iterator[str]:
    stats, tokens = run.result.stats, run.result.tokens
    drafted = sum(event.drafted for event in run.events)
    for name, number, true in (
        ("tokens", stats.tokens, len(tokens)),
        ("accepted tokens", stats.accepted, drafted),
        ("accepted tokens by position", sum(stats.accepted_at), drafted),
        ("drafted tokens by position", sum(stats.drafted_at), stats.drafted),
        ("tokens of the prompt", stats.prompt_tokens, run.prompt_length),
    ):
        if number != true:
            yield f"{name} are counted as {number}, and are {true}"
    if not stats.tokens - stats.steps <= stats.accepted <= stats.drafted:
        yield f"{stats.accepted} of {stats.drafted} accepted in {stats.steps} steps do not make {stats.tokens} tokens"
    if run.result.finish_reason == "stop" and run.last_drafted > run.last_emitted:
        yield f"{run.last_drafted} drafted tokens are counted in a last step that emitted {run.last_emitted}"
