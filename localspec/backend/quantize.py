"""Making one quantisation of a model file from another, through llama.cpp.

It runs in a process of its own: the work is one long native call, which Ctrl-C could not end and whose
abort would take the caller with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from localspec.backend.gguf import CUT_IDS, read_gguf
from localspec.errors import InvalidModelFileError, InvalidOptionError, LocalspecError, StoreError

__all__ = ["TYPE_NAMES", "quantize"]

TYPE_NAMES: Final = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1",
    "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K",
)  # fmt: skip
"""The quantisations that can be made without an importance matrix, from large to small."""

_CHILD: Final = "from localspec.backend.quantize import _child; _child()"


def quantize(source: Path, destination: Path, type_name: str, *, threads: int | None) -> None:
    """Write ``destination`` as the quantisation ``type_name`` ("Q4_0", "F16") of ``source``.

    The file appears whole or not at all. An already quantised source is expanded first, so that no more
    precision than it has can come back; rows that a type's blocks do not divide fall back to a near type.
    Raises :class:`InvalidOptionError` for an unknown type, :class:`InvalidModelFileError` for a source that
    llama.cpp cannot read, and :class:`StoreError` where the result cannot be written.
    """
    if type_name not in TYPE_NAMES:
        raise InvalidOptionError(f"there is no quantisation {type_name!r}; choose from {', '.join(TYPE_NAMES)}")
    if CUT_IDS in read_gguf(source).metadata:
        raise InvalidOptionError(f"{source} has a cut vocabulary; quantise the file it was made from, and cut that")
    temporary = destination.with_name(f"{destination.name}.{os.getpid()}.tmp")
    command = [sys.executable, "-c", _CHILD, str(source), str(temporary), type_name, str(threads or 0)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
    try:
        child = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if child.returncode:
            raise _explain(child, source, destination, type_name)
        read_gguf(temporary)
        os.replace(temporary, destination)
    except OSError as error:
        raise StoreError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _explain(
    child: subprocess.CompletedProcess[str], source: Path, destination: Path, type_name: str
) -> LocalspecError:
    """Say in one line why llama.cpp failed, from the last words of its log."""
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "fail" in line or "error" in line.lower()), None)
    reason = reason or (lines[-1] if lines else f"exit code {child.returncode}")
    if "No space left" in child.stderr or "iostream" in reason:
        return StoreError(
            f"{destination} cannot be written: the disk is full, or {destination.parent} is not writable; "
            f"{type_name} of {source.name} needs room there"
        )
    reason = reason.rpartition("failed to quantize: ")[2]
    return InvalidModelFileError(f"llama.cpp cannot make {type_name} of {source}: {reason[:200]}")


def _child() -> None:
    """What the process of its own does."""
    import ctypes

    import llama_cpp

    source, destination, type_name, threads = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{'ALL' if type_name == 'F32' else 'MOSTLY'}_{type_name}")
    params.nthread = int(threads)
    params.allow_requantize = True
    sys.exit(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(params)) != 0)
