"""The store: nothing but verified files, whatever happens to disk and processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from localspec.errors import (
    DownloadError,
    IntegrityError,
    InvalidModelFileError,
    ModelNotFoundError,
    StoreError,
    UnsupportedModelError,
)
from localspec.registry import Derivation, LocalFile, Status
from tests.registry.conftest import CONTENT, SHA256, entry
from tests.registry.hub import Hub

DERIVED = entry("small", sha256=None, sources=(), derivation=Derivation("model", "Q4_0"))


class FakeQuantizer:
    """Marks the copy it makes with the type's name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, source: Path, destination: Path, type_name: str, *, threads: int | None) -> None:
        self.calls.append(type_name)
        destination.write_bytes(source.read_bytes() + type_name.encode())


def test_a_path_is_its_own_model(make_store, tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(CONTENT)
    assert make_store().path(path) == path
    assert make_store().path(str(path)) == path
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        make_store().path(tmp_path / "other.gguf")


def test_a_file_copied_in_by_hand_is_taken_if_its_hash_is_right(hub: Hub, make_store) -> None:
    store, model = make_store(entry()), entry()
    store.location(model).parent.mkdir(parents=True)
    store.location(model).write_bytes(CONTENT)
    assert store.path(model) == store.location(model)
    assert hub.requests == []


def test_a_damaged_file_is_replaced(hub: Hub, make_store, capsys) -> None:
    store, model = make_store(entry()), entry()
    path = store.path(model)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert store.status(model) is Status.ABSENT
    assert store.path(model, progress=True).read_bytes() == CONTENT
    assert "is damaged, so it is replaced" in capsys.readouterr().err


@pytest.mark.parametrize("sha256", [SHA256, None])
def test_a_touched_file_is_hashed_and_kept(hub: Hub, make_store, sha256: str | None) -> None:
    model = entry(sha256=sha256)
    store = make_store(model)
    path = store.path(model)
    os.utime(path, ns=(1, 1))
    hub.requests.clear()
    assert store.path(model) == path
    assert hub.requests == []
    assert store.is_ready(model)


def test_a_record_that_makes_no_sense_is_as_good_as_none(hub: Hub, make_store) -> None:
    store, model = make_store(entry()), entry()
    record = store.path(model).with_name("record.json")
    for text in ("", "{", "[]", '{"path": 1}', "null"):
        record.write_text(text)
        assert not store.is_ready(model)
        assert store.path(model).read_bytes() == CONTENT


def test_an_entry_that_changed_its_hash_fetches_again(hub: Hub, make_store) -> None:
    path = make_store(entry()).path("model")
    hub.content = CONTENT + b"v2"
    import hashlib

    new = entry(bytes=len(hub.content), sha256=hashlib.sha256(hub.content).hexdigest())
    assert make_store(new).path(new) == path
    assert path.read_bytes() == hub.content


def test_verify_finds_what_size_and_time_do_not_show(hub: Hub, make_store) -> None:
    store, model = make_store(entry()), entry()
    path = store.path(model)
    store.verify(model)
    times = path.stat()
    path.write_bytes(CONTENT[:-1] + b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.is_ready(model)
    with pytest.raises(IntegrityError, match="localspec models pull model"):
        store.verify(model)
    assert not path.exists()
    assert store.path(model).read_bytes() == CONTENT


def test_removing(hub: Hub, make_store) -> None:
    store, model = make_store(entry()), entry()
    store.remove(model)
    store.path(model)
    assert store.bytes_on_disk(model) > len(CONTENT)
    store.remove(model)
    assert store.status(model) is Status.ABSENT
    assert store.bytes_on_disk(model) == 0


def test_starting_up_imports_nothing_slow() -> None:
    code = (
        "import sys, localspec.registry, localspec.cli.models, localspec.backend.quantize; "
        "localspec.registry.Store(localspec.registry.load()); "
        "print({'huggingface_hub', 'tqdm', 'llama_cpp', 'numpy', 'httpx', 'httpx2'} & sys.modules.keys())"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


# Files of the user's own


def test_a_local_source_is_used_where_it_is(make_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    model = entry(sources=(LocalFile(path),))
    store = make_store(model)
    assert store.path(model) == path
    monkeypatch.setattr("hashlib.sha256", None)  # the second time it is not hashed
    assert make_store(model).path(model) == path
    store.remove(model)
    assert path.exists()


def test_the_users_own_file_may_change(make_store, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    model = entry(bytes=None, sha256=None, sources=(LocalFile(path),))
    for content in (CONTENT, CONTENT + b"2"):
        path.write_bytes(content)
        assert make_store(model).path(model) == path
        assert make_store(model).is_ready(model)


def test_a_local_source_of_another_content_is_refused(make_store, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT + b"?")
    model = entry(sources=(LocalFile(path),))
    with pytest.raises(IntegrityError, match=SHA256):
        make_store(model).path(model)
    assert path.exists()
    path.unlink()
    with pytest.raises(DownloadError, match="there is no file"):
        make_store(model).path(model)


# Derived files


def test_a_derived_file_is_made_once_from_a_fetched_one(hub: Hub, make_store) -> None:
    quantize = FakeQuantizer()
    store = make_store(entry(), DERIVED, quantize=quantize)
    path = store.path("small")
    assert path.read_bytes() == CONTENT + b"Q4_0"
    assert make_store(entry(), DERIVED, quantize=quantize).path("small") == path
    assert quantize.calls == ["Q4_0"]
    assert store.made_from(entry()) == [DERIVED]
    store.remove(entry())
    assert store.path("small") == path  # stays usable
    assert make_store(entry(), DERIVED).path("small") == path


def test_a_derived_file_is_made_again_when_its_base_or_recipe_changes(hub: Hub, make_store) -> None:
    quantize = FakeQuantizer()
    make_store(entry(), DERIVED, quantize=quantize).path("small")
    other = entry("small", sha256=None, sources=(), derivation=Derivation("model", "F16"))
    assert make_store(entry(), other, quantize=quantize).path("small").read_bytes() == CONTENT + b"F16"
    import hashlib

    hub.content = CONTENT + b"v2"
    base = entry(bytes=len(hub.content), sha256=hashlib.sha256(hub.content).hexdigest())
    path = make_store(base, other, quantize=quantize).path("small")
    assert path.read_bytes() == CONTENT + b"v2F16"
    assert quantize.calls == ["Q4_0", "F16", "F16"]


def test_making_a_derived_file_can_fail(hub: Hub, make_store) -> None:
    with pytest.raises(UnsupportedModelError, match="no quantizer"):
        make_store(entry(), DERIVED).path("small")

    def fail(source: Path, destination: Path, type_name: str, *, threads: int | None) -> None:
        destination.write_bytes(b"half")
        raise InvalidModelFileError("llama.cpp said no")

    store = make_store(entry(), DERIVED, quantize=fail)
    with pytest.raises(InvalidModelFileError):
        store.path("small")
    assert store.status(DERIVED) is not Status.READY
    assert make_store(entry(), DERIVED, quantize=FakeQuantizer()).path("small").read_bytes() == CONTENT + b"Q4_0"


# Disks


def test_too_little_space_is_seen_before_anything_is_fetched(
    hub: Hub, make_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(StoreError, match=r"not enough space at .*: 10 kB needed, 5 kB free"):
        make_store(entry()).path("model")
    assert hub.gets == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up(hub: Hub, tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "store"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        hub.content = CONTENT + bytes(100_000)
        model = entry(bytes=None, sha256=None)
        usage = namedtuple("usage", "total used free")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
            with pytest.raises(StoreError, match=r"the disk is full at .*LOCALSPEC_CACHE_DIR"):
                make_store(model).path(model)
            assert make_store(model).status(model) is Status.PARTIAL
            subprocess.run(["mount", "-o", "remount,size=1M", str(disk)], check=True)
            hub.requests.clear()
            assert make_store(model).path(model).read_bytes() == hub.content
        (asked,) = hub.ranges
        assert asked is not None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_root_that_is_a_file(hub: Hub, tmp_path: Path, make_store) -> None:
    (tmp_path / "store").write_text("not a directory")
    with pytest.raises(StoreError, match="LOCALSPEC_CACHE_DIR"):
        make_store(entry()).path("model")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_may_not_be_written(hub: Hub, tmp_path: Path, make_store) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        make_store(entry()).path("model")
