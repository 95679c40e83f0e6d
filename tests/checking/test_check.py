"""The check on table-driven models: a sound build passes, and every part can fail."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localspec import answers, drafters, engine, lookup
from localspec.backend import Span
from localspec.calibration.prompts import CalibrationPrompt
from localspec.checking import endings, generations, replay, rollback
from localspec.checking.findings import Allowance
from localspec.checking.ledger import Ledger, row_distance
from localspec.checking.noise import SAME_ROW
from localspec.checking.rows import RecordedRows
from localspec.checking.runner import check
from localspec.checking.subject import audited
from localspec.errors import InvalidOptionError, TemplateError
from localspec.sampling import SamplingParams, SparseLaw, Stream, make_law, rules
from localspec.text import Message
from tests.checking.sessions import END, PARAMS, contexts, failed, run, settings, shown
from tests.checking.sessions import session as session_on
from tests.fakes import FakeContext

QUICK = 0.3  # seconds: every part does its least


@pytest.fixture
def short_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the replay do a thirty-second of its least, which no budget shortens, where another part is looked at."""
    monkeypatch.setattr(replay, "_FEWEST", 1)
    monkeypatch.setattr(replay, "_BATCHES", 1)


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.2),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias={2: 1.0}, banned=(4,)),
    ],
    ids=["top-k", "greedy", "uncut", "everything"],
)
def test_a_sound_build_passes(params: SamplingParams) -> None:
    """False alarm below 2e-4 for each."""
    report = run(params=params, budget_s=1.5)
    assert failed(report) == [], "\n".join(map(shown, report.findings))
    assert report.passed
    assert [finding.part for finding in report.findings] == [
        "noise", "greedy", "rollback", "rule", "replay", "generations", "endings"
    ]  # fmt: skip
    assert 0 < report.false_alarm <= 2e-4


@pytest.mark.usefixtures("short_replay")
def test_numbers_tell_what_was_done() -> None:
    findings = {finding.part: finding for finding in run(budget_s=QUICK).findings}
    for part, number in (
        ("greedy", r"(\d+) tokens as without"),
        ("generations", r"(\d+) tokens of"),
        ("replay", r"(\d+) tokens"),
    ):
        found = re.search(number, findings[part].summary)
        assert found is not None
        assert int(found[1]) > 50
    assert "not at all" in findings["rollback"].summary


@pytest.mark.usefixtures("short_replay")
def test_a_check_leaves_the_session_as_it_was() -> None:
    target, draft = contexts()
    checked = session_on(target, draft)
    before = checked.engine
    check(checked, settings(budget_s=QUICK))
    assert checked.engine is before
    assert target.length(0) == draft.length(0) == 0
    assert checked.generate("abc", raw=True, max_tokens=4, num_draft_tokens=2, seed=1).tokens


def test_without_a_draft_there_is_nothing_to_check() -> None:
    target, _ = contexts()
    alone = session_on(target, None)
    with pytest.raises(InvalidOptionError, match="draft"):
        check(alone, settings())


@pytest.mark.parametrize("capacity", [10, 14, 20, 40])
@pytest.mark.parametrize("gamma", [1, 5, 20, 64])
def test_a_context_is_refused_or_large_enough(capacity: int, gamma: int) -> None:
    """What is led to its end, or taken back, has room; a sound build does not fail for want of it."""
    chosen = dataclasses.replace(settings(budget_s=QUICK), num_draft_tokens=gamma)
    if capacity < 3 + min(gamma + 3, 64) + 8:
        with pytest.raises(InvalidOptionError, match="larger --ctx, a smaller --gamma"):
            check(session_on(*contexts(capacity=capacity)), chosen)
        return
    with audited(session_on(*contexts(capacity=capacity)), chosen) as subject:
        allowance = rounds(3)
        rolled = rollback.check_rollback(subject, subject.texts(), allowance)
        assert rolled.passed, rolled
        assert ", 0 times" not in rolled.summary
        subject.clear()
        assert endings.check_endings(subject, allowance).passed


def test_conversations_need_a_template() -> None:
    talk = tuple(CalibrationPrompt("talk", (Message("user", text),)) for text in ("abc", "cba"))
    with pytest.raises(TemplateError):
        check(session_on(*contexts()), dataclasses.replace(settings(), prompts=talk))


