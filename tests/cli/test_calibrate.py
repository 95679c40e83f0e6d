"""``calibrate`` on a real small pair: what it writes, and that sessions follow it. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.cli.calibrate import _seconds
from localspec.errors import InvalidOptionError

KEYS = {
    "best_num_draft_tokens",
    "predicted_speedup",
    "cost_ratio",
    "verify_cost",
    "acceptance_rate",
    "tokens_per_step",
    "verdict",
}


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), (" 2 min ", 120)])
def test_budgets(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "soon", "3h", "nan"])
def test_other_budgets(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--budget"):
        _seconds(text)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localspec", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.model
def test_a_small_pair_from_no_profile_to_one(
    smollm2_path: Path, smollm2_q4_0_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOCALSPEC_THREADS", "1")
    pair = ("--target", smollm2_path, "--draft", smollm2_q4_0_path, "--ctx", "512")
    before = run("calibrate", *pair, "--show")
    assert before.returncode == 1
    named = f"--target {shlex.quote(str(smollm2_path))} --draft {shlex.quote(str(smollm2_q4_0_path))}"
    assert f"localspec calibrate {named}\n" in before.stderr  # to be copied: without the names it is another pair
    assert before.stdout == ""

    rough = run("generate", "Hi", *pair, "-n", "8", "--json", "--seed", "1")
    assert rough.returncode == 0, rough.stderr
    assert "roughly" in rough.stderr

    made = run(
        "calibrate", *pair, "--quick", "--budget", "6s", "--max-gamma", "4", "--json", "--plot", tmp_path / "p.svg"
    )
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert report.keys() >= KEYS
    assert len(report["predicted_speedup"]) == len(report["tokens_per_step"]) == 5
    assert report["predicted_speedup"][0] == 1
    assert report["verify_cost"][0] == 1
    assert 0 < report["acceptance_rate"] <= 1
    assert "\r" not in made.stderr
    assert "\x1b" not in made.stderr + made.stdout
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")

    shown = run("calibrate", *pair, "--show")
    assert shown.returncode == 0, shown.stderr
    assert "plain decoding" in shown.stdout
    after = run("generate", "Hi", *pair, "-n", "8", "--json", "--seed", "1")
    assert after.returncode == 0, after.stderr
    assert "roughly" not in after.stderr

    other = run("calibrate", *pair, "--show", "--threads", "2")
    assert other.returncode == 1
    assert "threads" in other.stderr
    assert os.listdir(tmp_path / "profiles")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--show", "--quick"),
        ("--show", "--draft", "a", "--draft", "b"),
        ("--plot", "no/such/folder/p.png"),
        ("--plot", "p.mp4"),
        ("--budget", "soon"),
        ("--max-gamma", "0"),
        ("-t", "-1"),
        ("--show", "--pair", "nothing"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    done = run("calibrate", *arguments)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("localspec: error: ")
