"""Files that are read whole: they end, and are of a size that fits."""

import os
import threading
from pathlib import Path

import pytest

from localspec import reading
from localspec.batch import PromptFile
from localspec.calibration.prompts import read_prompts
from localspec.cli.predict import _read_profile
from localspec.conversation import load_conversation, read_messages
from localspec.errors import LocalspecError
from localspec.reading import read_whole
from localspec.registry import load as load_registry
from localspec.text import template_source


def open_prompts(path):
    with PromptFile.opened(str(path)):
        pass


READERS = [
    load_conversation,
    load_registry,
    open_prompts,
    _read_profile,
    read_messages,
    read_prompts,
    lambda path: template_source(str(path), None),
]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device")
@pytest.mark.parametrize("read", READERS)
def test_a_device_that_never_ends_is_refused(read):
    with pytest.raises((LocalspecError, OSError), match="is a device, and not a file"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("read", [each for each in READERS if each is not open_prompts])
def test_a_file_that_would_fill_the_memory_is_refused(read, tmp_path):
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(reading.MAX_FILE_BYTES + 1)
    with pytest.raises((LocalspecError, OSError), match="it has more than 64 MiB"):
        read(path)


def test_as_much_as_is_allowed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 10)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_whole(tmp_path / "file") == b"0123456789"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"from a pipe",))
    writer.start()
    assert read_whole(tmp_path / "pipe") == b"from a pipe"
    writer.join()
