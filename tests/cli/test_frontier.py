"""``calibrate --frontier``: what takes part, how the budget is spent, what is printed and kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec.backend.choice import BackendName
from localspec.backend.identity import file_fingerprint
from localspec.calibration import processes
from localspec.calibration.costs import Setting
from localspec.calibration.search import Began, Message, PassesOf, Progress, SamplerOf, SearchJob, Written
from localspec.cli import frontier as command
from localspec.cli import main
from localspec.errors import BackendError, StoreError
from localspec.profile import SamplerCost, load_all
from tests.backend.ggufs import U32, gguf, numbers, scalar, string, strings
from tests.backend.tiny_models import write_llama
from tests.calibration.test_frontier import curves, text

KEYS = {
    "best_num_draft_tokens",
    "predicted_speedup",
    "cost_ratio",
    "verify_cost",
    "acceptance_rate",
    "tokens_per_step",
    "verdict",
}
VOCABULARY = [f"token {i}" for i in range(64)]


def write(path: Path, *, file_type: int, width: int, cut_of: Path | None = None) -> Path:
    cut = []
    if cut_of is not None:
        cut = [
            numbers("localspec.cut.ids", U32, range(32)),
            strings("localspec.cut.tokens", VOCABULARY),
            string("localspec.cut.made_from", file_fingerprint(cut_of)),
        ]
    metadata = [
        *cut,
        string("general.architecture", "llama"),
        scalar("general.file_type", U32, file_type),
        scalar("llama.block_count", U32, 2),
        scalar("llama.context_length", U32, 2048),
        scalar("llama.embedding_length", U32, width),
        scalar("llama.attention.head_count", U32, 4),
        string("tokenizer.ggml.model", "gpt2"),
        string("tokenizer.ggml.pre", "qwen2"),
        strings("tokenizer.ggml.tokens", VOCABULARY),
    ]
    path.write_bytes(gguf(metadata, [("output.weight", (width, 64), 0, 256 * width)]))
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("localspec.backend.choice.identity_at_hand", lambda name: f"{name} 1,")
    return {
        "target": write(tmp_path / "target.gguf", file_type=15, width=256),
        "other": write(tmp_path / "other.gguf", file_type=1, width=512),
        "draft": write(tmp_path / "draft.gguf", file_type=2, width=64),
        "cut": write(tmp_path / "cut.gguf", file_type=2, width=32, cut_of=tmp_path / "draft.gguf"),
    }


class Machine:
    """Stands for the processes: answers every job with costs by size of file, and notes the jobs.

    Attributes:
        jobs: that were run.
        stops: the number of messages after which a backend's process is interrupted.
        fails: backends whose process ends with an error.
    """

    def __init__(self) -> None:
        self.jobs: list[SearchJob] = []
        self.stops: dict[BackendName, int] = {}
        self.fails: set[BackendName] = set()

    def run(self, job: SearchJob, take: Callable[[Message], None]) -> bool:
        self.jobs.append(job)
        if job.backend in self.fails:
            raise BackendError("it broke")
        messages = self._messages(job)
        stop = self.stops.get(job.backend)
        for message in messages[:stop]:
            take(message)
        return stop is not None

    def _messages(self, job: SearchJob) -> list[Message]:
        slope = {"llamacpp": 0.6, "ik": 0.1}[job.backend]
        found: list[Message] = [Began(job.backend, f"{job.backend} 1, AVX2", Setting(2, "off"))]
        for i, path in enumerate(job.targets):
            found.append(PassesOf(job.backend, path, curves(path.stat().st_size * 4e-7, slope)))
            if not i:
                small = [curves(d.stat().st_size * 4e-7, 0.1, (1, 2, 3, 4)) for d in job.drafts]
                found += [PassesOf(job.backend, d, c, c) for d, c in zip(job.drafts, small, strict=True)]
                found.append(SamplerOf(job.backend, SamplerCost()))
                found.append(Progress("costs", 0.4))
            if job.agreement:
                for kind in ("code", "prose"):
                    for temperature in job.temperatures:
                        known = [_as_good(path) for path in job.drafts]
                        found.append(Written(path, text(kind, draft_names=known, temperature=temperature)))
        return found


def _as_good(_path: Path) -> Path:
    return Path("whole.gguf")  # accepted at 0.9


@pytest.fixture
def machine(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(processes, "run", made.run)
    return made


def arguments(files: dict[str, Path], *names: str) -> list[str]:
    options = {"target": "--target", "other": "--target", "draft": "--draft", "cut": "--draft"}
    given = [part for name in names for part in (options[name], str(files[name]))]
    return ["calibrate", "--frontier", *given]


def test_all_is_compared_and_the_winner_remembered(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(files, "target", "draft", "cut"), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result.keys() >= KEYS
    assert len(result["predicted_speedup"]) == len(result["tokens_per_step"]) == 9
    best = result["frontier"]["best"]
    assert (best["backend"], best["draft"], best["drafter"]) == ("ik", str(files["cut"]), "model")
    assert best["num_draft_tokens"] == result["best_num_draft_tokens"]
    factors = [change["factor"] for change in result["frontier"]["best_changes"]]
    assert factors == ["backend", "draft", "cut"]
    assert "4 profiles written" in captured.err
    kept = load_all(Path(files["target"].parent / "cache" / "profiles"))
    assert {(p.key.backend, p.key.build) for p in kept} == {
        ("llama.cpp", "llamacpp 1, AVX2"),
        ("ik_llama.cpp", "ik 1, AVX2"),
    }
    assert [job.agreement for job in machine.jobs] == [True, False]
    assert f"--draft {files['cut']}" in result["command"]


def test_the_report_and_its_command(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(files, "target", "other", "draft")) == 0
    out = capsys.readouterr().out
    assert "F16" in out
    assert "(another model)" in out
    assert "To run it: localspec generate --target" in out
    assert "--threads" not in out
    assert "\x1b" not in out


def test_the_command_has_the_threads_that_were_measured(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile is for a number of threads."""
    assert main([*arguments(files, "target", "draft"), "--threads", "1"]) == 0
    assert " --threads 1\n" in capsys.readouterr().out


