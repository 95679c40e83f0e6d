"""A batch: rows in, lines out, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from random import Random
from time import perf_counter
from typing import Any, Final

from localspec.batch.answers import AnswerFormat, answer_line
from localspec.batch.identity import RunIdentity
from localspec.batch.output import Output
from localspec.batch.pool import Pool
from localspec.batch.prompts import PromptFile
from localspec.batch.rows import Row, RowDefaults, RowReader
from localspec.batch.summary import MIN_SAMPLE_ROWS, MIN_SAMPLE_TOKENS, PlainSpeed, Summary, Tally, implied_acceptance
from localspec.batching import BatchRequest
from localspec.errors import LocalspecError
from localspec.session import GenerationResult
from localspec.wording import counted

__all__ = ["BatchSettings", "run_batch"]

_SAMPLE_ROWS: Final = 5
_SAMPLE_TOKENS: Final = 32  # of each
# So many times the rows and tokens of the sample a run must have, or the sample would prolong it.
_SHARE_OF_ROWS: Final = 10
_SHARE_OF_TOKENS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What the answers of a batch depend on, the models and the prompts apart.

    Attributes:
        rows: what holds for rows that do not say otherwise.
        seed: from which the seeds of rows are derived; None for that of the run that began the output, or a fresh
            one.
        format: of the output.
        drafting: further settings that decide texts, by name: a run with others does not go on with the file.
    """

    rows: RowDefaults
    seed: int | None = None
    format: AnswerFormat = "localspec"
    drafting: tuple[tuple[str, str | int | None], ...] = ()

    def values(self) -> dict[str, Any]:
        """Return all but the seed by name, as JSON values."""
        rows = asdict(self.rows)
        return {**rows.pop("params"), **rows, **dict(self.drafting), "format": self.format}


def run_batch(
    prompts: PromptFile,
    output: Output,
    pool: Pool,
    settings: BatchSettings,
    *,
    max_errors: int | None = None,
    watch: Callable[[Tally], None] = lambda tally: None,
) -> Summary:
    """Do the rows of ``prompts`` that ``output`` lacks.

    Args:
        prompts: read once, a row at a time.
        output: gets one line for each row, an answer or an error.
        pool: what answers.
        settings: what a later run must share to go on with the output.
        max_errors: stop at so many errors; None never stops.
        watch: called with the count whenever a line is on disk. What it raises ends the run.

    Raises:
        InvalidOptionError: the output belongs to another run.
        StoreError: the output cannot be written.
        PromptError: the prompts changed while they were read.
        EvaluationError: the pool cannot go on.
    """
    run = RunIdentity(prompts=prompts.sha256, models=pool.models, seed=settings.seed, settings=settings.values())
    reader = RowReader(settings.rows, output.begin(run))
    batch = _Batch(output, pool, settings.format, max_errors, watch)
    batch.tally.total = prompts.num_lines
    complete = batch.run(prompts, reader)
    if complete:
        output.finish()
    return _summary(
        batch.tally,
        all_errors=output.num_errors,
        complete=complete,
        plain=batch.plain_speed() if complete else "the run is not complete",
        parallel=pool.parallel,
    )


