"""What a search over backends, targets and drafts measures, each thing once: passes per backend and file, agreement
per target and draft.

Laws are the same with every backend up to the noise of kernels, so that agreement is measured with one of them. A
process can load one backend only; hence a process for each, which sends what it finds as soon as it has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import psutil

from localspec import registry
from localspec.backend.choice import BackendName, load_binding
from localspec.backend.model_header import read_header
from localspec.backend.native import NativeContext, NativeModel
from localspec.calibration.agreement import AgreementPlan, ScoredText, observe_each
from localspec.calibration.costs import Setting, measure_costs
from localspec.calibration.runner import (
    CalibrationSettings,
    agreement_contexts,
    agreement_room,
    draft_loads,
    sampler_cost,
    target_load,
)
from localspec.curves import CostCurves
from localspec.errors import EvaluationError, ModelError, OutOfMemoryError
from localspec.loading import check_embeddings, check_rollback
from localspec.profile import SamplerCost
from localspec.session import Session, load_pair
from localspec.tuning import PROFILE_DEPTH

__all__ = [
    "Began",
    "LeftOut",
    "Measurements",
    "Message",
    "PassesOf",
    "Progress",
    "SamplerOf",
    "SearchJob",
    "Written",
    "measure",
]

_COSTS_SHARE = 0.5  # of the time for a target that agreement is measured with as well


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchJob:
    """What one process measures.

    Attributes:
        backend: with it.
        targets: files, the given one first; it is measured however little time there is.
        drafts: files, all of which fit every target.
        settings: the budget is for the whole process, loading included.
        temperatures: of the texts, the one that counts first.
        agreement: whether texts are written and scored here.
        context: tokens of a sequence.
        threads: as asked for.
        template: of chats, by name or path.
    """

    backend: BackendName
    targets: tuple[Path, ...]
    drafts: tuple[Path, ...]
    settings: CalibrationSettings
    temperatures: tuple[float, ...]
    agreement: bool
    context: int
    threads: int | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """A backend is loaded; ``build`` says which and ``setting`` how passes run."""

    backend: BackendName
    build: str
    setting: Setting


@dataclass(frozen=True, slots=True)
class PassesOf:
    """Seconds of a file's passes; of a draft's, ``batch`` has those with a row for every token."""

    backend: BackendName
    path: Path
    curves: CostCurves
    batch: CostCurves | None = None


@dataclass(frozen=True, slots=True)
class SamplerOf:
    """What steps cost beside passes."""

    backend: BackendName
    sampler: SamplerCost


@dataclass(frozen=True, slots=True)
class Written:
    """A text of a target's, with observations of all drafts in the order of the job."""

    target: Path
    text: ScoredText


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that was not measured, and why."""

    backend: BackendName
    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What goes on, and the share of the process's budget that is used up."""

    phase: str
    share: float


Message = Began | PassesOf | SamplerOf | Written | LeftOut | Progress