def test_what_users_run_is_not_left_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one generation by each rule with the draft length asked for, the session decides itself."""
    asked: list[int | None] = []
    checked = session_on(*contexts())
    original = checked.stream
    monkeypatch.setattr(
        checked,
        "stream",
        lambda *a, **k: original(*a, **{**k, "num_draft_tokens": asked.append(k["num_draft_tokens"]) or 3}),
    )
    with audited(checked, settings()) as subject:
        assert generations.check_generations(subject, rounds(5)).passed
    assert asked[:4] == [3, 3, 3, None]


def test_an_interrupt_gives_what_there_is() -> None:
    class Interrupted(FakeContext):
        def decode(self, batch: Sequence[Span]) -> Any:
            if self.passes > 200:
                raise KeyboardInterrupt
            return super().decode(batch)

    report = run(*contexts(Interrupted), budget_s=QUICK)
    assert report.interrupted
    assert not report.passed


# --- broken contexts ----------------------------------------------------------------------------------------------


class KeepsOne(FakeContext):
    """Forgets one token too few of several."""

    def truncate(self, sequence: int, length: int) -> None:
        held = self.length(sequence)
        super().truncate(sequence, length + (held > length + 1 and length > 0))


class Liar(KeepsOne):
    """Forgets one token too few, and says it did not."""

    def length(self, sequence: int) -> int:
        return super().length(sequence) - getattr(self, "lie", 0)

    def truncate(self, sequence: int, length: int) -> None:
        held = len(self.held[sequence])
        lie = getattr(self, "lie", 0)
        if length == 0:
            self.lie = 0
            FakeContext.truncate(self, sequence, 0)
        elif held - lie > length:
            del self.held[sequence][length + lie + 1 :]
            del self._scars[sequence][length + lie + 1 :]
            self.lie = max(lie, len(self.held[sequence]) - length)


class KeepsASingleOne(FakeContext):
    """Forgets several tokens, and never one."""

    def truncate(self, sequence: int, length: int) -> None:
        if length == 0 or self.length(sequence) != length + 1:
            super().truncate(sequence, length)


class Shifted(FakeContext):
    """Gives the rows of a pass in the wrong order."""

    def decode(self, batch: Sequence[Span]) -> Any:
        return super().decode(batch)[::-1]


@pytest.mark.usefixtures("short_replay")
@pytest.mark.parametrize(
    ("kind", "options", "parts"),
    [
        (KeepsOne, {}, {"greedy", "rollback", "generations"}),
        (KeepsASingleOne, {}, {"rollback"}),
        (Liar, {}, {"rollback"}),
        (Shifted, {}, {"noise", "greedy", "generations"}),
        (FakeContext, {"rollback": "wrong"}, {"rollback"}),
        (FakeContext, {"rollback": "refused"}, {"rollback"}),
    ],
    ids=[
        "keeps a token",
        "keeps a single token",
        "keeps a token and lies",
        "rows in the wrong order",
        "recurrent",
        "refuses",
    ],
)
def test_a_broken_context_is_found(kind: Any, options: dict[str, Any], parts: set[str]) -> None:
    assert parts <= set(failed(run(*contexts(kind, **options), budget_s=QUICK)))


# --- broken code --------------------------------------------------------------------------------------------------


def recorded(agreement: float = 0.6) -> RecordedRows:
    with audited(session_on(*contexts(agreement=agreement)), settings()) as subject:
        return RecordedRows.record(subject, subject.texts())


def test_a_draft_thrown_away_after_a_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds as the sound build above passed at this temperature on these rows."""
    rows = recorded()
    original = drafters.ModelDrafter._draw

    def draw(self: Any, request: Any, draft: Any, recent: Any, row: Any) -> bool:
        before = len(draft.tokens)
        goes_on = original(self, request, draft, recent, row)
        if len(draft.tokens) > before and draft.laws[-1].prob(draft.tokens[-1]) < 0.5:
            draft.tokens.pop()
            draft.laws.pop()
            return False
        return goes_on

    monkeypatch.setattr(drafters.ModelDrafter, "_draw", draw)
    assert not replay.check_replay(rows, 0.8, rounds(4), seed=0).passed


