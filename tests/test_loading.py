"""What a loaded pair recommends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from localspec import loading
from localspec.errors import InvalidOptionError, OutOfMemoryError
from localspec.loading import LoadedPair, check_parallel, load_models, max_parallel, widened
from localspec.registry import RecommendedSampling
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from localspec.tuning import ProfileLookup


def pair(**settings: Any) -> LoadedPair:
    return LoadedPair(None, None, None, None, None, RecommendedSampling(**settings))  # type: ignore[arg-type]


def test_recommendations_stand_above_llamacpp_defaults() -> None:
    assert pair().default_params == LLAMACPP_DEFAULTS
    expected = SamplingParams(temperature=0.6, top_k=40, top_p=0.95, min_p=0.0, repetition_penalty=1.05)
    assert pair(temperature=0.6, min_p=0, repetition_penalty=1.05).default_params == expected


def test_recommendations_out_of_range() -> None:
    with pytest.raises(InvalidOptionError, match=r"models.toml .* top_k is 0.5"):
        _ = pair(top_k=0.5).default_params


# --- several sequences ------------------------------------------------------------------------------------------


class Context:
    """Keeps account of what is open."""

    open: ClassVar[set[Context]] = set()
    fails_at: ClassVar[int | None] = None

    def __init__(self, model: Any, *, capacity: int, num_sequences: int = 1, **_options: Any) -> None:
        if num_sequences == Context.fails_at and model == "draft":
            raise OutOfMemoryError("no room")
        self.model, self.capacity, self.num_sequences, self.threads = model, capacity, num_sequences, 3
        Context.open.add(self)

    def close(self) -> None:
        Context.open.remove(self)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> LoadedPair:
    monkeypatch.setattr(loading, "NativeContext", Context)
    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: SimpleNamespace(available=16_000))
    monkeypatch.setattr(Context, "open", set())
    header: Any = SimpleNamespace(cache_bytes=lambda tokens: 5 * tokens)
    contexts: list[Any] = [Context(model, capacity=100) for model in ("target", "draft")]
    return LoadedPair(contexts[0], contexts[1], header, header, ProfileLookup(None, None))


def test_room_for_more_sequences(narrow: LoadedPair) -> None:
    wide = widened(narrow, 4)
    assert [(c.capacity, c.num_sequences) for c in (wide.target, wide.draft) if c] == [(100, 4)] * 2
    assert Context.open == {wide.target, wide.draft}
    assert (wide.target.model, wide.target_header) == ("target", narrow.target_header)


def test_no_room_for_more_sequences(narrow: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair stays as it was, whether it shows beforehand or only when the second context is made."""
    with pytest.raises(OutOfMemoryError, match="smaller --parallel"):
        widened(narrow, 17)
    monkeypatch.setattr(Context, "fails_at", 5)
    with pytest.raises(OutOfMemoryError, match="no room"):
        widened(narrow, 5)
    assert Context.open == {narrow.target, narrow.draft}


def test_sequences_take_half_of_what_is_free(narrow: LoadedPair) -> None:
    assert max_parallel(narrow, 16) == 1 + 8_000 // 1_000
    assert max_parallel(narrow, 4) == 4


@pytest.mark.parametrize("value", [0, -1, 65, True, 2.0, "4"])
def test_numbers_of_sequences_out_of_range(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="parallel is"):
        check_parallel(value)
    with pytest.raises(InvalidOptionError, match="parallel is"):
        load_models(target="missing.gguf", parallel=value)
