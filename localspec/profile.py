"""What calibration found out about a pair on this machine, kept on disk, and what follows from it.

A profile is one JSON file. It holds for the two files, the machine and the build it was measured with and for nothing
else; whatever differs is named, and the profile refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from localspec.backend import FlashAttention
from localspec.confidence import ConfidenceModel
from localspec.curves import CostCurves
from localspec.errors import InvalidOptionError, ProfileError
from localspec.plans import EvaluationPlan
from localspec.records import read_record
from localspec.registry.partial import store_errors, write_atomically

__all__ = [
    "WORTHWHILE",
    "ConfidenceAt",
    "DraftTemperatureAt",
    "Estimate",
    "KindAgreement",
    "Profile",
    "ProfileKey",
    "SamplerCost",
    "Verdict",
    "best",
    "find",
    "load",
    "load_all",
    "predicted_speedups",
    "profile_path",
    "save",
]

VERSION: Final = 2
"""Of the file's layout; another one is refused."""

WORTHWHILE: Final = 1.02
"""Predicted speedup below which the noise of a machine is larger than the gain: there nothing is drafted."""

_REMEDY: Final = "measure again with: localspec calibrate"


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for; every part must be the same.

    Attributes:
        target: fingerprint of the target's file.
        draft: fingerprint of the draft's file.
        cpu: name of the processor.
        threads: threads the passes may use: what the user asked for, or the physical cores at hand. Calibration may
            have chosen fewer, see ``Profile.threads``.
        build: version and compiled features of the library that evaluates.
        backend: what evaluates.
        flash_attention: the attention kernel asked for; "auto" leaves the choice to calibration.
    """

    target: str
    draft: str
    cpu: str
    threads: int
    build: str
    backend: str = "llama.cpp"
    flash_attention: FlashAttention = "auto"

    def difference(self, other: ProfileKey) -> str | None:
        """Say how ``other`` differs, part by part with both values; None if it does not."""
        parts = [
            f"{name} is {getattr(other, part)}, and it was made for {getattr(self, part)}"
            for part, name in _KEY_NAMES.items()
            if getattr(self, part) != getattr(other, part)
        ]
        return "; ".join(parts) or None


_KEY_NAMES: Final = {
    "target": "the target file",
    "draft": "the draft file",
    "cpu": "the processor",
    "threads": "the number of threads",
    "build": "the build of the backend",
    "backend": "the backend",
    "flash_attention": "flash attention",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class KindAgreement:
    """How often drafts are accepted in one kind of text at one temperature.

    Attributes:
        kind: "code", "prose", …, or "own" for the user's prompts.
        temperature: of both models.
        num_tokens: tokens scored.
        num_prompts: texts they come from.
        acceptance_rate: α.
        token: tokens per step under the token rule, for γ = 0, 1, …
        block: the same under the block rule.
        accepted_prefix: S_0, S_1, …: the chance that a step accepts its first i drafted tokens, as far as measured.
    """

    kind: str
    temperature: float
    num_tokens: int
    num_prompts: int
    acceptance_rate: Estimate
    token: tuple[Estimate, ...]
    block: tuple[Estimate, ...]
    accepted_prefix: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token or len(self.token) != len(self.block):
            raise InvalidOptionError(
                f"{self.kind} has {len(self.token)} and {len(self.block)} numbers of tokens per step; both rules have"
                " one for each draft length from 0"
            )

    def tokens_per_step(self, rule: Literal["token", "block"] = "block") -> tuple[float, ...]:
        """Return the estimates under ``rule``, for γ = 0, 1, …"""
        return tuple(estimate.value for estimate in (self.block if rule == "block" else self.token))


@dataclass(frozen=True, slots=True)
class ConfidenceAt:
    """A confidence model and the temperature at which it was fitted."""

    temperature: float
    model: ConfidenceModel


@dataclass(frozen=True, slots=True)
class DraftTemperatureAt:
    """A temperature of the target, and the draft's that agrees with it better than the same one."""

    temperature: float
    draft_temperature: float


