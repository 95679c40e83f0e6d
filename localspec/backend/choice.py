"""Which native library evaluates."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Final, Literal, get_args

from localspec.backend.binding import Binding, claimed
from localspec.backend.ik_library import find_library, library_identity
from localspec.errors import BackendError, InvalidOptionError

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "BackendName",
    "backend_in_use",
    "check_backend",
    "identity_at_hand",
    "load_binding",
]

BackendName = Literal["llamacpp", "ik"]
BackendChoice = Literal["auto", "llamacpp", "ik"]
"""A backend, or "auto": the one in use, else the one that calibration found fastest, else llama.cpp."""

BACKENDS: Final[tuple[BackendName, ...]] = get_args(BackendName)

LIBRARIES: Final[dict[BackendName, str]] = {"llamacpp": "llama.cpp", "ik": "ik_llama.cpp"}
"""What each is called in messages and profiles."""


def check_backend(name: str) -> None:
    """Raise an InvalidOptionError unless ``name`` is a ``BackendChoice``."""
    if name not in get_args(BackendChoice):
        raise InvalidOptionError(f"backend is {name!r}; use one of {', '.join(get_args(BackendChoice))}")


def backend_in_use() -> BackendName | None:
    """Return the backend whose library this process has loaded, if any; it can load no other."""
    return next((name for name, library in LIBRARIES.items() if library == claimed()), None)


def load_binding(name: BackendName) -> Binding:
    """Load a backend's library, unless it is, and return its binding.

    Raises:
        BackendError: it is missing or not one that is known here, or the process has loaded the other.
    """
    module = import_module(f"localspec.backend.{name}")
    binding: Binding = module.BINDING
    return binding


def identity_at_hand(name: BackendName) -> str | None:
    """Return how ``Binding.build`` begins, without loading anything; None if the library is not at hand."""
    if name == "llamacpp":
        return f"llama-cpp-python {version('llama-cpp-python')},"
    try:
        return f"ik_llama.cpp {library_identity(find_library())},"
    except (BackendError, OSError):
        return None