class _Batch:
    def __init__(
        self,
        output: Output,
        pool: Pool,
        format: AnswerFormat,
        max_errors: int | None,
        watch: Callable[[Tally], None],
    ) -> None:
        self._output = output
        self._pool = pool
        self._format = format
        self._max_errors = max_errors
        self._watch = watch
        self._resumed = frozenset(output.done)
        self._running: dict[int, Row] = {}  # by number of the request
        self._sample: list[BatchRequest] = []
        self._random = Random(0)  # the first to finish would be the shortest
        self.tally = Tally(None, resumed=len(self._resumed))
        self._reached_end = False
        self._started = perf_counter()

    def run(self, prompts: PromptFile, reader: RowReader) -> bool:
        """Answer what is left; returns whether every row has its line."""
        with closing(self._pool.answers(self._requests(prompts, reader))) as answers:
            for answer in answers:
                row = self._running.pop(answer.index)
                outcome = answer.result if answer.error is None else answer.error
                assert outcome is not None
                self._put(row, outcome)
                if self._has_too_many_errors:
                    break
        return (self._reached_end and not self._running) or self.tally.done == self.tally.total

    def plain_speed(self) -> PlainSpeed | str:
        """Decode some of the rows again, one at a time and without drafts; returns why not, if that shows nothing."""
        num_rows, num_tokens = self.tally.answers // _SHARE_OF_ROWS, self.tally.stats.tokens // _SHARE_OF_TOKENS
        if num_rows < MIN_SAMPLE_ROWS or num_tokens < MIN_SAMPLE_TOKENS:
            return (
                "a sample of plain decoding would be too large a part of a run of"
                f" {counted(self.tally.answers, 'answer')} and {counted(self.tally.stats.tokens, 'token')}; it takes"
                f" {_SHARE_OF_ROWS * MIN_SAMPLE_ROWS} and {_SHARE_OF_TOKENS * MIN_SAMPLE_TOKENS}"
            )
        chosen = self._sample[:num_rows]
        each = min(_SAMPLE_TOKENS, -(-num_tokens // len(chosen)))
        sample = [replace(one, max_tokens=min(each, one.max_tokens or each)) for one in chosen]
        try:
            stats = self._pool.plain(sample)
        except LocalspecError as error:  # what is only good to know must not fail a batch that is done
            return f"the sample of plain decoding failed: {error}"
        return PlainSpeed.of(stats) or (
            f"the sample of plain decoding has only {counted(sum(one.tokens for one in stats), 'token')} of"
            f" {counted(len(stats), 'row')}"
        )

    def _requests(self, prompts: PromptFile, reader: RowReader) -> Iterator[BatchRequest]:
        number = 0
        for line in prompts.lines():
            row = reader.read(line)
            if row.line in self._resumed:
                continue
            if isinstance(row.content, LocalspecError):
                self._put(row, row.content)
                if self._has_too_many_errors:
                    return
                continue
            self._running[number] = row
            number += 1
            yield row.content
        self._reached_end = True

    def _put(self, row: Row, outcome: GenerationResult | LocalspecError) -> None:
        is_error = isinstance(outcome, LocalspecError)
        line = answer_line(row, outcome, format=self._format, model=self._pool.model_name)
        self._output.append(row.line, line, is_error=is_error)
        self.tally.elapsed_s = perf_counter() - self._started
        if isinstance(outcome, LocalspecError):
            self.tally.errors += 1
        else:
            self.tally.add(outcome.stats)
            assert isinstance(row.content, BatchRequest)
            self._consider(row.content)
        self._watch(self.tally)

    def _consider(self, request: BatchRequest) -> None:
        """Keep a sample of the rows answered in which each has the same chance to be."""
        place = self._random.randrange(self.tally.answers)
        if len(self._sample) < _SAMPLE_ROWS:
            self._sample.append(request)
        elif place < _SAMPLE_ROWS:
            self._sample[place] = request

    @property
    def _has_too_many_errors(self) -> bool:
        return self._max_errors is not None and self.tally.errors >= self._max_errors


def _summary(
    tally: Tally, *, all_errors: int, complete: bool, plain: PlainSpeed | str, parallel: int | None
) -> Summary:
    stats, elapsed_s = tally.stats, tally.elapsed_s
    speed = plain if isinstance(plain, PlainSpeed) else None
    plain_s = speed.seconds(stats, tally.answers) if speed else None
    return Summary(
        complete=complete,
        rows=tally.done if complete else tally.total,
        resumed=tally.resumed,
        answers=tally.answers,
        errors=tally.errors,
        all_errors=all_errors,
        prompt_tokens=stats.prompt_tokens,
        tokens=stats.tokens,
        elapsed_s=elapsed_s,
        tokens_per_s=tally.tokens_per_s,
        rows_per_s=tally.answers / elapsed_s if elapsed_s else 0.0,
        tokens_per_step=stats.tokens_per_step,
        accepted_per_step=tally.accepted_per_step,
        acceptance_rate=implied_acceptance(stats.drafted_at, stats.accepted_at),
        parallel=parallel,
        num_draft_tokens=stats.drafted / stats.steps if stats.steps else 0.0,
        plain_tokens_per_s=stats.tokens / plain_s if plain_s else None,
        speedup_over_plain=plain_s / elapsed_s if plain_s and elapsed_s else None,
        sample_rows=speed.num_rows if speed else 0,
        sample_tokens=speed.num_tokens if speed else 0,
        no_speedup_because=plain if isinstance(plain, str) else None,
    )
