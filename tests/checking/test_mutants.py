"""That a check notices broken builds: scripts/check_mutants.py, on the smallest pair."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Each is one that only a real pair, or the whole program, can show; the script has more than forty.
CHOSEN = (
    "a single token is not taken back",
    "discard after drawing",
    "draft and verification share their noise",
    "block rule with the token rule's residual",
    "wrong bonus row in the engine",
    "max_tokens is one too many",
)


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    specification = importlib.util.spec_from_file_location("check_mutants", ROOT / "scripts" / "check_mutants.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["check_mutants"] = module
    specification.loader.exec_module(module)
    return module


def test_every_mutant_still_has_its_line(mutants: ModuleType, tmp_path: Path) -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) > 40
    assert set(CHOSEN) <= set(names)
    for number, mutant in enumerate(mutants.MUTANTS):
        text = (ROOT / "localspec" / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant.name
        compile(text.replace(mutant.old, mutant.new), f"{number}.py", "exec")


def test_a_line_that_is_gone_is_an_error(mutants: ModuleType, tmp_path: Path) -> None:
    gone = mutants.Mutant("gone", "engine.py", "no such line", "", ("greedy",))
    with pytest.raises(ValueError, match="The source has changed"):
        mutants.broken_copy(gone, tmp_path)


def test_the_record_keeps_what_earlier_runs_found(mutants: ModuleType, tmp_path: Path) -> None:
    first, second = (mutant.name for mutant in mutants.MUTANTS[:2])
    path = tmp_path / "mutants.json"
    mutants.keep(path, "a", {second: ["rule"], "gone": ["rule"]})
    mutants.keep(path, "a", {first: ["greedy"], "unbroken": []})
    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(record["failed"].items()) == [("unbroken", []), (first, ["greedy"]), (second, ["rule"])]
    mutants.keep(path, "b", {first: []})
    assert json.loads(path.read_text(encoding="utf-8")) == {"pair": "b", "failed": {first: []}}


@pytest.mark.model
@pytest.mark.parametrize("name", [None, *CHOSEN])
def test_mutants_are_caught_and_the_unbroken_build_passes(
    mutants: ModuleType, smollm2_path: Path, smollm2_q4_0_path: Path, name: str | None
) -> None:
    arguments = ["--target", str(smollm2_path), "--draft", str(smollm2_q4_0_path), "--threads", "1"]
    mutant = next((mutant for mutant in mutants.MUTANTS if mutant.name == name), None)
    failed = set(mutants.failed_parts(mutant, arguments))
    assert failed & set(mutant.caught_by) if mutant else not failed
