"""Named models and pairs, and the store that fetches, verifies and keeps their files.

>>> from localspec import registry
>>> catalogue = registry.load()
>>> pair = catalogue.pair("qwen2.5-coder-1.5b")
>>> pair.target.name, pair.draft.name
('qwen2.5-coder-1.5b-q4_k_m', 'qwen2.5-coder-0.5b-q4_k_m')
>>> store = registry.Store(catalogue)
>>> store.path(pair.target, progress=True)      # doctest: +SKIP
PosixPath('/home/me/.cache/localspec/models/…')
"""

from __future__ import annotations

from localspec.locations import cache_dir, config_dir
from localspec.registry.catalog import Registry, load
from localspec.registry.entries import (
    Derivation,
    HuggingFaceFile,
    LocalFile,
    ModelEntry,
    PairEntry,
    RecommendedSampling,
    Source,
    WheelParts,
)
from localspec.registry.progress import human_bytes
from localspec.registry.store import Quantizer, Status, Store

__all__ = [
    "Derivation",
    "HuggingFaceFile",
    "LocalFile",
    "ModelEntry",
    "PairEntry",
    "Quantizer",
    "RecommendedSampling",
    "Registry",
    "Source",
    "Status",
    "Store",
    "WheelParts",
    "cache_dir",
    "config_dir",
    "human_bytes",
    "load",
]
