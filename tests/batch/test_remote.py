"""Batches on Ray workers without models: a cluster of two on this machine, and workers that die."""

import json
import os
import signal
import time
from functools import partial

import pytest

from localspec.batch.remote import RayPool, load_ray
from localspec.batching import BatchAnswer
from localspec.errors import EvaluationError, InvalidOptionError, ModelNotFoundError
from tests.batch.fakes import FakePool, run

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    # Ray's own, when it starts and when its processes end.
    pytest.mark.filterwarnings("ignore"),
]


class WorkerPool(FakePool):
    """A pool that leaves its process's id in a directory, and dies of certain rows."""

    def __init__(self, directory, *, deadly=(), **options):
        super().__init__(**options)
        (directory / str(os.getpid())).touch()
        self._deadly = set(deadly)

    def answers(self, requests):
        def checked():
            for request in requests:
                if request.id in self._deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield request

        yield from super().answers(checked())


def missing():
    raise ModelNotFoundError("no model of that name")


class Dying(FakePool):
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    yield load_ray()
    ray.shutdown()


@pytest.fixture
def opened(cluster):
    notices = []

    def opened(make, **options):
        return RayPool.opened(cluster, make, notice=notices.append, **{"cpus_per_worker": 1, **options})

    opened.notices = notices
    return opened


@pytest.fixture
def files(tmp_path):
    (tmp_path / "workers").mkdir()
    rows = [{"id": f"row-{i}", "prompt": f"prompt {i}"} for i in range(100)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path / "prompts.jsonl", tmp_path / "expected.jsonl")
    return tmp_path


def answers(path):
    return [{k: v for k, v in json.loads(line).items() if k != "stats"} for line in path.read_text().splitlines()]


def test_two_workers_finish_a_hundred_rows(opened, files):
    with opened(partial(WorkerPool, files / "workers", pause_s=0.02)) as pool:
        summary = run(files / "prompts.jsonl", files / "answers.jsonl", pool)
    assert answers(files / "answers.jsonl") == answers(files / "expected.jsonl")
    assert (summary.complete, summary.answers) == (True, 100)
    assert summary.speedup_over_plain is not None
    assert len(list((files / "workers").iterdir())) == 2
    assert opened.notices == []


def test_a_worker_that_dies_loses_nothing(opened, files):
    killed = []

    def watch(tally):
        if tally.answers in (30, 60):
            (victim,) = [p for p in (files / "workers").iterdir() if p.name not in killed][:1]
            os.kill(int(victim.name), signal.SIGKILL)
            killed.append(victim.name)

    with opened(partial(WorkerPool, files / "workers", pause_s=0.02)) as pool:
        while len(list((files / "workers").iterdir())) < 2:
            time.sleep(0.05)
        summary = run(files / "prompts.jsonl", files / "answers.jsonl", pool, watch=watch)
    assert len(killed) == 2
    assert answers(files / "answers.jsonl") == answers(files / "expected.jsonl")
    assert (summary.complete, summary.answers, summary.errors) == (True, 100, 0)
    assert any("died" in notice for notice in opened.notices)


def test_a_row_that_kills_every_worker_becomes_an_error(opened, files):
    rows = (files / "prompts.jsonl").read_text().splitlines(keepends=True)[:12]
    (files / "prompts.jsonl").write_text("".join(rows))
    with opened(partial(WorkerPool, files / "workers", deadly=["row-11"]), parallel=1) as pool:
        summary = run(files / "prompts.jsonl", files / "answers.jsonl", pool)
    found = {record["id"]: record for record in answers(files / "answers.jsonl")}
    assert "died each of the 3 times" in found["row-11"]["error"]["message"]
    assert summary.complete
    assert len(found) == 12


def test_workers_that_cannot_load_say_why(opened):
    with pytest.raises(ModelNotFoundError, match="no model of that name"), opened(missing):
        pass
    assert any("left out" in notice for notice in opened.notices)


def test_workers_that_die_while_they_load_are_given_up(opened):
    with pytest.raises(EvaluationError, match="died"), opened(Dying):
        pass


def test_a_machine_with_too_few_cpus_is_no_place(opened):
    with pytest.raises(InvalidOptionError, match=r"no machine .* 64 CPUs"), opened(missing, cpus_per_worker=64):
        pass


def test_answers_carry_the_request_they_belong_to(opened, files):
    from localspec.batching import BatchRequest
    from tests.batch.fakes import PARAMS

    requests = [BatchRequest(id=str(i), prompt="x", params=PARAMS, seed=i) for i in range(9)]
    with opened(partial(WorkerPool, files / "workers")) as pool:
        found = sorted(pool.answers(iter(requests)), key=lambda answer: answer.index)
    assert all(isinstance(answer, BatchAnswer) for answer in found)
    assert [answer.request for answer in found] == requests
    assert [answer.result.seed for answer in found] == list(range(9))
