"""Backends, targets and drafts compared: speed against memory, and which change bought what.

Everything here is arithmetic on what ``search`` measured. Candidates that are not fully measured do not appear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from localspec.backend.choice import BackendName
from localspec.calibration.agreement import KindAgreement, summarise
from localspec.calibration.profiles import make_profile
from localspec.calibration.search import Measurements
from localspec.calibration.steps import (
    LONGEST_COPY,
    Drafting,
    StepCosts,
    StepCounts,
    Text,
    copying,
    count_steps,
)
from localspec.profile import WORTHWHILE, Profile, ProfileKey, SamplerCost
from localspec.tuning import PROFILE_DEPTH

__all__ = ["Candidate", "Change", "Drafter", "Frontier", "ModelFile", "find_frontier", "profiles_of"]

Drafter = Literal["none", "lookup", "model", "auto"]
"""What drafts: nothing, earlier text, a model, or earlier text where it matches and a model elsewhere."""

_COPIED = (2, 4, 8, LONGEST_COPY)
_MATCHES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that takes part.

    Attributes:
        path: of it.
        label: short, and different from those of the other targets, or drafts.
        memory_bytes: of weights, cache and logits, estimated from the header.
        uncut: for a draft whose vocabulary is cut, the whole one it is compared with, if that takes part.
        is_cut: whether it is such a draft.
    """

    path: Path
    label: str
    memory_bytes: int
    uncut: Path | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run, with its best draft lengths.

    Attributes:
        backend: that evaluates.
        target: its file.
        draft: its file; None without a draft model.
        drafter: what drafts.
        how: lengths of drafts and copies.
        tokens_per_s: predicted, over all kinds of text at the user's temperature.
        by_kind: the same of each kind of text.
        memory_bytes: estimated.
    """

    backend: BackendName
    target: Path
    draft: Path | None
    drafter: Drafter
    how: Drafting
    tokens_per_s: float
    by_kind: tuple[tuple[str, float], ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """One factor changed: what, to which value, what came of it, and the speed over that before the change."""

    factor: Literal["backend", "target", "draft", "cut", "drafter"]
    value: str
    candidate: Candidate
    ratio: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """Candidates by falling speed, the files they are made of, and the one that all are compared with.

    Attributes:
        candidates: at least one.
        baseline: plain decoding of the given target, with llama.cpp if that was measured.
        targets: the given one first. The others are other models: what they write has another law.
        drafts: in the order in which they were given.
    """

    candidates: tuple[Candidate, ...]
    baseline: Candidate
    targets: tuple[ModelFile, ...]
    drafts: tuple[ModelFile, ...]

    @property
    def best(self) -> Candidate:
        """The fastest worthwhile way to run the given target."""
        return next(c for c in self.candidates if c.target == self.targets[0].path and self.is_worthwhile(c))

    @property
    def fastest(self) -> Candidate:
        """The fastest worthwhile one of all, perhaps with another target."""
        return next(c for c in self.candidates if self.is_worthwhile(c))

    def speedup(self, candidate: Candidate) -> float:
        """Return its speed over the baseline's."""
        return candidate.tokens_per_s / self.baseline.tokens_per_s

    def is_worthwhile(self, candidate: Candidate) -> bool:
        """Whether it drafts nothing, or gains by drafting what a profile asks for before anything is drafted."""
        plain = self._find(candidate.backend, candidate.target, None, "none") or candidate
        return candidate.drafter == "none" or candidate.tokens_per_s >= WORTHWHILE * plain.tokens_per_s

    def is_efficient(self, candidate: Candidate) -> bool:
        """Whether nothing worthwhile as fast takes as little memory: the frontier. Of equals the first is on it."""
        faster = self.candidates[: self.candidates.index(candidate)]
        return self.is_worthwhile(candidate) and all(
            candidate.memory_bytes < other.memory_bytes or not self.is_worthwhile(other) for other in faster
        )

    def target_label(self, path: Path) -> str:
        """Return the short name of a target's file."""
        return next(file.label for file in self.targets if file.path == path)

    def draft_label(self, path: Path) -> str:
        """Return the short name of a draft's file, which may have another one as a target."""
        return next(file.label for file in self.drafts if file.path == path)

    def changes(self, to: Candidate) -> list[Change]:
        """Return the way from the baseline to a candidate, one factor at a time.

        The ratios multiply to its speedup. A station that was not measured is passed over.
        """
        found: list[Change] = []
        at = self.baseline
        for factor, value, candidate in self._stations(to):
            if candidate is not None and candidate is not at:
                found.append(Change(factor, value, candidate, candidate.tokens_per_s / at.tokens_per_s))
                at = candidate
        return found

    def _stations(
        self, to: Candidate
    ) -> Iterator[tuple[Literal["backend", "target", "draft", "cut", "drafter"], str, Candidate | None]]:
        given = self.targets[0].path
        yield "backend", to.backend, self._find(to.backend, given, None, "none")
        yield "target", self.target_label(to.target), self._find(to.backend, to.target, None, "none")
        if to.draft is not None:
            own = next(file for file in self.drafts if file.path == to.draft)
            whole = own.uncut if own.is_cut else own.path
            first = self.drafts[0].path
            for path in (first, whole):
                if path is not None:
                    yield "draft", self.draft_label(path), self._find(to.backend, to.target, path, "model")
            yield "cut" if own.is_cut else "draft", own.label, self._find(to.backend, to.target, own.path, "model")
        yield "drafter", to.drafter, to

    def _find(self, backend: BackendName, target: Path, draft: Path | None, drafter: Drafter) -> Candidate | None:
        wanted = (backend, target, draft, drafter)
        return next((c for c in self.candidates if (c.backend, c.target, c.draft, c.drafter) == wanted), None)


