"""Batches on many machines: Ray actors, each with a pair of its own, and the files stay with the driver.

Ray places the actors, starts one again whose process died, and carries requests and answers. A request is one task of
one actor; the actor runs all it has at hand together. What a dead actor had is asked of another one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any, Final

from localspec.batch.identity import PairFingerprint
from localspec.batch.pool import Pool
from localspec.batch_plan import MAX_PARALLEL
from localspec.batching import BatchAnswer, BatchRequest
from localspec.errors import EvaluationError, InvalidOptionError, LocalspecError
from localspec.generation import Stats
from localspec.sampling import SamplingParams
from localspec.wording import counted

__all__ = ["PoolMaker", "RayPool", "load_ray"]

PoolMaker = Callable[[], Pool]
"""Loads a pair where it is called; travels to the workers by pickle."""

_MAX_ATTEMPTS: Final = 3
"""A row that is asked for when its worker dies, so many times, is taken for the reason."""

_MAX_RESTARTS: Final = 3
_AHEAD: Final = 2  # requests at an actor beside those it can run
_IDLE_S: Final = 0.05  # how long a batch waits for one more request before it takes the input to be over


def load_ray() -> ModuleType:
    """Return Ray; raises InvalidOptionError if it is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise InvalidOptionError('--ray needs Ray; install it with: pip install "localspec[ray]"') from None


_Asked = tuple[BatchRequest, "Future[BatchAnswer]"]


@dataclass(frozen=True, slots=True)
class Description:
    """What a worker has loaded."""

    models: PairFingerprint
    model_name: str
    default_params: SamplingParams


class Worker:
    """Runs in an actor: one pair, loaded when it is first asked for.

    Requests arrive one by one, as tasks of an asyncio actor; a thread of its own answers all that are there together.
    """

    def __init__(self, make: PoolMaker) -> None:
        self._make = make
        self._pool: Pool | None = None
        self._requests: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._busy = threading.Lock()

    async def describe(self) -> Description | LocalspecError:
        """Load the pair; returns what it is, or why that is not possible."""
        if self._pool is None:
            try:
                self._pool = await asyncio.to_thread(self._make)
            except LocalspecError as error:
                return error
            threading.Thread(target=self._work, args=(self._pool,), daemon=True).start()
        return Description(self._pool.models, self._pool.model_name, self._pool.default_params)

    async def answer(self, request: BatchRequest) -> BatchAnswer:
        """Answer a request; an error is part of the answer."""
        future: Future[BatchAnswer] = Future()
        self._requests.put((request, future))
        return await asyncio.wrap_future(future)

    async def plain(self, requests: Sequence[BatchRequest]) -> list[Stats]:
        """Decode requests one at a time; see ``Pool``."""
        assert self._pool is not None
        with self._busy:  # no other task has anything left to do while it is held
            return self._pool.plain(requests)

    def _work(self, pool: Pool) -> None:
        while True:
            first = self._requests.get()
            waiting: dict[int, Future[BatchAnswer]] = {}
            with self._busy:
                try:
                    for answer in pool.answers(self._next_requests(first, waiting)):
                        waiting.pop(answer.index).set_result(answer)
                except Exception as error:  # goes to those who wait: this thread has nobody to tell
                    for future in waiting.values():
                        future.set_exception(error)

    def _next_requests(self, first: _Asked, waiting: dict[int, Future[BatchAnswer]]) -> Iterator[BatchRequest]:
        """Yield what arrives, until for a moment nothing does."""
        asked = first
        for number in count():
            waiting[number] = asked[1]
            yield asked[0]
            try:
                asked = self._requests.get(timeout=_IDLE_S)
            except queue.Empty:
                return


@dataclass(slots=True)
class _Task:
    index: int
    request: BatchRequest
    attempts: int = 0