@dataclass(frozen=True, slots=True)
class SamplerCost:
    """Seconds of a step that no model pass takes: laws, draws, the rule, and all that surrounds them.

    Attributes:
        plain_s: of a plain step.
        step_s: of a step that speculates, whatever it drafts.
        draft_s: for each drafted token, in addition.
    """

    plain_s: float = 0.0
    step_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to expect of the pair in one kind of text at one temperature.

    Attributes:
        kind: as in ``KindAgreement``.
        temperature: likewise.
        best_num_draft_tokens: the fastest draft length; 0 says not to speculate.
        predicted_speedup: over plain decoding, for γ = 0, 1, …
    """

    kind: str
    temperature: float
    best_num_draft_tokens: int
    predicted_speedup: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.best_num_draft_tokens < len(self.predicted_speedup):
            raise InvalidOptionError(
                f"{self.kind} has {self.best_num_draft_tokens} draft tokens for the best, and no speedup of so many"
            )

    @property
    def speedup(self) -> float:
        """What the best draft length is predicted to gain; 1 without drafts."""
        return self.predicted_speedup[self.best_num_draft_tokens]


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything calibration measured and chose.

    Attributes:
        key: what it holds for.
        created: date, ISO 8601.
        target: seconds of passes of the target.
        draft: the same of the draft.
        target_plan: how the target evaluates n tokens.
        draft_plan: the same of the draft.
        sampler: what a step costs beside passes.
        threads: chosen.
        flash_attention: chosen.
        agreement: by kind and temperature.
        confidence: by temperature.
        draft_temperatures: where the draft agrees better at a temperature other than the target's.
        plain_tokens_per_s: measured without speculation, shortly after the prompt.
        verdicts: one for each agreement.
        draft_batch: passes of the draft with a row for every token, as several sequences together need them.
    """

    key: ProfileKey
    created: str
    target: CostCurves
    draft: CostCurves
    target_plan: EvaluationPlan
    draft_plan: EvaluationPlan
    sampler: SamplerCost
    threads: int
    flash_attention: FlashAttention
    agreement: tuple[KindAgreement, ...]
    confidence: tuple[ConfidenceAt, ...]
    draft_temperatures: tuple[DraftTemperatureAt, ...]
    plain_tokens_per_s: float
    verdicts: tuple[Verdict, ...]
    draft_batch: CostCurves | None = None

    @property
    def best_tokens_per_s(self) -> float:
        """Predicted speed at the best draft length, 0 included, on average over kinds of text and temperatures."""
        gains = [verdict.speedup for verdict in self.verdicts]
        return self.plain_tokens_per_s * (sum(gains) / len(gains) if gains else 1.0)

    def draft_temperature(self, temperature: float) -> float | None:
        """Return the draft's temperature for that of the target; None where nothing beats the same one."""
        chosen = (d.draft_temperature for d in self.draft_temperatures if d.temperature == temperature)
        return next(chosen, None)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"version": VERSION} | asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what ``to_json`` wrote.

        Raises:
            ProfileError: it is damaged, or of another version.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"it is not JSON ({error})") from None
        if not isinstance(values, dict) or "version" not in values:
            raise ProfileError("it is not a profile: it lacks a version")
        if values["version"] != VERSION:
            raise ProfileError(f"its version is {values['version']!r}, and this localspec reads version {VERSION}")
        del values["version"]
        try:
            return read_record(cls, values, "profile")
        except ValueError as error:
            raise ProfileError(str(error)) from None


# Prediction


