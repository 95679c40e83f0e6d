"""What makes two runs one: a file of answers must not mix models, prompts or settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["PairFingerprint", "RunIdentity"]

_FORMAT: Final = "localspec batch"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class PairFingerprint:
    """The files of a pair, by ``file_fingerprint``, and what evaluates them; ``draft`` is None for plain decoding."""

    target: str
    draft: str | None
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What decides the answers of a run.

    Attributes:
        prompts: SHA-256 of the prompt file, in hex; None if it came through a pipe.
        models: the pair.
        seed: None if none is asked for: that of the run that began the file, or a fresh one.
        settings: by name, JSON values: whatever else a text depends on.
    """

    prompts: str | None
    models: PairFingerprint
    seed: int | None
    settings: Mapping[str, Any]

    def differences(self, earlier: RunIdentity, *, but: frozenset[str] = frozenset()) -> list[str]:
        """Say how this run differs from an earlier one, apart from the settings named in ``but``."""
        found = []
        if self.prompts is None or earlier.prompts is None:
            found.append("prompts that came through a pipe cannot be compared with those of another run")
        elif self.prompts != earlier.prompts:
            found.append("the prompt file has changed")
        if self.models.target != earlier.models.target:
            found.append("the target is another model file")
        if self.models.draft != earlier.models.draft:
            found.append(_draft_change(earlier.models.draft, self.models.draft))
        if self.models.backend != earlier.models.backend:
            found.append(f"{earlier.models.backend} evaluated, and now it is {self.models.backend} (--backend)")
        if self.seed is not None and self.seed != earlier.seed:
            found.append(f"seed was {earlier.seed} and is now {self.seed}")
        for name in sorted({*self.settings, *earlier.settings} - but):
            then, now = (json.loads(json.dumps(side.settings.get(name))) for side in (earlier, self))
            if then != now:
                found.append(f"{name} was {then!r} and is now {now!r}")
        return found

    def to_json(self) -> str:
        """Return what ``from_json`` reads."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunIdentity:
        """Read what ``to_json`` wrote; raises ValueError if it is something else."""
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT or values["version"] != _VERSION:
                raise ValueError(f"it is {values['format']!r} of version {values['version']!r}")
            return cls(
                prompts=values["prompts"],
                models=PairFingerprint(**values["models"]),
                seed=values["seed"],
                settings=dict(values["settings"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it lacks {error}") from None


def _draft_change(then: str | None, now: str | None) -> str:
    if then is None:
        return "there was no draft, and now there is one"
    return "the draft is another model file" if now is not None else "there was a draft, and now there is none"
