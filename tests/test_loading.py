"""What a loaded pair recommends."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.errors import InvalidOptionError
from localspec.loading import LoadedPair
from localspec.registry import RecommendedSampling
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams


def pair(**settings: Any) -> LoadedPair:
    return LoadedPair(None, None, None, None, None, RecommendedSampling(**settings))  # type: ignore[arg-type]


def test_recommendations_stand_above_llamacpp_defaults() -> None:
    assert pair().default_params == LLAMACPP_DEFAULTS
    expected = SamplingParams(temperature=0.6, top_k=40, top_p=0.95, min_p=0.0, repetition_penalty=1.05)
    assert pair(temperature=0.6, min_p=0, repetition_penalty=1.05).default_params == expected


def test_recommendations_out_of_range() -> None:
    with pytest.raises(InvalidOptionError, match=r"models.toml .* top_k is 0.5"):
        _ = pair(top_k=0.5).default_params
