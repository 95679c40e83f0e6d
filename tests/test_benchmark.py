"""Timing in turn: order, bookkeeping and predictions. Nothing here asserts a time."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.benchmark import BenchmarkSettings, Cell, Side, Spread, alternate, benchmark, ratios
from localspec.cli import bench as bench_command
from localspec.cli import main
from localspec.cli.bench import _lengths, _numbers, _panel, _prompts, table
from localspec.errors import InvalidOptionError
from localspec.sampling import SamplingParams
from localspec.tuning import ProfileLookup
from tests.checking.sessions import PARAMS, PROMPTS

GREEDY = SamplingParams(temperature=0)


class Recording:
    """Stands for a session: notes what is asked of it, and answers with statistics of its own making."""

    default_params = PARAMS

    def __init__(
        self,
        *,
        tokens: int = 10,
        interrupt_at: int | None = None,
        verdicts: Any = None,
        ends_at_once: float | None = None,
    ) -> None:
        profile = None if verdicts is None else SimpleNamespace(verdicts=verdicts)
        self.cleared: list[int] = []
        self.pair = SimpleNamespace(draft=object(), profile=ProfileLookup(profile, None))  # type: ignore[arg-type]
        self.asked: list[tuple[str, float, int | None, int]] = []
        self._tokens = tokens
        self._interrupt_at = interrupt_at
        self._ends_at_once = ends_at_once

    def clear(self) -> None:
        self.cleared.append(len(self.asked))

    def generate(self, prompt: str, params: SamplingParams, **options: Any) -> Any:
        if len(self.asked) == self._interrupt_at:
            raise KeyboardInterrupt
        gamma = options["num_draft_tokens"]
        self.asked.append((prompt, params.temperature, gamma, options["seed"]))
        speed = {0: 10.0, 2: 15.0, None: 20.0}[gamma] + options["seed"] if self._tokens > 1 else 0.0
        if params.temperature == self._ends_at_once:
            speed = 0.0
        drafted = {0: 0, 2: 2, None: 3}[gamma] * 5
        return SimpleNamespace(
            stats=SimpleNamespace(
                tokens_per_s=speed,
                tokens=self._tokens,
                steps=5,
                drafted=drafted,
                prefill_s=1.0 if gamma == 0 else 1.5,
                wall_s=9 / speed if speed else 0.0,
            )
        )


def settings(**options: Any) -> BenchmarkSettings:
    defaults: dict[str, Any] = {
        "params": PARAMS, "temperatures": (0.0, 0.8), "lengths": (None, 2), "prompts": PROMPTS, "trials": 2
    }  # fmt: skip
    return BenchmarkSettings(**{**defaults, **options})


def test_sides_take_turns_back_and_forth() -> None:
    called: list[str] = []
    rounds: list[int] = []

    def side(name: str) -> Any:
        return lambda: called.append(name) or len(called)

    results = alternate({"a": side("a"), "b": side("b")}, 3, progress=lambda: rounds.append(1))
    assert called == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert results == {"a": [3, 6, 7], "b": [4, 5, 8]}
    assert len(rounds) == 3


def test_spreads() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert ratios([2.0, 9.0], [1.0, 3.0]) == Spread(2.5, 2.0, 3.0)
    assert str(Spread(1.0, 0.5, 2.0)) == "1.000 (0.500-2.000)"


def test_every_side_runs_the_same_prompt_and_seed() -> None:
    session = Recording()
    cells = benchmark(session, settings()).cells  # type: ignore[arg-type]
    asked = session.asked[2:]  # what warms up
    assert len(asked) == 2 * 2 * 3
    first = asked[:3]
    assert [gamma for *_, gamma, _ in first] == [0, None, 2]
    assert len({(prompt, temperature, seed) for prompt, temperature, _, seed in first}) == 1
    assert [gamma for *_, gamma, _ in asked[6:9]] == [2, None, 0]
    assert asked[6][0] != asked[0][0]
    assert [(cell.kind, cell.temperature, cell.trials) for cell in cells] == [
        ("letters", 0.0, 2),
        ("letters", 0.8, 2),
    ]
    auto, two = cells[0].sides
    assert auto.speedup == ratios([20.0, 21.0], [10.0, 11.0])
    assert two.tokens_per_s == Spread(15.5, 15.0, 16.0)
    assert (auto.tokens_per_step, auto.drafted_per_step, two.drafted_per_step) == (2.0, 3.0, 2.0)
    assert auto.predicted is None


def test_the_draft_reads_the_prompt_too() -> None:
    """What no side finds in the caches, and what a whole answer pays for it."""
    session = Recording()
    cell, _ = benchmark(session, settings(trials=1)).cells  # type: ignore[arg-type]
    assert session.cleared == list(range(len(session.asked)))
    auto, two = cell.sides
    assert auto.speedup.median == 2.0
    assert auto.overall.median == pytest.approx((1.0 + 9 / 10) / (1.5 + 9 / 20))
    assert two.overall.median == pytest.approx((1.0 + 9 / 10) / (1.5 + 9 / 15))


def test_predictions_stand_beside_what_they_are_about() -> None:
    verdicts = [
        SimpleNamespace(kind="letters", temperature=0.0, predicted_speedup=(1.0, 1.2, 1.4)),
        SimpleNamespace(kind="all", temperature=0.8, predicted_speedup=(1.0, 0.8)),
    ]
    cold, hot = benchmark(Recording(verdicts=verdicts), settings()).cells  # type: ignore[arg-type]
    assert [side.predicted for side in cold.sides] == [1.4, 1.4]
    assert [side.predicted for side in hot.sides] == [1.0, None]
    other, _ = benchmark(Recording(verdicts=verdicts), settings(rule="coupled")).cells  # type: ignore[arg-type]
    assert [side.predicted for side in other.sides] == [None, None]


def test_a_budget_ends_after_whole_rounds() -> None:
    brief = settings(temperatures=(0.0,), trials=50, budget_s=1e-9)
    timings = benchmark(Recording(), brief)  # type: ignore[arg-type]
    assert [cell.trials for cell in timings.cells] == [1]
    assert not timings.interrupted


def test_an_interrupt_keeps_what_there_is() -> None:
    timings = benchmark(Recording(interrupt_at=2 + 6 + 4), settings())  # type: ignore[arg-type]
    assert [cell.trials for cell in timings.cells] == [2, 1]
    assert timings.interrupted
    with pytest.raises(KeyboardInterrupt):
        benchmark(Recording(interrupt_at=4), settings())  # type: ignore[arg-type]


def test_answers_without_a_speed_are_an_error() -> None:
    with pytest.raises(InvalidOptionError, match="ended at once"):
        benchmark(Recording(tokens=1), settings())  # type: ignore[arg-type]


def test_a_cell_without_a_speed_does_not_cost_the_others() -> None:
    timings = benchmark(Recording(ends_at_once=0.8), settings())  # type: ignore[arg-type]
    assert [cell.temperature for cell in timings.cells] == [0.0]
    assert timings.untimed == (("letters", 0.8),)


@pytest.mark.parametrize("interrupt_at", [4, 2 + 6 + 4])
def test_an_interrupted_bench_leaves_with_130_and_what_it_has(
    interrupt_at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = Recording(interrupt_at=interrupt_at)
    monkeypatch.setattr(bench_command, "open_session", lambda values: nullcontext(timed))
    monkeypatch.setattr(bench_command, "what_runs", lambda session: {"target": "a.gguf", "draft": "b.gguf"})
    code = main(["bench", "--kinds", "prose", "--gamma", "auto,2", "--temperatures", "0,0.8", "--json"])
    printed = capsys.readouterr()
    assert code == 130
    assert printed.err.startswith("interrupted")
    if interrupt_at == 4:
        assert printed.out == ""
    else:
        record = json.loads(printed.out)
        assert (record["target"], record["interrupted"]) == ("a.gguf", True)
        assert [cell["trials"] for cell in record["cells"]] == [2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (0,)},
        {"lengths": ()},
        {"temperatures": ()},
        {"temperatures": (-1.0,)},
        {"trials": 0},
        {"max_tokens": 1},
    ],
)
def test_settings_that_cannot_be_timed(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        settings(**options)


def cell(*, predicted: float | None = None) -> Cell:
    sides = tuple(
        Side(gamma, Spread(30, 29, 31), *[Spread(1.2, 1.1, 1.3)] * 2, 2.5, gamma or 1.7, predicted)
        for gamma in (None, 2, 4)
    )
    return Cell("summarising a text", 0.8, 3, Spread(123.45, 119.0, 130.1), sides)


def test_the_table_fits_a_terminal() -> None:
    lines = list(table([cell(predicted=1.25), cell()]))
    assert all(len(line) <= 80 for line in lines), [len(line) for line in lines]
    assert "123.5 (119-130)" in lines[1]
    assert lines[1].endswith("1.25   1.20")
    assert lines[4].endswith("-   1.20")


def test_the_picture_has_measured_and_predicted() -> None:
    panel = _panel([cell(predicted=1.25)], 0.8)
    assert [(curve.style, list(curve.x)) for curve in panel.curves] == [
        ("line", [2, 4]), ("dashed", [2, 4]), ("points", [1.7])
    ]  # fmt: skip
    assert _panel([cell()], 0.0).curves == []


def test_options() -> None:
    assert _lengths("auto, 2,4,2") == (None, 2, 4)
    assert _numbers("0,0.8") == (0.0, 0.8)
    assert {prompt.kind for prompt in _prompts(None, None)} == {"code", "editing", "prose"}
    assert {prompt.kind for prompt in _prompts(None, "code")} == {"code"}
    for wrong in (
        lambda: _lengths("two"),
        lambda: _lengths("-1"),
        lambda: _numbers("cold"),
        lambda: _prompts(None, "x"),
    ):
        with pytest.raises(InvalidOptionError):
            wrong()
