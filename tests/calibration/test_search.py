"""The search's order, budget and processes; what is measured in them is a model of a few kilobytes, if any."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.calibration import processes, search
from localspec.calibration.costs import Setting
from localspec.calibration.runner import CalibrationSettings
from localspec.calibration.search import Began, LeftOut, Measurements, Message, Progress, SearchJob, measure
from localspec.errors import InvalidModelFileError, LocalspecError, OutOfMemoryError

BEGAN = Began("llamacpp", "build", Setting(1, "off"))


@pytest.fixture
def job(tmp_path: Path) -> SearchJob:
    targets = []
    for name, size in (("a", 10), ("b", 30), ("c", 10)):
        targets.append(tmp_path / f"{name}.gguf")
        targets[-1].write_bytes(bytes(size))
    return SearchJob(
        backend="llamacpp", targets=tuple(targets), drafts=(), settings=CalibrationSettings(budget_s=100),
        temperatures=(0.8,), agreement=True, context=512,
    )  # fmt: skip


class _Target:
    """Stands for the measurement of a target: takes time on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.takes: dict[str, float | BaseException] = {}
        self.budgets: dict[str, float] = {}
        monkeypatch.setattr(search, "perf_counter", lambda: self.now)
        monkeypatch.setattr(search._Work, "measure_target", lambda _work, path, budget_s: self(path, budget_s))

    def __call__(self, path: Path, budget_s: float) -> Iterator[Message]:
        self.budgets[path.stem] = budget_s
        takes = self.takes.get(path.stem, budget_s)
        yield BEGAN
        if isinstance(takes, BaseException):
            raise takes
        self.now += takes


def watch(job: SearchJob) -> list[Message]:
    return list(measure(job, lambda phase, share: None))


def test_targets_share_the_time_by_size(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    target = _Target(monkeypatch)
    assert watch(job) == [BEGAN] * 3
    assert target.budgets == {"a": pytest.approx(20), "b": pytest.approx(60), "c": pytest.approx(20)}
    target.now, target.takes["a"] = 0.0, 60.0
    watch(job)
    assert target.budgets == {"a": pytest.approx(20), "b": pytest.approx(30), "c": pytest.approx(10)}


def test_what_comes_after_the_budget_is_left_out(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    target = _Target(monkeypatch)
    target.takes["a"] = 100.0
    assert watch(job)[1:] == [LeftOut("llamacpp", path, "the budget was used up before") for path in job.targets[1:]]


def test_a_target_that_fails_costs_only_itself(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    target = _Target(monkeypatch)
    target.takes["b"] = OutOfMemoryError("too large")
    assert LeftOut("llamacpp", job.targets[1], "too large") in watch(job)
    assert "c" in target.budgets
    target.takes["a"] = OutOfMemoryError("too large")
    with pytest.raises(OutOfMemoryError):
        watch(job)


def test_measurements_keep_what_arrives() -> None:
    found = Measurements()
    for message in (BEGAN, Progress("costs", 0.5), LeftOut("ik", Path("x"), "why")):
        found.add(message)
    assert found.began == {"llamacpp": BEGAN}
    assert [one.why for one in found.left_out] == ["why"]


# Between processes


def serve(job: SearchJob, monkeypatch: pytest.MonkeyPatch, steps: Callable[..., Iterator[Message]]) -> list[Any]:
    """Return what a child whose measurement is ``steps`` sends."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(processes, "measure", steps)
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)
    processes._serve(job, sending, multiprocessing.get_context("spawn").Event())
    received = []
    while (message := processes._receive(receiving)) is not None:
        received.append(message)
    return received


def test_a_child_that_is_interrupted_has_sent_what_it_has(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: Any) -> Iterator[Message]:
        yield BEGAN
        raise KeyboardInterrupt

    assert serve(job, monkeypatch, steps) == [BEGAN, processes._Stopped()]


def test_a_child_s_error_is_sent(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: Any) -> Iterator[Message]:
        yield BEGAN
        raise OutOfMemoryError("no room")

    first, error = serve(job, monkeypatch, steps)
    assert first == BEGAN
    assert isinstance(error, OutOfMemoryError)
    assert str(error) == "no room"


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_of_the_parent(interrupts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[Any] = [BEGAN, *[KeyboardInterrupt()] * interrupts, Progress("costs", 0.1), None]

    def receive(_connection: Any) -> Any:
        message = script.pop(0)
        if isinstance(message, KeyboardInterrupt):
            raise message
        return message

    monkeypatch.setattr(processes, "_receive", receive)
    stop = multiprocessing.get_context("spawn").Event()
    taken: list[Message] = []
    connection: Any = None
    if interrupts == 1:
        assert processes._drain(connection, taken.append, stop)
        assert taken == [BEGAN, Progress("costs", 0.1)]
    else:
        with pytest.raises(KeyboardInterrupt):
            processes._drain(connection, taken.append, stop)
    assert stop.is_set()


def test_a_child_that_alone_was_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    script = iter([BEGAN, processes._Stopped(), None])
    monkeypatch.setattr(processes, "_receive", lambda _connection: next(script))
    taken: list[Message] = []
    connection: Any = None
    assert processes._drain(connection, taken.append, multiprocessing.get_context("spawn").Event())
    assert taken == [BEGAN]


def test_a_stop_reaches_a_child_that_got_no_signal(job: SearchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = multiprocessing.get_context("spawn").Event()
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def steps(_job: SearchJob, report: Callable[[str, float], None]) -> Iterator[Message]:
        report("costs", 0.1)
        yield BEGAN
        stop.set()
        report("costs", 0.2)
        yield LeftOut("ik", Path("never"), "sent")

    monkeypatch.setattr(processes, "measure", steps)
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)
    processes._serve(job, sending, stop)
    assert processes._receive(receiving) == Progress("costs", 0.1)
    assert processes._receive(receiving) == BEGAN
    assert processes._receive(receiving) == processes._Stopped()
    assert processes._receive(receiving) is None


def test_a_process_says_what_is_wrong_with_a_file(job: SearchJob) -> None:
    with pytest.raises(InvalidModelFileError, match=r"a\.gguf"):
        processes.run(job, lambda message: None)


def test_an_error_of_any_kind_survives_the_pipe() -> None:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    for kind in LocalspecError.__subclasses__():
        sending.send(kind("what was wrong"))
        error = receiving.recv()
        assert type(error) is kind
        assert str(error) == "what was wrong"
