"""Fixtures of the registry's tests: a Hugging Face endpoint and a store that uses it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.registry import HuggingFaceFile, ModelEntry, Registry, Store, huggingface
from tests.registry.hub import Hub, serving

CONTENT = b"GGUF" + random.Random(1).randbytes(9_996)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def entry(name: str = "model", **fields: object) -> ModelEntry:
    """An entry of a model on Hugging Face whose hash and size are known, unless ``fields`` say otherwise."""
    values = {
        "name": name,
        "file": f"{name}.gguf",
        "licence": "MIT",
        "bytes": len(CONTENT),
        "sha256": SHA256,
        "sources": (HuggingFaceFile("someone/something", "file.gguf"),),
        "derivation": None,
    }
    return ModelEntry(**values | fields)  # type: ignore[arg-type]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serving(CONTENT) as hub:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface, "_RETRY_WAIT_S", 0.0)
        yield hub


@pytest.fixture
def make_store(tmp_path: Path):
    def make_store(*entries: ModelEntry, **options: object) -> Store:
        registry = Registry({each.name: each for each in entries}, {}, "")
        return Store(registry, root=tmp_path / "store", **options)  # type: ignore[arg-type]

    return make_store
