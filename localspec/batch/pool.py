"""What answers requests: a session here, or many elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from localspec.backend.identity import file_fingerprint
from localspec.batch.identity import PairFingerprint
from localspec.batching import BatchAnswer, BatchProgress, BatchRequest
from localspec.generation import Stats
from localspec.sampling import SamplingParams
from localspec.session import Session, load_pair
from localspec.tuning import PolicyName

__all__ = ["LocalPool", "Pool", "load_pool"]


class Pool(Protocol):
    """One loaded pair, or several copies of it.

    Attributes:
        models: the pair's files.
        model_name: what to call the target.
        default_params: how laws are made unless something else is said.
        parallel: how many sequences run together; None if that is not known, or not yet.
    """

    models: PairFingerprint
    model_name: str
    default_params: SamplingParams
    parallel: int | None

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer]:
        """Answer requests, many at once, yielding each answer when it is there; takes requests as room comes up."""

    def plain(self, requests: Sequence[BatchRequest]) -> list[Stats]:
        """Decode requests one at a time and without drafts, from empty caches, to see what that takes."""


class LocalPool:
    """A session in this process.

    Args:
        session: the loaded pair.
        parallel: sequences per pass; None: what pays.
        num_draft_tokens: tokens drafted per step; None: as ``policy`` decides.
        policy: how much to draft.
        progress: called after every step.
    """

    def __init__(
        self,
        session: Session,
        *,
        parallel: int | None = None,
        num_draft_tokens: int | None = None,
        policy: PolicyName = "adaptive",
        progress: Callable[[BatchProgress], None] | None = None,
    ) -> None:
        self._progress = progress
        self._session = session
        self.parallel = parallel
        self._num_draft_tokens = num_draft_tokens
        self._policy = policy
        pair = session.pair
        self.models = PairFingerprint(
            file_fingerprint(pair.target.model.path),
            None if pair.draft is None else file_fingerprint(pair.draft.model.path),
            pair.target.model.binding.name,
        )
        self.model_name = pair.target.model.path.stem
        self.default_params = session.default_params

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer]:
        """Answer requests; see ``Pool``."""
        with self._session.generate_batch(
            requests,
            parallel=self.parallel,
            num_draft_tokens=self._num_draft_tokens,
            policy=self._policy,
            progress=self._progress,
        ) as batch:
            try:
                yield from batch
            finally:
                if batch.progress.plan is not None:
                    self.parallel = batch.progress.plan.parallel

    def plain(self, requests: Sequence[BatchRequest]) -> list[Stats]:
        """Decode plainly; see ``Pool``."""
        self._session.clear()  # a prompt that stands there would be read in no time
        return [self._plain(request) for request in requests]

    def _plain(self, request: BatchRequest) -> Stats:
        return self._session.generate(
            request.prompt,
            request.params,
            max_tokens=request.max_tokens,
            seed=request.seed,
            rule=request.rule or "block",
            num_draft_tokens=0,
            stop=request.stop,
            raw=request.raw,
            special=request.special,
        ).stats


def load_pool(*, parallel: int | None, num_draft_tokens: int | None, policy: PolicyName, **names: Any) -> LocalPool:
    """Load a pair, ``names`` being arguments of ``load_pair``; can travel to another machine."""
    session = load_pair(**names)
    return LocalPool(session, parallel=parallel, num_draft_tokens=num_draft_tokens, policy=policy)