@dataclass(slots=True)
class Measurements:
    """What was found so far, whatever comes next."""

    began: dict[BackendName, Began] = field(default_factory=dict)
    of_targets: dict[tuple[BackendName, Path], PassesOf] = field(default_factory=dict)
    of_drafts: dict[tuple[BackendName, Path], PassesOf] = field(default_factory=dict)
    samplers: dict[BackendName, SamplerCost] = field(default_factory=dict)
    texts: dict[Path, list[ScoredText]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Take in what a process sent."""
        match message:
            case Began():
                self.began[message.backend] = message
            case PassesOf():
                passes = self.of_targets if message.batch is None else self.of_drafts  # a file may be both
                passes[message.backend, message.path] = message
            case SamplerOf():
                self.samplers[message.backend] = message.sampler
            case Written():
                self.texts.setdefault(message.target, []).append(message.text)
            case LeftOut():
                self.left_out.append(message)
            case Progress():
                pass


# In the process


def measure(job: SearchJob, report: Callable[[str, float], None]) -> Iterator[Message]:
    """Measure one target after the other, all drafts together with the first one.

    A target that cannot be loaded or comes after the budget's end is left out, the first one not.

    Raises:
        KeyboardInterrupt: it was interrupted; what was yielded before holds.
        LocalspecError: the first target or a draft cannot be measured.
    """
    started = perf_counter()
    work = _Work(job, started, report)
    weights = [path.stat().st_size for path in job.targets]
    try:
        for i, path in enumerate(job.targets):
            left_s = started + job.settings.budget_s - perf_counter()
            if i and left_s <= 0:
                yield LeftOut(job.backend, path, "the budget was used up before")
                continue
            try:
                yield from work.measure_target(path, left_s * weights[i] / sum(weights[i:]))
            except (ModelError, EvaluationError) as error:
                if not i:
                    raise
                yield LeftOut(job.backend, path, str(error))
    finally:
        work.close()


class _Work:
    """The drafts that stay loaded, while targets come and go."""

    def __init__(self, job: SearchJob, started: float, report: Callable[[str, float], None]) -> None:
        self.job = job
        self._started = started
        self._report = report
        self._drafts: list[NativeContext] | None = None

    def measure_target(self, path: Path, budget_s: float) -> Iterator[Message]:
        """Yield the costs of a target, those of the drafts if they are not known, and texts if they are wanted."""
        deadline = perf_counter() + budget_s
        _check_memory(path)
        with self._open_target(path) as session:
            target = session.pair.target
            self.job.settings.params.check_ids(target.vocabulary_size)
            if self._drafts is None:
                setting = Setting(target.threads, "off")
                yield Began(self.job.backend, load_binding(self.job.backend).build(), setting)
                self._drafts = [self._open_draft(draft, target) for draft in self.job.drafts]
                yield from self._costs(path, target, self._drafts, deadline - perf_counter())
                if self._drafts:
                    sampler = sampler_cost(target, self._drafts[0], self.job.settings, session.encode)
                    yield SamplerOf(self.job.backend, sampler)
            else:
                yield from self._costs(path, target, [], deadline - perf_counter())
            if self.job.agreement:
                yield from self._texts(path, session, self._drafts, deadline)

    def close(self) -> None:
        for draft in self._drafts or ():
            draft.close()
            draft.model.close()

    def _open_target(self, path: Path) -> Session:
        job = self.job
        return load_pair(
            target=path,
            use_draft=False,
            context=job.context,
            threads=job.threads,
            template=job.template,
            use_profile=False,
            backend=job.backend,
        )

    def _open_draft(self, path: Path, target: NativeContext) -> NativeContext:
        _check_memory(path)
        model = NativeModel(path, load_binding(self.job.backend))
        context = NativeContext(model, capacity=target.capacity, threads=target.threads)
        check_embeddings(context)
        check_rollback(context, read_header(path))
        return context

    def _costs(
        self, path: Path, target: NativeContext, drafts: Sequence[NativeContext], budget_s: float
    ) -> Iterator[Message]:
        """Measure passes in turn, so that a slow minute falls on all alike."""
        settings, backend = self.job.settings, self.job.backend
        loads = [target_load(target, settings), *(load for draft in drafts for load in draft_loads(draft, settings))]
        share = _COSTS_SHARE if self.job.agreement else 1.0
        budget_s = max(0.0, share * budget_s)
        measured = measure_costs(
            loads, depths=(PROFILE_DEPTH,), budget_s=budget_s, progress=lambda _done: self._tell("costs")
        )
        yield PassesOf(backend, path, measured.curves[0])
        of_drafts = measured.curves[1:]
        for draft, single, batch in zip(drafts, of_drafts[::2], of_drafts[1::2], strict=True):
            yield PassesOf(backend, draft.model.path, single, batch)
        if measured.interrupted:
            raise KeyboardInterrupt

    def _texts(
        self, path: Path, session: Session, drafts: Sequence[NativeContext], deadline: float
    ) -> Iterator[Message]:
        settings, target = self.job.settings, session.pair.target
        target.close()  # its cache; others, of several sequences, take its place
        lengths = [len(session.encode(prompt.content)) for prompt in settings.prompts]
        setting = Setting(target.threads, "off")
        contexts = agreement_contexts((target, *drafts), setting, agreement_room(target.capacity, lengths))
        plan = AgreementPlan(
            params=settings.params,
            temperatures=self.job.temperatures,
            budget_s=max(0.0, deadline - perf_counter()),
        )
        try:
            for text in observe_each(
                contexts[0],
                contexts[1:],
                settings.prompts,
                plan,
                encode=session.encode,
                ends_generation=session.vocabulary.ends_generation,
                progress=lambda _done, _total: self._tell("agreement"),
            ):
                yield Written(path, text)
        finally:
            for context in contexts:
                context.close()

    def _tell(self, phase: str) -> None:
        self._report(phase, (perf_counter() - self._started) / self.job.settings.budget_s)


def _check_memory(path: Path) -> None:
    """Refuse a file that would have to be swapped: its speed would be the disk's."""
    size, free = path.stat().st_size, psutil.virtual_memory().available
    if size > free:
        raise OutOfMemoryError(
            f"{path.name} takes {registry.human_bytes(size)} and {registry.human_bytes(free)} of memory are free;"
            " close other programs, or leave it out"
        )
