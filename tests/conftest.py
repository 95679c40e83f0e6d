"""Fixtures that give real model files, for tests marked ``model``.

The files come from the store, where ``localspec models pull NAME`` puts them, or a copy by hand whose hash is
right (``LOCALSPEC_CACHE_DIR`` moves the store). A test whose file is missing is skipped, unless
``LOCALSPEC_REQUIRE_MODELS`` is 1, as in scripts/test.py: there it fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests see the built-in models and defaults only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALSPEC_CONFIG_DIR", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """A run in the background ignores SIGINT, and so would all processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M, Q4_1: 98 MB, vocabulary of 49,152."""
    return _model("smollm2-135m-q4_1")


@pytest.fixture(scope="session")
def qwen_target_path() -> Path:
    """The target of the default pair: Qwen2.5-Coder 1.5B, Q4_K_M."""
    return _model("qwen2.5-coder-1.5b-q4_k_m")


@pytest.fixture(scope="session")
def qwen_draft_path() -> Path:
    """The draft of the default pair: Qwen2.5-Coder 0.5B, Q4_K_M."""
    return _model("qwen2.5-coder-0.5b-q4_k_m")


@pytest.fixture(scope="session")
def qwen_target_f16_path() -> Path:
    """The default target as F16, made from its Q4_K_M file."""
    return _model("qwen2.5-coder-1.5b-f16")


@pytest.fixture(scope="session")
def qwen_draft_q4_0_path() -> Path:
    """The default draft as Q4_0, made from its Q4_K_M file."""
    return _model("qwen2.5-coder-0.5b-q4_0")


@pytest.fixture(scope="session")
def smollm2_q4_0_path() -> Path:
    """SmolLM2-135M as Q4_0, made from its Q4_1 file: a small draft unequal to its target."""
    return _model("smollm2-135m-q4_0")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M: sliding-window attention, vocabulary of 262k. Never required."""
    return _model("gemma-3-270m-q4_k_m", optional=True)


def _model(name: str, *, optional: bool = False) -> Path:
    from localspec.registry import Store, load

    registry = load()
    store = Store(registry)
    entry = origin = registry.model(name)
    while origin.derivation is not None:
        origin = registry.model(origin.derivation.base)
    if not store.location(origin).is_file():
        message = f"no {origin.name} here; fetch it with: localspec models pull {origin.name}"
        if optional or os.environ.get("LOCALSPEC_REQUIRE_MODELS") != "1":
            pytest.skip(message)
        pytest.fail(message)
    if entry is not origin:  # made by a process of its own, which gives its memory back
        subprocess.run([sys.executable, "-m", "localspec", "models", "pull", name], check=True)
    return store.path(entry)
