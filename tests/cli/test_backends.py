"""``calibrate --backends``: what is run for each, which wins, and what is said. Nothing is measured here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.backend import ik_library
from localspec.cli import backends, main
from tests.test_profile import profile

Run = Callable[..., list[list[str]]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what makes the children answer; it returns the list of their commands, which fills as they run."""

    def answering(returncodes: dict[str, int] | None = None, **speeds: tuple[float, float]) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_options: Any) -> Any:
            commands.append(command)
            name = command[command.index("--backend") + 1]
            plain, gain = speeds[name]
            one = replace(profile(), plain_tokens_per_s=plain)
            verdict = replace(one.verdicts[0], predicted_speedup=(1.0, gain), best_num_draft_tokens=int(gain > 1))
            result = {
                "best_num_draft_tokens": int(gain > 1),
                "predicted_speedup": [1.0, gain],
                "verify_cost": [1.0, 1.3],
                "profile": json.loads(replace(one, verdicts=(verdict,)).to_json()),
            }
            code = (returncodes or {}).get(name, 0)
            return SimpleNamespace(returncode=code, stdout="" if code else json.dumps(result))

        monkeypatch.setattr(backends, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
        monkeypatch.setattr(ik_library, "find_library", lambda: None)
        return commands

    return answering


def test_the_faster_one_wins_by_its_best_speed(measured: Run, capsys: pytest.CaptureFixture[str]) -> None:
    measured(llamacpp=(38.0, 0.8), ik=(36.0, 1.3))
    assert main(["calibrate", "--backends", "llamacpp,ik"]) == 0
    out = capsys.readouterr().out
    assert "llamacpp" in out
    assert "38.0 tokens/s without drafts" in out
    assert "46.8 tokens/s with 1 drafted token, 1.30×; plain 36.0" in out
    assert "ik is the fastest" in out


def test_as_json_the_winner_stands_beside_all(measured: Run, capsys: pytest.CaptureFixture[str]) -> None:
    measured(llamacpp=(50.0, 0.9), ik=(36.0, 1.3))
    assert main(["calibrate", "--backends", " ik, llamacpp,ik", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["backend"] == "llamacpp"
    assert result["best_num_draft_tokens"] == 0
    assert {name: one["tokens_per_s"] for name, one in result["backends"].items()} == {
        "ik": pytest.approx(46.8),
        "llamacpp": 50.0,
    }


def test_options_are_handed_on(measured: Run) -> None:
    commands = measured(llamacpp=(38.0, 0.8), ik=(36.0, 1.3))
    options = ["--target", "a b.gguf", "--draft=d.gguf", "--quick", "-t", "0", "--ban", "5", "--ban", "6"]
    assert main(["calibrate", "--backends", "llamacpp,ik", *options]) == 0
    given = ["--target=a b.gguf", "--draft=d.gguf", "--temperature=0.0", "--ban=5", "--ban=6", "--quick"]
    assert [sorted(command[4:-3]) for command in commands] == [sorted(given)] * 2
    assert [command[-3:] for command in commands] == [["--backend", name, "--json"] for name in ("llamacpp", "ik")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "cuda"], "--backends is 'cuda'; list some of llamacpp, ik"),
        (["--backends", ","], "list some of"),
        (["--backends", "ik", "--show"], "--show is about one backend"),
        (["--backends", "ik", "--plot", "x.png"], "--plot is about one backend"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("code", "leaves", "message"), [(1, 1, "failed"), (-4, 1, "signal 4"), (130, 130, "")])
def test_a_measurement_that_fails(
    measured: Run, code: int, leaves: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = measured({"ik": code}, llamacpp=(38.0, 0.8), ik=(36.0, 1.3))
    assert main(["calibrate", "--backends", "ik,llamacpp"]) == leaves
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert len(commands) == 1
