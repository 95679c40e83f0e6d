"""``localspec models``, as its users run it; errors are turned into lines by the program's main function."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from localspec.backend.gguf import read_numbers
from localspec.backend.model_header import read_header
from localspec.cli.models import models
from localspec.errors import (
    IncompatibleModelsError,
    IntegrityError,
    InvalidModelFileError,
    InvalidOptionError,
    ModelNotFoundError,
    PromptError,
    UnsupportedModelError,
)
from tests.backend.ggufs import U32, model, scalar, string
from tests.backend.tiny_models import TOKENS as PIECES
from tests.backend.tiny_models import write_llama

TOKENS = ["<|endoftext|>", "a", "b"]
MODELS = """
default_pair = "ours"
[models.big]
licence = "MIT"
sources = [{ path = "big.gguf" }]
[models.small]
sources = [{ path = "small.gguf" }]
[models.other]
sources = [{ path = "other.gguf" }]
[models.missing]
sources = [{ path = "nowhere.gguf" }]
[models.made]
derive = { from = "big", type = "Q4_0" }
[pairs.ours]
target = "big"
draft = "small"
[pairs.wrong]
target = "big"
draft = "other"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three model files that the user's models.toml names."""
    monkeypatch.setenv("LOCALSPEC_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "models.toml").write_text(MODELS)
    template = string("tokenizer.chat_template", "{{ messages }}")
    (tmp_path / "big.gguf").write_bytes(model(TOKENS, template, scalar("tokenizer.ggml.eos_token_id", U32, 0)))
    (tmp_path / "small.gguf").write_bytes(model([*TOKENS, "[PAD3]"]))
    (tmp_path / "other.gguf").write_bytes(model(["<|endoftext|>", "x", "b"], pre="llama-bpe"))
    return tmp_path


def run(*arguments: str, answer: str | None = None) -> Result:
    result = CliRunner().invoke(models, arguments, input=answer, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def test_pull_takes_the_default_pair(home: Path) -> None:
    result = run("pull")
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"big: ready, {home / 'big.gguf'}",
        f"small: ready, {home / 'small.gguf'}",
    ]
    assert "big: already here" in run("pull", "big").stderr
    assert "big: verified again" in run("pull", "--verify", "big", "ours").stderr


def test_verify_finds_a_damaged_file(home: Path) -> None:
    run("pull", "big")
    path = home / "big.gguf"
    times = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    import os

    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(IntegrityError, match="is damaged"):
        run("pull", "--verify", "big")


def test_path_prints_nothing_else(home: Path) -> None:
    assert run("path", "big").stdout == f"{home / 'big.gguf'}\n"
    assert run("path", "ours").stdout == f"{home / 'big.gguf'}\n{home / 'small.gguf'}\n"


def test_list(home: Path) -> None:
    run("pull", "big")
    lines = run("list").stdout.splitlines()
    ours = next(line for line in lines if line.startswith("  ours"))
    assert ours.split()[:4] == ["ours", "(default)", "partly", "here"]
    assert any(line.startswith("  big *") and "ready" in line for line in lines)
    assert any(line.startswith("  made *") and "made from big" in line for line in lines)
    assert any(line.startswith("  qwen2.5-coder-1.5b-q4_k_m ") and "1.12 GB" in line for line in lines)


def test_list_as_json(home: Path) -> None:
    listing = json.loads(run("list", "--json").stdout)
    assert listing["default_pair"] == "ours"
    pair = next(pair for pair in listing["pairs"] if pair["name"] == "ours")
    assert (pair["target"], pair["draft"], pair["ready"], pair["verified"]) == ("big", "small", False, False)
    made = next(entry for entry in listing["models"] if entry["name"] == "made")
    assert (made["status"], made["made_from"], made["type"]) == ("absent", "big", "Q4_0")


def test_inspecting_one_file(home: Path) -> None:
    text = run("inspect", str(home / "big.gguf"), "--ctx", "300").stdout
    for words in (
        "llama, 2 layers of 64",
        "3 tokens (gpt2, qwen2)",
        "2,048 tokens as trained",
        "EOS 0 (not added",
        "yes, 14 characters",
        "at 300 tokens",
        "KV cache 262 kB",
    ):
        assert words in text
    assert "more than it was trained for" in run("inspect", str(home / "big.gguf"), "--ctx", "4096").stdout


def test_inspecting_as_json(home: Path) -> None:
    run("pull")
    report = json.loads(run("inspect", "ours", "--json").stdout)
    assert [each["vocabulary_size"] for each in report["models"]] == [3, 4]
    assert report["models"][0]["memory_bytes"]["cache"] == 4096 * 2 * 4 * 32 * 2
    assert report["pair"]["compatible"] is True
    total = sum(sum(each["memory_bytes"].values()) for each in report["models"])
    assert report["pair"]["memory_bytes"] == total
    assert json.loads(run("inspect", str(home / "big.gguf"), "--json").stdout)["pair"] is None


@pytest.mark.parametrize("arguments", [["wrong"], ["big", "other"]])
def test_inspecting_a_pair_that_does_not_fit(home: Path, arguments: list[str]) -> None:
    run("pull", "big", "other")
    runner = CliRunner()
    result = runner.invoke(models, ["inspect", *arguments], standalone_mode=False)
    assert isinstance(result.exception, IncompatibleModelsError)
    assert "first token that differs is 1: 'a' against 'x'" in str(result.exception)
    assert "compatible      no" in result.stdout
    result = runner.invoke(models, ["inspect", "--json", *arguments], standalone_mode=False)
    report = json.loads(result.stdout)
    assert report["pair"]["compatible"] is False
    assert report["pair"]["reason"] == str(result.exception)


def test_inspecting_fetches_nothing(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="`localspec models pull big`"):
        run("inspect", "big")
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        run("inspect", "nothing.gguf")
    with pytest.raises(ModelNotFoundError, match="did you mean 'small'"):
        run("inspect", "smal")
    with pytest.raises(InvalidModelFileError, match="is a directory"):
        run("inspect", str(home))


def test_removing_asks_first(home: Path) -> None:
    cache = home / "cache" / "models" / "qwen2.5-coder-0.5b-q4_k_m"
    cache.mkdir(parents=True)
    (cache / "something.part").write_bytes(bytes(5000))
    name = "qwen2.5-coder-0.5b-q4_k_m"
    result = run("remove", name, answer="n\n")
    assert result.stdout == ""
    assert f"Delete {name} (5 kB)?" in result.stderr
    assert list(cache.iterdir()) != []
    assert "deleted, 5 kB freed" in run("remove", name, answer="y\n").stderr
    assert [item.name for item in cache.iterdir()] == ["lock"]
    assert "not in the store" in run("remove", name).stderr


def test_removing_what_another_was_made_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(source: Path, destination: Path, type_name: str, *, threads: int | None) -> None:
        destination.write_bytes(source.read_bytes())

    monkeypatch.setattr("localspec.backend.quantize.quantize", quantize)
    run("pull", "made")
    assert "made was made from it and stays usable" in run("remove", "big", "--yes").stderr
    assert (home / "big.gguf").exists()
    assert "made was made" not in run("remove", "big", "made", "--yes").stderr
    assert not (home / "cache" / "models" / "made" / "made.gguf").exists()


def test_an_interruption_says_how_to_go_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("localspec.registry.Store.path", interrupt)
    result = CliRunner().invoke(models, ["pull", "big"], standalone_mode=False)
    assert "the same command goes on where it stopped" in result.stderr
    assert result.exception is not None


@pytest.mark.model
def test_a_real_pair(qwen_target_path: Path, qwen_draft_path: Path, smollm2_path: Path) -> None:
    text = run("inspect", str(qwen_target_path), str(qwen_draft_path)).stdout
    assert "KV cache 117 MB" in text
    assert "compatible      yes" in text
    with pytest.raises(IncompatibleModelsError, match=r"151,936 tokens.*49,152 tokens"):
        run("inspect", str(qwen_target_path), str(smollm2_path))


# --- trim -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that can be cut, and no long text to tokenize."""
    monkeypatch.setattr("localspec.calibration.trimming.library_text", lambda: "the quick brown fox")
    return write_llama(home / "tiny.gguf")


def test_trim_writes_a_draft_and_prints_its_path(tiny: Path, home: Path) -> None:
    (home / "text.txt").write_text("zebra zoo")
    result = run("trim", str(tiny), "--keep", "270", "--from", str(home / "text.txt"))
    path = Path(result.stdout.strip())
    assert path.is_file()
    assert path.is_relative_to(home / "cache" / "derived")
    header = read_header(path)
    assert header.kept_ids is not None
    names = {PIECES[int(token)] for token in read_numbers(header.kept_ids)}
    assert set("zebrao") <= names
    assert len(names) == 270
    assert "tiny.gguf: logits for 270 of 287 ids, among them" in result.stderr
    assert "270 of them" in run("inspect", str(path)).stdout


def test_the_same_text_gives_the_same_file_and_another_text_another(tiny: Path, home: Path) -> None:
    (home / "one.txt").write_text("zzz")
    (home / "two.txt").write_text("yyy")

    def made(name: str) -> str:
        return run("trim", str(tiny), "--keep", "262", "--from", str(home / name)).stdout

    assert made("one.txt") == made("one.txt") != made("two.txt")


def test_trim_can_give_the_draft_a_name(tiny: Path, home: Path) -> None:
    result = run("trim", str(tiny), "--keep", "270", "--name", "tiny-cut")
    assert run("path", "tiny-cut").stdout == result.stdout
    listed = json.loads(run("list", "--json").stdout)
    (entry,) = [entry for entry in listed["models"] if entry["name"] == "tiny-cut"]
    assert entry["sha256"] == hashlib.sha256(Path(result.stdout.strip()).read_bytes()).hexdigest()
    assert "big" in {entry["name"] for entry in listed["models"]}
    with pytest.raises(InvalidOptionError, match="there is a model 'tiny-cut' already"):
        run("trim", str(tiny), "--keep", "270", "--name", "tiny-cut")
    before = (home / "models.toml").read_text()
    with pytest.raises(InvalidOptionError, match="a name is lower-case"):
        run("trim", str(tiny), "--keep", "270", "--name", "Tiny Cut")
    assert (home / "models.toml").read_text() == before


def test_a_name_that_cannot_be_given_is_refused_before_anything_is_made(
    tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.calibration.trimming.trim", lambda *_, **__: pytest.fail("it was made"))
    for name in ("big", "Tiny Cut", ""):
        with pytest.raises(InvalidOptionError):
            run("trim", str(tiny), "--keep", "270", "--name", name)


@pytest.mark.skipif(sys.platform == "win32", reason="names that Windows does not have")
def test_a_path_that_toml_spells_otherwise_than_json(tiny: Path, home: Path) -> None:
    odd = tiny.rename(home / '🙂 \x7f\n"é\\.gguf')
    result = run("trim", str(odd), "--keep", "270", "--name", "odd")
    assert run("path", "odd").stdout == result.stdout
    before = (home / "models.toml").read_text()
    bytes_only = odd.rename(home / os.fsdecode(b"\xff.gguf"))
    with pytest.raises(InvalidOptionError, match="is not UTF-8, so that"):
        run("trim", str(bytes_only), "--keep", "270", "--name", "bytes")
    assert (home / "models.toml").read_text() == before


def test_a_damaged_file_is_made_again(tiny: Path, home: Path) -> None:
    arguments = ("trim", str(tiny), "--keep", "270")
    path = Path(run(*arguments).stdout.strip())
    whole = path.read_bytes()
    for length in (0, 1000, len(whole) - 500):
        path.write_bytes(whole[:length])
        assert run(*arguments).stdout.strip() == str(path)
        assert path.read_bytes() == whole
    made = path.stat().st_mtime_ns
    run(*arguments)
    assert path.stat().st_mtime_ns == made, "a whole one is kept"


def test_what_cannot_be_cut_is_refused_before_a_target_answers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = run("trim", str(tiny), "--keep", "270").stdout.strip()
    monkeypatch.setattr("localspec.cli.deriving.transcripts", lambda _target: pytest.fail("it was asked"))
    for draft, keep in ((cut, "265"), (str(tiny), "0"), (str(tiny), "287"), (str(tiny), "-1")):
        with pytest.raises((InvalidOptionError, UnsupportedModelError)):
            run("trim", draft, "--keep", keep, "--target", "some-model")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--keep", "3"], InvalidOptionError, "3 of 287 ids cannot be kept"),
        (["--keep", "287"], InvalidOptionError, "287 of 287 ids cannot be kept"),
        (["--keep", "270", "--from", "nowhere.txt"], PromptError, "cannot read the text in nowhere.txt"),
        (
            ["--keep", "270", "--from", "/dev/zero"],
            PromptError,
            "cannot read the text in /dev/zero",
        ),  # which does not end
    ],
)
def test_trims_that_make_no_sense(tiny: Path, arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run("trim", str(tiny), *arguments)
