"""Where the library of ik_llama.cpp is; nothing here loads it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from localspec.backend.identity import cpu_name, file_fingerprint
from localspec.backend.ik_layout import PACKAGE_VERSION
from localspec.errors import BackendError
from localspec.locations import cache_dir

__all__ = ["LIBRARY_VARIABLE", "built_directory", "find_library", "library_identity", "library_names", "note_build"]

LIBRARY_VARIABLE: Final = "IK_LLAMA_CPP_LIB_PATH"
"""The environment variable that names a library of one's own; the Python package reads the same."""

_REMEDY: Final = "install localspec[ik], or build the library for this machine with scripts/build_ik.py"


def library_names() -> tuple[str, str]:
    """Return the file names of the library and of the one with its kernels, which stand side by side."""
    start, end = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))
    return f"{start}llama{end}", f"{start}ggml{end}"


def built_directory() -> Path:
    """Return where scripts/build_ik.py puts what it built."""
    return cache_dir() / "ik_llama.cpp" / PACKAGE_VERSION


def note_build(directory: Path) -> None:
    """Write down for which processor the library in ``directory`` was built: on another it may not run."""
    (directory / "build.json").write_text(json.dumps({"cpu": cpu_name()}) + "\n", encoding="utf-8")


def find_library() -> Path:
    """Return the library: what ``IK_LLAMA_CPP_LIB_PATH`` names, else one built here, else the package's.

    What was built here comes before the package's, which is compiled for what most processors have in common.

    Raises:
        BackendError: there is none.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        if not Path(named).is_file():
            raise BackendError(f"{LIBRARY_VARIABLE} is {named!r}, and there is no such file; correct it or unset it")
        return Path(named)
    for path in _candidates():
        if path.is_file():
            return path
    raise BackendError(f"there is no library of ik_llama.cpp here; {_REMEDY}, or use --backend llamacpp")


def _candidates() -> Iterator[Path]:
    name, _kernels = library_names()
    if _built_for_this_cpu(built_directory()):
        yield built_directory() / name
    package = importlib.util.find_spec("ik_llama_cpp")  # finding does not import
    for place in (package.submodule_search_locations or ()) if package else ():
        yield Path(place) / "lib" / name


def _built_for_this_cpu(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "build.json").read_text(encoding="utf-8"))["cpu"] == cpu_name())
    except (OSError, ValueError, LookupError, TypeError):
        return False


def library_identity(path: Path) -> str:
    """Return what tells one build from another, in a few characters."""
    files = [path, path.with_name(library_names()[1])]
    prints = [file_fingerprint(file) for file in files if file.is_file()]
    return hashlib.sha256("".join(prints).encode()).hexdigest()[:12]
