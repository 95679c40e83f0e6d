"""``check`` and ``bench`` as commands: usage, what they print, exit codes. Nothing here asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localspec import session
from localspec.checking.findings import Finding, Report
from localspec.cli import main
from localspec.cli.check import _as_json, _print, _verdict
from localspec.errors import InvalidOptionError


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localspec", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--no-draft"),
        ("check", "--budget", "soon"),
        ("check", "--gamma", "0"),
        ("check", "-t", "-1"),
        ("check", "--pair", "nothing"),
        ("check", "--prompts", "no such file"),
        ("bench", "--no-draft"),
        ("bench", "--gamma", "some"),
        ("bench", "--gamma", "0"),
        ("bench", "--kinds", "poems"),
        ("bench", "--temperatures", "cold"),
        ("bench", "--temperatures", ""),
        ("bench", "--kinds", ""),
        ("bench", "--prompts", ""),
        ("bench", "--plot", "", "--pair", "nothing"),
        ("bench", "--trials", "0"),
        ("bench", "--budget", "0"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("localspec: error: ")
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("command", ["check", "bench"])
def test_the_models_are_loaded_as_the_options_say(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def load(**names: object) -> None:
        asked.update(names)
        raise InvalidOptionError("enough")

    monkeypatch.setattr(session, "load_pair", load)
    options = ("--target", "a", "--draft", "b", "--ctx", "77", "--threads", "3", "--backend", "ik")
    assert main([command, *options]) == 2
    assert "enough" in capsys.readouterr().err
    expected = {"target": "a", "draft": "b", "context": 77, "threads": 3, "backend": "ik", "use_draft": True}
    assert {name: asked[name] for name in expected} == expected


GOOD = Finding(part="replay", passed=True, summary="all well " * 20, false_alarm=1e-4)
BAD = Finding(part="greedy", passed=False, summary="not so", false_alarm=0.0, problems=("token 3",))


def test_lines_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    _print(GOOD)
    _print(BAD)
    out = capsys.readouterr().out
    assert "at most 1 in 10,000 seeds" in " ".join(out.split())
    assert "FAILED greedy identity: not so." in out
    assert "- token 3" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "once in 10,000 seeds" in _verdict(Report((GOOD,)))
    assert "greedy identity" in _verdict(Report((GOOD, BAD)))
    assert _verdict(Report((GOOD,), interrupted=True)) == "Not finished."
    assert not Report((GOOD,), interrupted=True).passed
    record = json.loads(json.dumps(_as_json(Report((GOOD, BAD)), {"target": "a"})))
    assert record["target"] == "a"
    assert (record["passed"], record["findings"][1]["problems"]) == (False, ["token 3"])


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _print(GOOD)
    _print(BAD)
    lengths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert min(columns, 100) - 20 < max(lengths) <= min(columns, 100)


@pytest.mark.model
def test_a_small_pair(smollm2_path: Path, smollm2_q4_0_path: Path, tmp_path: Path) -> None:
    pair = ("--target", smollm2_path, "--draft", smollm2_q4_0_path, "--ctx", "512", "--threads", "1")
    checked = run("check", *pair, "--budget", "8s")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.startswith(f"Checking {Path(smollm2_path).name} with the draft {smollm2_q4_0_path.name}")
    assert checked.stdout.count("ok    ") == 7
    assert "Exact with respect to the logits evaluated" in checked.stdout
    assert checked.stderr == ""

    timed = run(
        "bench", *pair, "--budget", "1s", "-n", "8", "--kinds", "prose", "--json", "--plot", tmp_path / "b.svg"
    )
    assert timed.returncode == 0, timed.stderr
    cells = json.loads(timed.stdout)["cells"]
    assert [(cell["kind"], cell["temperature"]) for cell in cells] == [("prose", 0.0), ("prose", 0.8)]
    assert [side["num_draft_tokens"] for side in cells[0]["sides"]] == [None, 2, 4]
    assert all(side["speedup"]["low"] > 0 for cell in cells for side in cell["sides"])
    assert "<svg" in (tmp_path / "b.svg").read_text(encoding="utf-8")