def find_frontier(
    measured: Measurements,
    targets: Sequence[ModelFile],
    drafts: Sequence[ModelFile],
    *,
    temperature: float,
    max_draft_tokens: int,
) -> Frontier | None:
    """Return what the measurements say, or None if they do not reach to the given target's plain speed.

    Args:
        measured: whatever there is.
        targets: the given one first.
        drafts: in the order of the observations.
        temperature: the user's; only texts written at it count.
        max_draft_tokens: the longest draft of a model.
    """
    found: list[Candidate] = []
    for target in targets:
        texts = _Texts.of(measured, target.path, temperature)
        for backend in measured.began:
            found += _candidates(measured, backend, target, drafts, texts, max_draft_tokens)
    order = list(measured.began)
    plain = [c for c in found if c.drafter == "none" and c.target == targets[0].path]
    if not plain:
        return None
    baseline = min(plain, key=lambda c: (c.backend != "llamacpp", order.index(c.backend)))
    # Among equals what takes less comes first; those found earlier are the simpler ones.
    found.sort(key=lambda c: (-c.tokens_per_s, c.memory_bytes))
    return Frontier(tuple(found), baseline, tuple(targets), tuple(drafts))


@dataclass(frozen=True, slots=True)
class _Texts:
    """The kinds of one target's texts, and what counts steps on them, once for all backends."""

    kinds: tuple[str, ...]
    count: Callable[[int | None, Drafting, str | None], StepCounts]

    @classmethod
    def of(cls, measured: Measurements, target: Path, temperature: float) -> _Texts:
        written = [t for t in measured.texts.get(target, ()) if t.temperature == temperature]
        copies = [copying(text.prompt, text.tokens) for text in written]

        @cache
        def count(draft: int | None, how: Drafting, kind: str | None) -> StepCounts:
            chosen = [
                Text(one, None if draft is None else text.observations[draft].transcript)
                for one, text in zip(copies, written, strict=True)
                if kind in (None, text.kind)
            ]
            return count_steps(chosen, how)

        return cls(tuple(dict.fromkeys(text.kind for text in written)), count)


def _candidates(
    measured: Measurements,
    backend: BackendName,
    target: ModelFile,
    drafts: Sequence[ModelFile],
    texts: _Texts,
    max_draft_tokens: int,
) -> Iterator[Candidate]:
    passes = measured.of_targets.get((backend, target.path))
    if passes is None:
        return
    sampler = measured.samplers.get(backend, SamplerCost())
    limit = max_draft_tokens + 1
    lengths = [n for n in range(1, limit) if n < max(passes.curves.sizes)]
    copies = [
        Drafting(0, count, match) for count, match in product(_COPIED, _MATCHES) if count < max(passes.curves.sizes)
    ]

    def best(number: int | None, drafter: Drafter, ways: Iterable[Drafting]) -> Iterator[Candidate]:
        draft = None if number is None else drafts[number]
        of_draft = None if draft is None else measured.of_drafts.get((backend, draft.path))
        if draft is not None and of_draft is None:
            return
        costs = StepCosts.of(
            passes.curves, of_draft.curves if of_draft else None, sampler, depth=PROFILE_DEPTH, limit=limit
        )

        def speed(how: Drafting, kind: str | None = None) -> float:
            if how == Drafting():
                return 1 / costs.seconds(_ONE_PLAIN, how)
            counts = texts.count(number, how, kind)
            return counts.tokens / costs.seconds(counts, how)

        how = max(ways, key=speed)
        yield Candidate(
            backend=backend,
            target=target.path,
            draft=None if draft is None else draft.path,
            drafter=drafter,
            how=how,
            tokens_per_s=round(speed(how), 6),  # candidates that do the same shall be equal
            by_kind=tuple((kind, speed(how, kind)) for kind in texts.kinds),
            memory_bytes=target.memory_bytes + (draft.memory_bytes if draft else 0),
        )

    yield from best(None, "none", [Drafting()])
    if not texts.kinds:
        return
    if copies:
        yield from best(None, "lookup", copies)
    for number in range(len(drafts)):
        yield from best(number, "model", [Drafting(gamma) for gamma in lengths])
        both = [Drafting(gamma, one.num_copied, one.min_match) for gamma, one in product(lengths, copies)]
        if both:
            yield from best(number, "auto", both)


_ONE_PLAIN = StepCounts(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def profiles_of(
    measured: Measurements,
    targets: Sequence[ModelFile],
    drafts: Sequence[ModelFile],
    *,
    key: Callable[[BackendName, Path, Path], ProfileKey],
    max_draft_tokens: int,
) -> Iterator[tuple[BackendName, Path, Path, Profile, tuple[KindAgreement, ...]]]:
    """Yield the profile of every pair whose costs with a backend and whose agreement were measured.

    Args:
        measured: whatever there is.
        targets: files.
        drafts: in the order of the observations.
        key: of a profile.
        max_draft_tokens: the longest draft of a model.
    """
    for target, (number, draft) in product(targets, enumerate(drafts)):
        observations = [text.observations[number] for text in measured.texts.get(target.path, ())]
        if not observations:
            continue
        agreements = summarise(observations, max_draft_tokens=max_draft_tokens)
        for backend, began in measured.began.items():
            of_target = measured.of_targets.get((backend, target.path))
            of_draft = measured.of_drafts.get((backend, draft.path))
            if of_target is None or of_draft is None or of_draft.batch is None:
                continue
            profile = make_profile(
                key(backend, target.path, draft.path),
                max_draft_tokens,
                began.setting,
                (of_target.curves, of_draft.curves, of_draft.batch),
                measured.samplers.get(backend, SamplerCost()),
                observations,
                agreements,
            )
            yield backend, target.path, draft.path, profile, agreements