class RayPool:
    """Workers on a Ray cluster; see ``Pool`` for what it does, and ``opened``."""

    def __init__(
        self, ray: ModuleType, workers: Iterable[Any], *, parallel: int | None, notice: Callable[[str], None]
    ) -> None:
        self._ray = ray
        self._ahead = _AHEAD + (MAX_PARALLEL if parallel is None else parallel)
        self.parallel = parallel
        self._notice = notice
        self._load: dict[Any, int] = {}  # by worker that is ready: requests it has
        self._pending: dict[Any, tuple[Any, _Task | None]] = {}  # by reference; no task: a description
        for worker in workers:
            self._ask_description(worker)
        self._wait_for_first()

    @classmethod
    @contextmanager
    def opened(
        cls,
        ray: ModuleType,
        make: PoolMaker,
        *,
        address: str = "auto",
        cpus_per_worker: int | None = None,
        parallel: int | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> Iterator[RayPool]:
        """Start workers, and end them with the block.

        Args:
            ray: what ``load_ray`` returns.
            make: loads the pair on a worker.
            address: of the cluster; "auto" takes the one at hand, or else starts one on this machine.
            cpus_per_worker: as many workers on each machine as its CPUs allow; None: one on each.
            parallel: sequences that a worker runs together, if that is known.
            notice: told what goes wrong and can be lived with.

        Raises:
            InvalidOptionError: there is no cluster, or no machine with so many CPUs.
            LocalspecError: no worker could load the pair.
        """
        connected_before = ray.is_initialized()
        if not connected_before:
            try:
                ray.init(None if address == "auto" else address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InvalidOptionError(f"--ray is {address!r}, where no Ray cluster answers: {error}") from error
        workers = _start_workers(ray, make, cpus_per_worker)
        try:
            yield cls(ray, workers, parallel=parallel, notice=notice)
        finally:
            for worker in workers:
                ray.kill(worker)
            if not connected_before:
                ray.shutdown()

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer]:
        """Answer requests; see ``Pool``.

        Raises:
            EvaluationError: no worker is left.
        """
        fresh = (_Task(index, request) for index, request in enumerate(requests))
        again: deque[_Task] = deque()
        while True:
            self._hand_out(again, fresh)
            if not any(task for _, task in self._pending.values()) and not again and self._load:
                return
            if not self._pending:
                raise EvaluationError("every Ray worker has died; the same command goes on with the rest")
            worker, task, result = self._next_result()
            if task is None:
                self._welcome(worker, result)
            elif isinstance(result, BatchAnswer):
                yield BatchAnswer(task.request, task.index, result.result, result.error)
            else:
                task.attempts += 1
                if task.attempts < _MAX_ATTEMPTS:
                    again.append(task)
                else:
                    yield BatchAnswer(task.request, task.index, None, _death_of(task))

    def plain(self, requests: Sequence[BatchRequest]) -> list[Stats]:
        """Decode plainly; see ``Pool``."""
        try:
            for worker in self._load:
                stats: list[Stats] = self._ray.get(worker.plain.remote(requests))
                return stats
        except self._ray.exceptions.RayError as error:
            raise EvaluationError(f"a Ray worker failed: {error}") from error
        raise EvaluationError("no Ray worker is left")

    def _hand_out(self, again: deque[_Task], fresh: Iterator[_Task]) -> None:
        while self._load:
            worker = min(self._load, key=self._load.__getitem__)
            if self._load[worker] >= self._ahead:
                return
            task = again.popleft() if again else next(fresh, None)
            if task is None:
                return
            self._load[worker] += 1
            self._pending[worker.answer.remote(task.request)] = worker, task

    def _next_result(self) -> tuple[Any, _Task | None, Any]:
        """Wait for something; returns the worker, its task and the result, which is None if the worker died."""
        (reference,), _ = self._ray.wait(list(self._pending), num_returns=1)
        worker, task = self._pending.pop(reference)
        if task is not None and worker in self._load:
            self._load[worker] -= 1
        try:
            return worker, task, self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LocalspecError):
                raise error.cause from None
            raise EvaluationError(f"a Ray worker failed: {error.cause!r}") from error
        except self._ray.exceptions.RayError:
            if self._load.pop(worker, None) is not None:  # it may come back, and says so then
                self._notice("localspec: a Ray worker died; its rows are done elsewhere")
                self._ask_description(worker)
            return worker, task, None

    def _ask_description(self, worker: Any) -> None:
        # Ray holds this one task back while it starts the worker again.
        self._pending[worker.describe.options(max_task_retries=-1).remote()] = worker, None

    def _welcome(self, worker: Any, found: Description | LocalspecError | None) -> LocalspecError | None:
        """Take a worker in that has loaded its pair; returns why not."""
        if isinstance(found, Description):
            if not self._load and not hasattr(self, "models"):
                self.models, self.model_name = found.models, found.model_name
                self.default_params = found.default_params
            if found.models == self.models:
                self._load[worker] = 0
                return None
            found = EvaluationError("its model files are not those of the first worker")
        error = found or EvaluationError("it died, and Ray could not start it again")
        self._notice(f"localspec: a Ray worker is left out: {error}")
        return error

    def _wait_for_first(self) -> None:
        error: LocalspecError | None = None
        while not self._load:
            if not self._pending:
                raise error or EvaluationError("no Ray worker could be started")
            worker, _task, found = self._next_result()
            error = self._welcome(worker, found)


def _start_workers(ray: ModuleType, make: PoolMaker, cpus_per_worker: int | None) -> list[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(max_restarts=_MAX_RESTARTS, max_task_retries=0)(Worker)
    workers = []
    for node in ray.nodes():
        cpus = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
        each = cpus_per_worker or max(cpus, 1)
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        workers += [actor.options(num_cpus=each, scheduling_strategy=here).remote(make) for _ in range(cpus // each)]
    if not workers:
        raise InvalidOptionError(
            f"no machine of the Ray cluster has {counted(cpus_per_worker or 1, 'CPU')}; use a smaller"
            " --cpus-per-worker"
        )
    return workers


def _death_of(task: _Task) -> LocalspecError:
    return EvaluationError(
        f"the worker died each of the {task.attempts} times this row was tried; more memory may help, or a shorter"
        " prompt, and then --retry-errors"
    )
