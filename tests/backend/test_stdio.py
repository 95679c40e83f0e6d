"""Standard output carries only what was asked for, whatever native code prints."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from localspec.backend.stdio import native_prints_on_stderr

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs the C library's printf by its POSIX name")


@posix
def test_what_native_code_prints_goes_to_stderr(capfd: Any) -> None:
    printf = ctypes.CDLL(None).printf
    printf(b"before\n")
    with native_prints_on_stderr():
        printf(b"WARNING: from C\n")  # buffered: neither a terminal nor flushed
        os.write(1, b"unbuffered\n")
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out == "before\nafter\n"
    assert sorted(err.splitlines()) == ["WARNING: from C", "unbuffered"]


@posix
def test_it_comes_back_after_an_error(capfd: Any) -> None:
    with pytest.raises(KeyError), native_prints_on_stderr():
        raise KeyError
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("after\n", "")


def test_without_a_standard_output_nothing_happens() -> None:
    code = (
        "import os; os.close(1)\n"
        "from localspec.backend.stdio import native_prints_on_stderr\n"
        "with native_prints_on_stderr(): print('loaded', file=__import__('sys').stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "loaded")
