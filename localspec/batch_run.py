"""A batch from its requests to its answers: how many sequences, contexts of that width, a job for each record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain, islice
from typing import Protocol

from localspec.batch_plan import (
    MAX_PARALLEL,
    BatchCosts,
    BatchPlan,
    BatchPolicy,
    accepted_prefix,
    choose_batch,
    measure_batch,
)
from localspec.batching import BatchAnswer, BatchOptions, BatchProgress, BatchRequest, JobPreparer
from localspec.encoding import PromptEncoder
from localspec.engine import Engine
from localspec.loading import LoadedPair, max_parallel
from localspec.policy import FixedPolicy, Policy
from localspec.sampling import SamplingParams
from localspec.scheduling import Scheduler

__all__ = ["BatchRunner", "Stage"]


class Stage(Protocol):
    """What a batch runs on: a session, all to itself.

    Attributes:
        pair: the models and their contexts.
        engine: the loop over them.
        default_params: for records that have none.
    """

    pair: LoadedPair
    engine: Engine
    default_params: SamplingParams

    def widen(self, num_sequences: int) -> None:
        """Make room for so many sequences, in a new ``pair`` and ``engine``."""


class BatchRunner:
    """Runs batches, one at a time, and keeps what it measured for the next one.

    Args:
        encoder: makes token ids of prompts.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._costs: BatchCosts | None = None

    def run(
        self,
        stage: Stage,
        requests: Iterator[BatchRequest],
        options: BatchOptions,
        counts: BatchProgress,
        *,
        policy_for: Callable[[SamplingParams], Policy],
        progress: Callable[[BatchProgress], None] | None,
    ) -> Generator[BatchAnswer]:
        """Yield answers as they finish.

        Args:
            stage: where.
            requests: taken one by one as there is room, a few more than run at first.
            options: what holds for all of them.
            counts: kept up to date.
            policy_for: returns the policy of a record where they do not share one.
            progress: see ``Session.generate_batch``, as for errors.
        """
        first = list(islice(requests, options.parallel or MAX_PARALLEL))
        counts.plan, shared = self._plan(stage, options, len(first))
        parallel = counts.plan.parallel
        if parallel > stage.pair.target.num_sequences:
            stage.widen(parallel)
        # What copies cost beside other sequences is not known.
        plain = stage.pair.draft is None and parallel > 1 and not options.num_draft_tokens

        def policy(params: SamplingParams) -> Policy:
            return FixedPolicy(0) if plain else shared or policy_for(params)

        preparer = JobPreparer(
            self._encoder,
            stage.pair.target.model.vocabulary,
            default_params=stage.default_params,
            context=stage.pair.target.capacity,
            policy_for=policy,
            profile=stage.pair.profile.profile,
        )
        jobs = preparer.jobs(chain(first, requests), options)
        yield from Scheduler(
            stage.engine, jobs, parallel=parallel, counts=counts, policy=shared, progress=progress
        ).run()

    def _plan(self, stage: Stage, options: BatchOptions, available: int) -> tuple[BatchPlan, BatchPolicy | None]:
        """Decide how many sequences run; return that and the policy they share, None if each has its own."""
        pair, parallel, num_draft_tokens = stage.pair, options.parallel, options.num_draft_tokens
        if pair.draft is None:
            num_draft_tokens = 0
        limit = parallel or max(1, min(available, max_parallel(pair, MAX_PARALLEL)))
        if limit == 1 or (parallel is not None and num_draft_tokens is not None):
            return BatchPlan(limit, num_draft_tokens), None
        profile = pair.profile.profile
        if self._costs is None:
            stage.engine.clear()
            self._costs = measure_batch(pair.target, pair.draft, profile)
        accepted = accepted_prefix(profile, stage.default_params.temperature, options.rule)
        plan = choose_batch(
            self._costs, accepted, max_parallel=limit, parallel=parallel, num_draft_tokens=num_draft_tokens
        )
        if plan.parallel == 1 or num_draft_tokens is not None:
            return plan, None
        return plan, BatchPolicy(self._costs, accepted, plan, learns=options.policy == "adaptive")
