from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.backend.identity import cpu_name, file_fingerprint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 << 20))
    return path


def test_a_file_is_the_same_under_any_name_and_at_any_time(file: Path) -> None:
    first = file_fingerprint(file)
    copy = file.with_name("copy.gguf")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, (1, 1))
    assert file_fingerprint(copy) == first
    assert len(first) == 64


@pytest.mark.parametrize("at", [0, 1000, (1 << 20) - 1, 2 << 20, (3 << 20) - 1])
def test_a_change_in_the_header_or_in_a_sample_is_seen(file: Path, at: int) -> None:
    before = file_fingerprint(file)
    data = bytearray(file.read_bytes())
    # A trained tensor changes throughout; one sample every 12 KiB of this file is 4 KiB long.
    for offset in range(at, min(at + 12288, len(data))):
        data[offset] ^= 1
    file.write_bytes(data)
    assert file_fingerprint(file) != before


def test_a_single_byte_of_the_metadata_counts(file: Path) -> None:
    before = file_fingerprint(file)
    data = bytearray(file.read_bytes())
    data[1000] ^= 1  # between two samples
    file.write_bytes(data)
    assert file_fingerprint(file) != before


def test_the_size_counts(file: Path) -> None:
    prints = set()
    for size in (2 << 20, 3 << 20):
        file.write_bytes(bytes(size))
        prints.add(file_fingerprint(file))
    assert len(prints) == 2


def test_a_cut_file_is_another_one(file: Path) -> None:
    before = file_fingerprint(file)
    os.truncate(file, (3 << 20) - 1)
    assert file_fingerprint(file) != before


def test_small_and_empty_files_have_a_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for size in (0, 1, 4096, 5000):
        path = tmp_path / str(size)
        path.write_bytes(b"x" * size)
        prints.add(file_fingerprint(path))
    assert len(prints) == 4


def test_the_processor_has_a_name() -> None:
    name = cpu_name()
    assert name
    assert name == " ".join(name.split())


def test_the_build_is_one_line() -> None:
    from localspec.backend.llamacpp import native_build

    assert native_build().startswith("llama-cpp-python ")
    assert "\n" not in native_build()
