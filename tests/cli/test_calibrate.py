"""``calibrate`` on a real small pair: what it writes, and that sessions follow it. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.calibration import runner
from localspec.calibration.costs import MeasuredCosts
from localspec.cli import calibrate as command
from localspec.cli import deriving, main
from localspec.cli.options import seconds
from localspec.errors import ContextOverflowError, InvalidOptionError, StoreError
from localspec.loading import find_files
from localspec.profile import SamplerCost
from localspec.sampling import LLAMACPP_DEFAULTS
from tests.backend.ggufs import model

KEYS = {
    "best_num_draft_tokens",
    "predicted_speedup",
    "cost_ratio",
    "verify_cost",
    "acceptance_rate",
    "tokens_per_step",
    "verdict",
}


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("1.5m", 90), (" 2 min ", 120)])
def test_budgets(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "soon", "3h", "nan"])
def test_other_budgets(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--budget"):
        seconds(text)


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
        ("--backends", "llamacpp", "--backend", "ik"),
        ("--frontier", "--backends", "llamacpp", "--backend", "ik"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    done = run("calibrate", *arguments)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("localspec: error: ")


def test_a_cache_that_cannot_be_written_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").write_text("in the way")
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(StoreError, match="LOCALSPEC_CACHE_DIR"):
        command._check_profiles_can_be_kept()


def test_derived_files_belong_to_one_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("localspec.backend.quantize.quantize", lambda source, path, *_, **__: path.touch())
    made = []
    (recipe,) = deriving.read_recipes("Q4_0")
    for name in ("one", "other"):
        draft = tmp_path / name / "draft.gguf"
        draft.parent.mkdir()
        draft.write_bytes(model(["a", name]))
        monkeypatch.setattr("localspec.loading.find_files", lambda *_, file=draft, **__: SimpleNamespace(draft=file))
        made.append(command._derived({"pair": None, "target": "t", "threads": None}, None, recipe))
    assert made[0] != made[1]
    assert all(Path(path).name == "draft-Q4_0.gguf" for path in made)
    (recipe,) = deriving.read_recipes("Q4_K_M")
    for named in (None, "the-draft"):  # it is that already, by whatever name
        assert command._derived({"pair": None, "target": "t", "threads": None}, named, recipe) == named


def test_what_is_made_of_the_default_pairs_draft_goes_with_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(_store: Any, model: Any, **_: Any) -> Path:
        return Path(getattr(model, "name", str(model)))

    monkeypatch.setattr("localspec.registry.Store.path", path)
    monkeypatch.setattr("localspec.cli.deriving.derive", lambda source, recipe, **_: Path("/made.gguf"))
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    found = []

    def search(values: dict[str, Any], *, drafts: list[str | None], **_: Any) -> None:
        found.extend(find_files(values["pair"], target=values["target"], draft=draft) for draft in drafts)

    monkeypatch.setattr(command, "search", search)
    assert main(["calibrate", "--frontier", "--derive", "Q4_0+cut:32768"]) == 0
    own, made = found
    assert own == find_files()
    assert made == replace(own, draft=Path("/made.gguf"))


class _Interrupted:
    """Stands for the measurement of a pair: keeps what it was asked for, and is interrupted."""

    def __init__(self) -> None:
        self.settings: list[Any] = []

    def __call__(self, pair: Any, settings: Any, **_: Any) -> Any:
        self.settings.append(settings)
        raise KeyboardInterrupt


def test_calibrates_at_the_settings_recommended_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = replace(LLAMACPP_DEFAULTS, temperature=0.6, top_k=20)
    session = SimpleNamespace(
        pair=SimpleNamespace(draft=1, draft_header=1), default_params=recommended, encode=len, close=lambda: None
    )
    measured = _Interrupted()
    monkeypatch.setattr(command, "open_session", lambda *_, **__: session)
    monkeypatch.setattr(runner, "calibrate", measured)
    monkeypatch.setattr(command, "_backend", lambda _values: "llamacpp")
    values = {p.name: None for p in command.calibrate.params} | {"threads": None, "top_k": 30}
    with pytest.raises(KeyboardInterrupt):
        command._measure(values, runner.CalibrationSettings(), False)
    assert measured.settings[0].params == replace(recommended, top_k=30)


def test_an_interrupt_keeps_the_drafts_measured_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Any] = []

    def measure(values: dict[str, Any], *_: Any) -> Any:
        if values["draft"] == "b":
            raise KeyboardInterrupt
        measured.append(values["draft"])
        return SimpleNamespace(interrupted=False), None

    monkeypatch.setattr(command, "_measure", measure)
    monkeypatch.setattr(command, "_check_candidates", lambda *_: None)
    assert len(command._measure_all({}, ["a", "b", "c"], runner.CalibrationSettings(), False)) == 1
    assert measured == ["a"]
    assert "interrupted" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        command._measure_all({}, ["b"], runner.CalibrationSettings(), False)
    assert "nothing is kept" in capsys.readouterr().err


def test_an_interrupted_validation_leaves_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("localspec.benchmark.benchmark", interrupted)
    session: Any = None
    assert command._validate(session, runner.CalibrationSettings(), lambda phase, share: None) == ()
    assert "interrupted" in capsys.readouterr().err


def test_long_prompts_get_the_room_they_need() -> None:
    assert runner.agreement_room(4096, [30, 200]) == 640
    assert runner.agreement_room(4096, [30, 2000]) == 2048
    assert runner.agreement_room(4096, [4090]) == 4096
    with pytest.raises(ContextOverflowError, match="--ctx"):
        runner.agreement_room(4096, [4096])


@pytest.mark.parametrize("arrives_in", ["costs", "sampler", None])
def test_after_an_interrupt_agreement_is_short(arrives_in: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(*_: Any, **__: Any) -> SamplerCost:
        if arrives_in == "sampler":
            raise KeyboardInterrupt
        return SamplerCost()

    def observe(*arguments: Any, **_: Any) -> Any:
        budgets.append(arguments[3].budget_s)
        assert arguments[3].temperatures == (0.8, 0.0)  # a report about the user's must always be possible
        raise KeyboardInterrupt

    budgets: list[float] = []
    said: list[str] = []
    context = SimpleNamespace(capacity=4096, threads=1, vocabulary_size=100, close=lambda: None)
    context.model = SimpleNamespace(vocabulary=SimpleNamespace(ends_generation=bool))
    monkeypatch.setattr(runner, "like_context", lambda *_, **__: context)
    monkeypatch.setattr(runner, "measure_memory_read", lambda threads: 1e9)
    monkeypatch.setattr(runner, "measure_costs", lambda *_, **__: MeasuredCosts((), arrives_in == "costs"))
    monkeypatch.setattr(runner, "measure_sampler", sampler)
    monkeypatch.setattr(runner, "observe", observe)
    pair: Any = SimpleNamespace(target=context, draft=context, draft_header=1)
    settings = runner.CalibrationSettings(quick=True, budget_s=100)
    with pytest.raises(KeyboardInterrupt):  # there is no agreement at all
        runner.calibrate(pair, settings, encode=lambda prompt: [1], notice=said.append)
    assert budgets == [pytest.approx(0 if arrives_in else 65)]
    assert len(said) == (arrives_in is not None)


def test_derived_drafts_are_made_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    steps: list[tuple[str, object]] = []

    def quantized(source: Path, path: Path, type_name: str, **_: Any) -> None:
        steps.append((source.name, type_name))
        path.write_bytes(model(["a", "b"]))

    def trimmed(source: Path, *, keep: int, texts: list[str], described: str) -> Any:
        steps.append((source.name, keep))
        assert described == "calibration"
        assert len(texts) > 5
        return SimpleNamespace(path=source.with_name("cut.gguf"))

    monkeypatch.setattr("localspec.backend.quantize.quantize", quantized)
    monkeypatch.setattr("localspec.calibration.trimming.trim", trimmed)
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(model(["a", "b"]))  # Q4_K_M
    recipes = deriving.read_recipes(" q4_0+cut:1024, CUT:2048,Q4_0,, q4_0 ")
    assert [deriving.derive(draft, one, threads=None).name for one in recipes[:2]] == ["cut.gguf", "cut.gguf"]
    whole = recipes[2]
    assert len(recipes) == 3
    assert steps == [("draft.gguf", "Q4_0"), ("draft-Q4_0.gguf", 1024), ("draft.gguf", 2048)]
    made = deriving.derive(draft, whole, threads=None)
    assert len(steps) == 3, "it is there"
    made.write_bytes(made.read_bytes()[:50])
    deriving.derive(draft, whole, threads=None)
    assert steps[3:] == [("draft.gguf", "Q4_0")], "what was there is damaged"


@pytest.mark.parametrize(
    "recipe",
    [
        "cut",
        "cut:",
        "cut:many",
        "cut:-1",
        "cut:" + 5000 * "9",
        "Q9",
        "Q8_0:3",
        "Q4_0+",
        "+",
        "cut:9+Q8_0",
        "cut:9+cut:8",
    ],
)
def test_recipes_that_make_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_derived", lambda *_: pytest.fail("something was made before all was read"))
    with pytest.raises(InvalidOptionError, match="--derive has "):
        command._drafts({}, ("draft",), f"Q4_0,{recipe}")


def test_each_candidate_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_derived", lambda _values, draft, recipe: f"{draft} {recipe.type_names[0]}")
    assert command._drafts({}, ("a", "b", "a"), "Q4_0,Q8_0,Q4_0") == ["a", "b", "a Q4_0", "a Q8_0"]
    assert command._drafts({}, (), None) == [None]


def test_candidates_are_ranked_by_what_they_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether that pays or not, and whatever plain decoding took in the minute of each."""

    def result(draft: str, *speedups: float) -> Any:
        agreement = SimpleNamespace(under=lambda _rule: SimpleNamespace(tokens_per_step=()))
        found = SimpleNamespace(draft=draft, at_temperature=lambda: [agreement], rule="block")
        found.speedups = lambda _: speedups
        return SimpleNamespace(), found

    results = [result("gains", 1, 1.1, 1.2), result("hardly", 1, 0.7, 1.01), result("loses", 1, 0.9, 0.8)]
    assert [command._gain(findings) for _, findings in results] == [1.2, 1.01, 0.9]
    command._rank(results)
    assert capsys.readouterr().err.splitlines()[1:-1] == ["  1.20×  gains", "  1.01×  hardly", "  0.90×  loses"]
