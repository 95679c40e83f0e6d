"""The records of a batch, and what becomes of them (docs/batch.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from localspec.answers import GenerationResult, Transcript
from localspec.backend.vocabulary import Vocabulary
from localspec.batch_plan import BatchPlan
from localspec.encoding import Prompt, PromptEncoder
from localspec.errors import InvalidOptionError, LocalspecError
from localspec.generation import Request
from localspec.policy import Policy
from localspec.profile import Profile
from localspec.sampling import Rule, SamplingParams, check_rule, check_seed, record_seed
from localspec.tuning import PolicyName, draft_sampling
from localspec.wording import shown

__all__ = ["Batch", "BatchAnswer", "BatchOptions", "BatchProgress", "BatchRequest", "Job", "JobPreparer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One record of a batch.

    Attributes:
        id: names the record; with the batch's seed it decides the record's own (``record_seed``).
        prompt: a text or messages, as ``Session.encode`` takes.
        params: how laws are made; default the session's ``default_params``.
        max_tokens: emit no more; default as many as the context holds.
        seed: of the noise, in place of the derived one.
        stop: strings that end the answer and are not part of it.
        rule: "block", "token" or "coupled"; default the batch's.
        draft_temperature: the draft's; default the target's, or what calibration found to agree with it better.
        raw: take the text as it is, without the chat template.
        special: with ``raw``, let control markers become control tokens.
    """

    id: str
    prompt: Prompt
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
    """What became of a record: a result or an error.

    Attributes:
        request: the record.
        index: its place in the input, from 0.
        result: the finished generation.
        error: why there is none.
    """

    request: BatchRequest
    index: int
    result: GenerationResult | None
    error: LocalspecError | None = None


@dataclass(slots=True)
class BatchProgress:
    """What a batch has done so far.

    Attributes:
        running: sequences that run.
        answers: records finished, errors included.
        errors: records that ended in an error.
        tokens: emitted by all records, those still running included.
        steps: steps of single sequences that emitted something.
        drafted: tokens drafted.
        accepted: of these, how many were emitted.
        passes: steps that all running sequences took together.
        num_draft_tokens: γ of the last one; None where each record has a policy of its own.
        plan: how many sequences run together and what they draft; None before the first answer was asked for.
    """

    running: int = 0
    answers: int = 0
    errors: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    num_draft_tokens: int | None = None
    plan: BatchPlan | None = None

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per step of a sequence."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A record that is ready to run."""

    record: BatchRequest
    index: int
    request: Request
    transcript: Transcript

    def failed(self, error: LocalspecError) -> BatchAnswer:
        """Return the answer that says why there is no result."""
        return BatchAnswer(self.record, self.index, None, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What holds for all records of a batch; see ``Session.generate_batch``."""

    seed: int
    parallel: int | None
    num_draft_tokens: int | None
    policy: PolicyName
    rule: Rule


class JobPreparer:
    """Turns records into jobs, or into answers that say why they cannot run.

    Args:
        encoder: makes token ids of prompts.
        vocabulary: makes text of token ids.
        default_params: for records that have none.
        context: tokens that prompt and answer share.
        policy_for: returns the policy for sampling parameters.
        profile: of the pair, if there is one.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        vocabulary: Vocabulary,
        *,
        default_params: SamplingParams,
        context: int,
        policy_for: Callable[[SamplingParams], Policy],
        profile: Profile | None,
    ) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._default_params = default_params
        self._context = context
        self._policy_for = policy_for
        self._profile = profile

    def jobs(self, records: Iterable[BatchRequest], options: BatchOptions) -> Iterator[Job | BatchAnswer]:
        """Yield a job or an answer for each record, taken when it is asked for."""
        for index, record in enumerate(records):
            job: Job | BatchAnswer
            try:
                job = self._job(record, index, options)
            except LocalspecError as error:
                job = BatchAnswer(record, index, None, error)
            yield job

    def _job(self, record: BatchRequest, index: int, options: BatchOptions) -> Job:
        if not isinstance(record, BatchRequest):
            raise InvalidOptionError(f"a record is {shown(record)}; make a BatchRequest of it")
        params = self._default_params if record.params is None else record.params
        if not isinstance(params, SamplingParams):
            raise InvalidOptionError(f"params is {shown(params)}; make SamplingParams of it")
        rule = options.rule if record.rule is None else check_rule(record.rule)
        transcript = Transcript(self._vocabulary, record.stop)
        request = Request(
            prompt=self._encoder.encode(
                record.prompt, raw=record.raw, special=record.special, capacity=self._context
            ),
            params=params,
            max_tokens=self._context if record.max_tokens is None else record.max_tokens,
            seed=record_seed(options.seed, record.id) if record.seed is None else check_seed(record.seed),
            rule=rule,
            policy=self._policy_for(params),
            draft_params=draft_sampling(self._profile, params, rule=rule, temperature=record.draft_temperature),
            watch=transcript.watch,
        )
        return Job(record, index, request, transcript)


class Batch(Iterator[BatchAnswer]):
    """The answers of a batch, as they finish; made by ``Session.generate_batch``.

    The session is busy from the first answer that is asked for until the last, or until the batch is closed.

    Attributes:
        progress: what was chosen and done so far.
    """

    def __init__(self, answers: Generator[BatchAnswer], progress: BatchProgress) -> None:
        self._answers = answers
        self._busy = threading.Lock()
        self.progress = progress

    def __next__(self) -> BatchAnswer:
        with self._alone():
            return next(self._answers)

    def close(self) -> None:
        """Give up what is still running; no effect after the end.

        Raises:
            InvalidOptionError: another thread is waiting for an answer.
        """
        with self._alone():
            self._answers.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InvalidOptionError(
                "the batch is busy: somebody is waiting for its next answer; take answers in one thread"
            )
        try:
            yield
        finally:
            self._busy.release()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