def test_files_of_one_kind_go_by_names_that_differ(files: dict[str, Path], tmp_path: Path) -> None:
    drafts = [files["draft"]]
    for number, name in enumerate(("a/draft.gguf", "b/draft.gguf", "a/other.gguf"), 1):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        drafts.append(write(tmp_path / name, file_type=2, width=32 * number))
    _, found = command._model_files([files["target"]], [*drafts, files["cut"]], 512)
    names = [file.label for file in found]
    assert names == [f"{tmp_path.name}/draft.gguf", "a/draft.gguf", "b/draft.gguf", "other", "Q4_0 cut:32"]
    _, found = command._model_files([files["target"]], drafts[3:], 512)
    assert [file.label for file in found] == ["Q4_0"]


def test_without_drafts_copying_is_compared(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(files, "target"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS
    assert result["best_num_draft_tokens"] == 0
    assert result["verify_cost"][0] == 1
    assert {c["drafter"] for c in result["frontier"]["candidates"]} == {"none", "lookup"}
    assert "--no-draft" in result["command"]


def test_the_budget_is_the_whole_search_s(
    files: dict[str, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 70.0])
    jobs = command._jobs(["llamacpp", "ik"], [files["target"]], [], _settings(100.0), _values())
    monkeypatch.setattr(Machine, "_messages", lambda *_: [])
    command._measure(jobs, 100.0, clock=lambda: next(now))
    assert [job.settings.budget_s for job in machine.jobs] == [pytest.approx(0.65 * 90), pytest.approx(30)]


def _settings(budget_s: float) -> Any:
    from localspec.calibration.runner import CalibrationSettings

    return CalibrationSettings(budget_s=budget_s)


def _values() -> dict[str, Any]:
    return {"context": 512, "threads": None, "template": None}


def test_an_interrupt_keeps_what_there_is(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.stops["llamacpp"] = 5  # plain costs, the draft's, and no text yet
    assert main([*arguments(files, "target", "draft"), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["interrupted"]
    assert {c["drafter"] for c in result["frontier"]["candidates"]} == {"none"}
    assert [job.backend for job in machine.jobs] == ["llamacpp"]
    assert "interrupted: what was measured so far is compared" in captured.err
    machine.stops["llamacpp"] = 1
    assert main(arguments(files, "target", "draft")) == 130
    assert "too little was measured" in capsys.readouterr().err


def test_a_disk_that_is_full_in_the_end_does_not_cost_the_report(
    files: dict[str, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Path:
        raise StoreError("the disk is full")

    monkeypatch.setattr("localspec.profile.save", full)
    assert main([*arguments(files, "target", "draft"), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["frontier"]["candidates"]
    assert captured.err.endswith("localspec: error: the disk is full\n")
    assert "written to" not in captured.err


def test_a_backend_that_fails_is_left_out(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails.add("ik")
    assert main([*arguments(files, "target", "draft"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "left out ik: it broke" in captured.err
    assert {c["backend"] for c in json.loads(captured.out)["frontier"]["candidates"]} == {"llamacpp"}
    machine.fails.add("llamacpp")
    assert main(arguments(files, "target", "draft")) == 1
    assert capsys.readouterr().err.endswith("localspec: error: it broke\n")


def test_backends_can_be_chosen(files: dict[str, Path], machine: Machine) -> None:
    assert main([*arguments(files, "target"), "--backend", "llamacpp", "--quick", "-t", "0.5"]) == 0
    assert [job.backend for job in machine.jobs] == ["llamacpp"]
    assert machine.jobs[0].temperatures == (0.5,)
    machine.jobs.clear()
    assert main([*arguments(files, "target"), "--backends", "llamacpp", "--budget", "1m"]) == 0
    assert [job.backend for job in machine.jobs] == ["llamacpp"]
    assert machine.jobs[0].temperatures == (0.8, 0.0)
    assert 59 < machine.jobs[0].settings.budget_s <= 60


def test_a_backend_that_is_not_at_hand_is_said(
    files: dict[str, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(files["target"].parent / "cache"))
    monkeypatch.setenv("IK_LLAMA_CPP_LIB_PATH", "/no/such/library")
    monkeypatch.setattr(processes, "run", machine.run)
    assert main(arguments(files, "target")) == 0
    assert "left out ik: IK_LLAMA_CPP_LIB_PATH is '/no/such/library'" in capsys.readouterr().err
    assert [job.backend for job in machine.jobs] == ["llamacpp"]


def test_a_target_that_cannot_answer_is_refused_first(
    files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(files, "target"), "--target", str(files["cut"])]) == 1
    assert "it can draft, not answer" in capsys.readouterr().err
    assert not machine.jobs


@pytest.mark.parametrize("option", ["--show", "--validate"])
def test_options_that_do_not_go_together(
    option: str, files: dict[str, Path], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(files, "target"), option]) == 2
    assert f"cannot be used with {option}" in capsys.readouterr().err
    assert main(["calibrate", "--target", "a", "--target", "b"]) == 2
    assert "2 targets are named" in capsys.readouterr().err
    assert not machine.jobs


def test_targets_of_the_pair_that_are_at_hand_take_part(
    files: dict[str, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localspec import registry

    names = registry.load()
    target = names.pair(None).target
    monkeypatch.setattr("localspec.loading.find_files", lambda *_, **__: command_files(files))
    monkeypatch.setattr(registry.Store, "is_ready", lambda _store, model: model != target)
    monkeypatch.setattr(registry.Store, "path", lambda _store, model: Path(model.name))
    _, paths = command._targets({"pair": None, "target": None}, None)
    alike = [Path(m.name) for m in names.models.values() if names.origin(m) == target and m != target]
    assert paths == [files["target"], *alike]
    assert len(alike) >= 2
    assert command._targets({"pair": None, "target": None}, [])[1] == [files["target"]]


def command_files(files: dict[str, Path]) -> Any:
    from localspec.loading import ModelFiles

    return ModelFiles(files["target"], None)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "localspec", "calibrate", "--frontier", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_a_search_through_llama_cpp_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On models of a few kilobytes: everything but the numbers is as it will be."""
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOCALSPEC_THREADS", "1")
    pair = ("--target", write_llama(tmp_path / "t.gguf"), "--draft", write_llama(tmp_path / "d.gguf", seed=1))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\n\nonce upon a time")
    options = ("--ctx", "512", "--template", "chatml", "--prompts", prompts, "--quick", "--budget", "1s")
    made = run(*pair, *options, "--backends", "llamacpp", "--max-gamma", "3", "--json")
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert result.keys() >= KEYS
    ways = {(c["draft"] is not None, c["drafter"]) for c in result["frontier"]["candidates"]}
    assert ways == {(False, "none"), (False, "lookup"), (True, "model"), (True, "auto")}
    assert len(load_all(tmp_path / "profiles")) == 1
    assert "\r" not in made.stderr


@pytest.mark.model
def test_a_search_on_a_small_real_pair(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOCALSPEC_THREADS", "1")
    pair = ("--target", smollm2_path, "--draft", smollm2_path, "--derive", "Q4_0")
    options = ("--quick", "--budget", "10s", "--max-gamma", "4", "--backends", "llamacpp")
    made = run(*pair, *options, "--json")
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert result.keys() >= KEYS
    candidates = result["frontier"]["candidates"]
    assert len(candidates) == 2 + 2 * 2
    speeds = [c["tokens_per_s"] for c in candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert all(c["by_kind"] for c in candidates)
    own = next(c for c in candidates if c["draft"] == str(smollm2_path) and c["drafter"] == "model")
    derived = next(c for c in candidates if c["draft"] not in (None, str(smollm2_path)))
    assert derived["memory_bytes"] < own["memory_bytes"]
    shown = subprocess.run(
        [sys.executable, "-m", "localspec", "calibrate", "--show", "--target", smollm2_path, "--draft", smollm2_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
