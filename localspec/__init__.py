"""Exact speculative decoding of GGUF models on ordinary CPUs.

>>> import localspec
>>> session = localspec.load_pair("qwen2.5-coder-1.5b")     # doctest: +SKIP
>>> for event in session.stream("def fibonacci(n):", max_tokens=64):   # doctest: +SKIP
...     print(event.text, end="", flush=True)

Names are loaded on first use, so that ``import localspec`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec._version import __version__

if TYPE_CHECKING:
    from localspec.batching import BatchAnswer, BatchRequest
    from localspec.errors import LocalspecError
    from localspec.generation import Stats
    from localspec.sampling import SamplingParams
    from localspec.session import GenerationResult, Session, TokenEvent, load_pair

__all__ = [
    "BatchAnswer",
    "BatchRequest",
    "GenerationResult",
    "LocalspecError",
    "SamplingParams",
    "Session",
    "Stats",
    "TokenEvent",
    "__version__",
    "load_pair",
]

_HOMES = {
    "BatchAnswer": "localspec.batching",
    "BatchRequest": "localspec.batching",
    "GenerationResult": "localspec.session",
    "LocalspecError": "localspec.errors",
    "SamplingParams": "localspec.sampling",
    "Session": "localspec.session",
    "Stats": "localspec.generation",
    "TokenEvent": "localspec.session",
    "load_pair": "localspec.session",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'localspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