@pytest.mark.parametrize("agreement", [0.6, 0.95])
def test_random_numbers_that_draft_and_verification_share_are_found(
    agreement: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the two models hardly differ, and so hardly anything is rejected."""
    rows = recorded(agreement)
    original = engine.StepNoise
    monkeypatch.setattr(engine, "StepNoise", lambda seed, position, stream: original(seed, position, Stream.DRAFT))
    report = replay.check_replay(rows, 0.8, rounds(4), seed=0)
    assert any("early in the vocabulary" in problem for problem in report.problems), report


def test_numbers_that_draw_more_than_one_draft_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step or of all steps: each draft has its law, and together they do not."""
    rows = recorded()
    original = engine.StepNoise

    class Stuck(original):
        def next(self) -> float:
            self._index = 0
            return super().next()

    def stuck(seed: int, position: int, stream: Stream) -> Any:
        return (Stuck if stream is Stream.DRAFT else original)(seed, position, stream)

    def everywhere(seed: int, position: int, stream: Stream) -> Any:
        return original(seed, 0 if stream is Stream.DRAFT else position, stream)

    for noise in (stuck, everywhere):
        monkeypatch.setattr(engine, "StepNoise", noise)
        report = replay.check_replay(rows, 0.8, rounds(4), seed=0)
        assert any("as the one before" in problem for problem in report.problems), report


@pytest.mark.parametrize(
    "recent",
    [lambda self: self._recent.then(self._drafted), lambda self: self._recent.then([])],
    ids=["rejected tokens count", "drafted tokens do not count"],
)
def test_penalties_on_the_wrong_tokens_are_found(recent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = recorded()
    monkeypatch.setattr(
        engine._Laws, "__getitem__", lambda self, i: make_law(self._logits[i], self._params, recent(self))
    )
    assert not replay.check_replay(rows, 0.8, rounds(4), seed=0).passed


def test_a_window_of_penalties_that_grows_with_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = recorded()

    def grown(row: Any, params: SamplingParams, history: Any = ()) -> Any:
        return make_law(row, dataclasses.replace(params, penalty_last_n=None), history)

    monkeypatch.setattr(engine, "make_law", grown)
    assert not replay.check_replay(rows, 0.8, rounds(4), seed=0).passed


def test_copies_that_count_as_drawn_by_chance_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lookup.LookupDrafter._one

    def one(self: Any, request: Any) -> Any:
        draft = original(self, request)
        draft.laws = [SparseLaw(law.ids, law.probs / 2) for law in draft.laws]
        return draft

    rows = recorded()
    monkeypatch.setattr(lookup.LookupDrafter, "_one", one)
    report = replay.check_replay(rows, 0.8, rounds(4), seed=0)
    assert not report.passed
    assert all("copies" in problem or "all rules" in problem for problem in report.problems)


def test_a_law_that_is_not_the_one_drawn_from_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = drafters.DraftRequest.draw
    flat = SamplingParams(top_k=0, temperature=3.0)

    def draw(self: Any, law: Any, index: int) -> int:
        dense = np.log(np.maximum(law.dense(10), 1e-12))
        return original(self, make_law(dense, flat), index)

    rows = recorded()
    monkeypatch.setattr(drafters.DraftRequest, "draw", draw)
    assert not replay.check_replay(rows, 0.8, rounds(4), seed=0).passed


def rounds(count: int) -> Allowance:
    """Return an allowance for so many pieces of work."""
    return Allowance(count + 0.5, clock=itertools.count().__next__)


@pytest.mark.usefixtures("short_replay")
def test_a_wrong_block_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rules._next_law
    monkeypatch.setattr(rules, "_next_law", lambda p, q, accepted, scale: original(p, q, accepted, 1.0))
    assert "rule" in failed(run(budget_s=QUICK))


def test_wrong_rows_in_the_engine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine._Laws.__getitem__
    monkeypatch.setattr(engine._Laws, "__getitem__", lambda self, i: original(self, max(0, min(i, len(self) - 2))))
    assert {"greedy", "replay"} <= set(failed(run(budget_s=QUICK)))


def test_a_prompt_that_is_read_with_a_gap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is read in pieces; most prompts of a check fit a single one."""

    def read(context: Any, sequence: int, tokens: Any, progress: Any = None) -> None:
        chunk = drafters.chunk_size(context, progress)
        while (held := context.length(sequence)) < len(tokens):
            piece = list(tokens[held : held + chunk])
            context.decode([Span(sequence, [*piece[:-1], piece[0]] if held else piece, 0)])

    monkeypatch.setattr(engine, "read_ahead", read)
    options: Any = {
        "prompts": (CalibrationPrompt("letters", "abcdefghij"), CalibrationPrompt("letters", "jihgfedcba"))
    }
    checked = check(session_on(*contexts()), dataclasses.replace(settings(budget_s=QUICK), **options))
    assert "generations" in failed(checked)


def test_drafts_beyond_the_context_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.Engine._draft_request

    def request(self: Any, g: Any) -> Any:
        found = original(self, g)
        limit = min(g.request.policy.limit, g.request.max_tokens - g.stats.tokens - 1)
        return found and dataclasses.replace(found, limit=limit)

    monkeypatch.setattr(engine.Engine, "_draft_request", request)
    assert "endings" in failed(run(budget_s=QUICK))


@pytest.mark.usefixtures("short_replay")
def test_tokens_behind_the_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Engine, "_emit", _emits_everything)
    assert "endings" in failed(run(budget_s=QUICK))


@pytest.mark.usefixtures("short_replay")
def test_one_token_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.Engine.start

    def start(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        return original(self, replace(request, max_tokens=request.max_tokens + 1), *arguments, **options)

    monkeypatch.setattr(engine.Engine, "start", start)
    assert "endings" in failed(run(budget_s=QUICK))


def _emits_everything(self: Any, g: Any, tokens: list[int]) -> list[int]:
    for token in tokens:
        if g.request.watch is not None:
            g.request.watch(token)
        if token == END:
            g.finish_reason = "stop"
    g.history += tokens
    if len(g.tokens) >= g.request.max_tokens:
        g.finish_reason = g.finish_reason or "length"
    return tokens


@pytest.mark.usefixtures("short_replay")
def test_text_that_is_not_that_of_the_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = answers.Transcript.take
    monkeypatch.setattr(
        answers.Transcript, "take", lambda self, *, last: [text.upper() for text in original(self, last=last)]
    )
    assert failed(run(budget_s=QUICK)) == ["endings"]


def test_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(replay, "_settings", broken)
    report = run(budget_s=QUICK)
    assert failed(report) == ["replay"]
    assert "ZeroDivisionError: a mistake" in report.findings[4].problems[0]


# --- pieces -------------------------------------------------------------------------------------------------------


def test_a_ledger_knows_what_stands_before_a_row() -> None:
    target, _ = contexts()
    ledger = Ledger(target, "target")
    seen: list[tuple[list[int], int]] = []
    ledger.on_row = lambda prefix, row: seen.append((list(prefix), int(row.argmax())))
    ledger.decode([Span(0, [1, 2, 3], 2)])
    ledger.truncate(0, 1)
    ledger.decode([Span(0, [5, 6, 6], 1, padding=1)])
    assert [prefix for prefix, _ in seen] == [[1, 2], [1, 2, 3], [1, 5, 6]]
    assert [top for _, top in seen] == [target.model.greedy(prefix) for prefix, _ in seen]


def test_a_ledger_finds_a_cache_that_forgot_too_much() -> None:
    target, _ = contexts()
    ledger = Ledger(target, "target")
    ledger.decode([Span(0, [1, 2, 3], 0)])
    target.truncate(0, 1)
    ledger.decode([Span(0, [4], 1)])
    assert ledger.take_faults() == ["the target's cache holds 2 tokens after a pass over 1 tokens, and should hold 4"]
    assert ledger.take_faults() == []


def test_a_ledger_minds_the_capacity_it_states() -> None:
    target, _ = contexts()
    ledger = Ledger(target, "target")
    ledger.capacity = 2
    ledger.decode([Span(0, [1, 2], 1)])
    assert ledger.take_faults() == []
    ledger.decode([Span(0, [3], 1)])
    assert ledger.take_faults() == ["the target was given 3 tokens, and holds 2"]


def test_the_distance_of_rows() -> None:
    row = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)
    assert row_distance(row, row) == 0
    assert row_distance(row, row + np.float32(0.1)) == pytest.approx(0.1 / row[:3].std(), rel=1e-5)
    assert row_distance(row, np.roll(row, 1)) == np.inf
    assert SAME_ROW < 1


def test_an_allowance_does_not_begin_what_it_cannot_end() -> None:
    now = [0.0]
    allowance = Allowance(10.0, clock=lambda: now[0])
    now[0] = 4.0
    assert allowance.goes_on()
    now[0] = 6.0
    assert allowance.goes_on()
    now[0] = 6.5
    assert not allowance.goes_on()  # the longest took 4


def test_contradictions_are_none_in_a_sound_run() -> None:
    target, draft = contexts()
    with audited(session_on(target, draft), settings()) as subject:
        runs = list(endings._runs(subject, 0))
        assert {run.result.finish_reason for run in runs} == {"stop", "length", "context"}
        assert any(run.stop is not None and run.result.finish_reason == "stop" for run in runs)
        assert [fault for run in runs for fault in endings.contradictions(subject, run)] == []
