"""Stand-ins until the engine's part is merged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams
from localspec.session import GenerationResult
from localspec.text import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    id: str
    prompt: str | Sequence[Message | Mapping[str, str]]
    params: SamplingParams | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    rule: str | None = None
    draft_temperature: float | None = None
    raw: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    request: BatchRequest
    index: int
    result: GenerationResult | None
    error: LocalspecError | None


def record_seed(seed: int, id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=4).digest(), "big")


@dataclass(slots=True)
class BatchProgress:
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