def predicted_speedups(
    tokens_per_step: Sequence[float],
    *,
    target: CostCurves,
    draft: CostCurves,
    depth: int,
    target_plan: EvaluationPlan | None = None,
    draft_plan: EvaluationPlan | None = None,
    sampler: SamplerCost | None = None,
) -> tuple[float, ...]:
    """Speed over plain decoding for γ = 0, 1, …, from measured seconds; exactly 1 for γ = 0.

    A step that drafts γ tokens emits E(γ) of them and takes γ passes of the draft, one of the target over γ + 1
    tokens, and the sampler. After a step whose drafts were all accepted the draft lacks two tokens instead of one;
    the chance of that, E(γ) - E(γ - 1), is the share of first passes that are over two tokens.

    Args:
        tokens_per_step: E(γ) for γ = 0, 1, …
        target: seconds of the target's passes.
        draft: seconds of the draft's.
        depth: tokens in the caches.
        target_plan: how the target evaluates several tokens.
        draft_plan: how the draft does.
        sampler: what a step costs beside passes.

    Raises:
        InvalidOptionError: a number of tokens that no step emits.
    """
    target_plan, draft_plan = target_plan or EvaluationPlan(), draft_plan or EvaluationPlan()
    sampler = sampler or SamplerCost()
    for gamma, tokens in enumerate(tokens_per_step):
        if not 1 - 1e-9 <= tokens <= (gamma + 1) * (1 + 1e-9):
            raise InvalidOptionError(f"tokens_per_step[{gamma}] is {tokens!r}; such a step emits 1 to {gamma + 1}")
    plain_s = target_plan.seconds(target, 1, depth) + sampler.plain_s
    one_s, two_s = (draft_plan.seconds(draft, n, depth) for n in (1, 2))
    speedups = [1.0]
    for gamma, (before, tokens) in enumerate(pairwise(tokens_per_step), 1):
        all_accepted = min(1.0, max(0.0, tokens - before))
        draft_s = gamma * one_s + all_accepted * (two_s - one_s)
        verify_s = target_plan.seconds(target, gamma + 1, depth)
        step_s = draft_s + verify_s + sampler.step_s + gamma * sampler.draft_s
        speedups.append(tokens * plain_s / step_s)
    return tuple(speedups)


def best(speedups: Sequence[float]) -> int:
    """Return the γ of the largest speedup, the smallest one among equals; 0 where none is ``WORTHWHILE``."""
    gamma = max(range(len(speedups)), key=lambda gamma: (speedups[gamma], -gamma))
    return gamma if speedups[gamma] >= WORTHWHILE else 0


# On disk


def profile_path(directory: Path, key: ProfileKey) -> Path:
    """Return where the profile of ``key`` is kept: one file for each pair and machine."""
    pair, machine = _digest(key.target, key.draft), _digest(*(str(value) for value in asdict(key).values()))
    return directory / f"{pair}-{machine[:8]}.json"


def save(directory: Path, profile: Profile) -> Path:
    """Write a profile, whole or not at all, and return its path.

    Raises:
        StoreError: it cannot be written.
    """
    path = profile_path(directory, profile.key)
    with store_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, profile.to_json())
    return path


def load(path: Path, key: ProfileKey) -> Profile:
    """Read the profile at ``path``, which must have been made for ``key``.

    Raises:
        ProfileError: it is missing, damaged, of another version, or made for something else.
    """
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"there is no profile {path}; {_REMEDY}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the profile {path} cannot be read: {error}; {_REMEDY}") from None
    except ProfileError as error:
        raise ProfileError(f"the profile {path} cannot be used: {error}; {_REMEDY}") from None
    difference = profile.key.difference(key)
    if difference is not None:
        raise ProfileError(f"the profile {path} does not hold here: {difference}; {_REMEDY}")
    return profile


def load_all(directory: Path) -> list[Profile]:
    """Return every profile in ``directory`` that can be read."""
    profiles = []
    for path in sorted(directory.glob("*.json")):
        with suppress(OSError, UnicodeDecodeError, ProfileError):
            profiles.append(Profile.from_json(path.read_text(encoding="utf-8")))
    return profiles


def find(directory: Path, key: ProfileKey) -> Profile:
    """Return the profile of ``key`` in ``directory``.

    Raises:
        ProfileError: there is none; where the same pair has one for something else, it says what differs.
    """
    path = profile_path(directory, key)
    if path.exists():
        return load(path, key)
    others = sorted(directory.glob(f"{_digest(key.target, key.draft)}-*.json"))
    if others:
        return load(max(others, key=lambda other: other.stat().st_mtime), key)
    raise ProfileError(f"this pair has not been measured on this machine; {_REMEDY.replace('again ', '')}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
