"""Making one quantisation from another: what comes out, and that failures leave nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from localspec.backend.model_header import read_header
from localspec.backend.quantize import TYPE_NAMES, quantize
from localspec.errors import InvalidModelFileError, InvalidOptionError, ModelNotFoundError, StoreError
from tests.backend.ggufs import model


@pytest.fixture
def nonsense(tmp_path: Path) -> Path:
    """A sound GGUF file of an architecture that llama.cpp does not know."""
    path = tmp_path / "in" / "nonsense ü.gguf"
    path.parent.mkdir()
    path.write_bytes(model(["a", "b"], architecture="nonsense"))
    return path


def test_every_type_name_is_one_of_llama_cpp() -> None:
    import llama_cpp

    for name in TYPE_NAMES:
        assert hasattr(llama_cpp, f"LLAMA_FTYPE_{'ALL' if name == 'F32' else 'MOSTLY'}_{name}")


def test_the_documentation_names_every_type() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert ", ".join(TYPE_NAMES) in " ".join(text.split())


def test_bad_input_is_refused_in_one_line(nonsense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(InvalidOptionError, match=r"no quantisation 'Q9'; choose from F32, F16"):
        quantize(nonsense, out, "Q9", threads=None)
    with pytest.raises(ModelNotFoundError):
        quantize(tmp_path / "none.gguf", out, "F16", threads=None)
    with pytest.raises(InvalidModelFileError, match="unknown model architecture: 'nonsense'") as caught:
        quantize(nonsense, out, "F16", threads=None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [nonsense.parent]


def test_an_interruption_leaves_nothing_behind(
    nonsense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str], **_: object) -> None:
        Path(command[4]).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize(nonsense, tmp_path / "out.gguf", "F16", threads=None)
    assert list(tmp_path.iterdir()) == [nonsense.parent]


@pytest.mark.model
def test_a_real_file(smollm2_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "größer 4.gguf"
    quantize(smollm2_path, out, "Q4_0", threads=2)
    before, after = read_header(smollm2_path), read_header(out)
    assert (after.file_type, after.tensor_type) == ("Q4_0", "Q4_0")
    assert after.file_bytes < before.file_bytes
    assert (after.parameter_count, after.vocabulary_size) == (before.parameter_count, before.vocabulary_size)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(StoreError, match=r"the disk is full, or .*missing is not writable"):
        quantize(smollm2_path, tmp_path / "missing" / "out.gguf", "Q4_0", threads=2)
