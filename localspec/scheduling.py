"""Many requests through a few sequences: each finished one makes room for the next at once (docs/batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localspec.answers import GenerationResult
from localspec.batch_plan import BatchPolicy
from localspec.batching import BatchAnswer, BatchProgress, Job
from localspec.engine import Engine, common_prefix
from localspec.errors import EvaluationError, LocalspecError
from localspec.generation import Generation, Step

__all__ = ["Scheduler"]

_WORTH_WAITING = 8  # tokens of a prompt that another sequence is about to read


@dataclass(slots=True)
class _Run:
    """A job in a sequence."""

    job: Job
    generation: Generation

    def answer(self) -> BatchAnswer:
        g = self.generation
        assert g.finish_reason is not None
        text = "".join(self.job.transcript.take(last=True))
        result = GenerationResult(text, g.tokens, g.finish_reason, g.request.seed, g.stats)
        return BatchAnswer(self.job.record, self.job.index, result)


class Scheduler:
    """Keeps sequences busy with jobs until there are no more.

    Args:
        engine: runs them.
        jobs: what to run, taken one by one as there is room; an answer among them, to a record that cannot run,
            is passed on.
        parallel: sequences to use, from 0 on.
        counts: kept up to date.
        policy: the one that all jobs share, if they do.
        progress: called with ``counts`` after every step.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Iterator[Job | BatchAnswer],
        *,
        parallel: int,
        counts: BatchProgress,
        policy: BatchPolicy | None = None,
        progress: Callable[[BatchProgress], None] | None = None,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._policy = policy
        self._progress = progress
        self._waiting: Job | BatchAnswer | None = None
        self._exhausted = False
        self._parallel = parallel
        self._free = list(range(parallel))
        self._runs: list[_Run] = []
        self._counts = counts

    def run(self) -> Iterator[BatchAnswer]:
        """Yield answers as they finish.

        Raises:
            LocalspecError: what no single record is to blame for.
        """
        try:
            while True:
                for answer in self._admit():
                    yield self._count(answer)
                if not self._runs:
                    return
                for answer in self._step():
                    yield self._count(answer)
        finally:
            if self._parallel > 1:  # what stands there would only be in the way of other generations
                for sequence in range(self._parallel):
                    self._engine.release(sequence)

    def _count(self, answer: BatchAnswer) -> BatchAnswer:
        self._counts.answers += 1
        self._counts.errors += answer.error is not None
        return answer

    def _admit(self) -> Iterator[BatchAnswer]:
        """Start what there is room for; yield answers to what cannot start."""
        while self._free and (job := self._next()) is not None:
            if isinstance(job, BatchAnswer):
                yield job
                continue
            if self._should_wait(job):
                self._waiting = job
                return
            sequence = max(self._free, key=lambda free: self._engine.held(job.request.prompt, free))
            try:
                generation = self._engine.start(job.request, sequence)
            except LocalspecError as error:
                yield job.failed(error)
                continue
            self._free.remove(sequence)
            self._runs.append(_Run(job, generation))

    def _next(self) -> Job | BatchAnswer | None:
        job, self._waiting = self._waiting, None
        if job is None and not self._exhausted:
            job = next(self._jobs, None)
            if job is None:
                self._exhausted = True
                for sequence in self._free:  # nothing will be copied from it: the others' passes need not look at it
                    self._engine.release(sequence)
        return job

    def _should_wait(self, job: Job) -> bool:
        """Whether a job waits for prompts that are being read: to copy from one, or not to delay them."""
        reading = [run.generation for run in self._runs if run.generation.stats.steps == 0]
        if not reading:
            return False
        target, prompt = self._engine.target, job.request.prompt
        held = max(self._engine.held(prompt, sequence) for sequence in range(target.num_sequences))
        if any(common_prefix(g.history, prompt) > held + _WORTH_WAITING for g in reading):
            return True
        unread = sum(len(g.history) - target.length(g.sequence) for g in reading)
        return unread + len(prompt) - held > target.chunk

    def _step(self) -> Iterator[BatchAnswer]:
        generations = [run.generation for run in self._runs]
        reading = any(g.stats.steps == 0 for g in generations)
        if self._policy is not None:
            self._policy.begin(len(generations))
        before = [(g.stats.tokens, g.stats.steps, g.stats.drafted, g.stats.accepted) for g in generations]
        try:
            steps = self._engine.step(generations, together=self._parallel > 1)
        except EvaluationError:
            steps = [self._step_alone(g) for g in generations]  # to find out whose fault it is
            reading = True
        if self._policy is not None:
            self._policy.end(len(generations), reading=reading)
        runs, self._runs = self._runs, []
        done: list[BatchAnswer] = []
        for run, step in zip(runs, steps, strict=True):
            if step.error is None and run.generation.finish_reason is None:
                self._runs.append(run)
                continue
            done.append(run.answer() if step.error is None else run.job.failed(step.error))
            self._free.append(run.generation.sequence)
            if self._exhausted:
                self._engine.release(run.generation.sequence)
        self._report(generations, before)
        yield from done

    def _step_alone(self, generation: Generation) -> Step:
        try:
            return self._engine.step([generation])[0]
        except EvaluationError as error:
            return Step([], 0, error)

    def _report(self, generations: list[Generation], before: list[tuple[int, int, int, int]]) -> None:
        counts = self._counts
        for g, (tokens, steps, drafted, accepted) in zip(generations, before, strict=True):
            counts.tokens += g.stats.tokens - tokens
            counts.steps += g.stats.steps - steps
            counts.drafted += g.stats.drafted - drafted
            counts.accepted += g.stats.accepted - accepted
        counts.passes += 1
        counts.running = len(self._runs)
        counts.num_draft_tokens = self._policy.num_draft_tokens if self._policy is not None else None
        if self._progress is not None:
            self._progress(counts)
