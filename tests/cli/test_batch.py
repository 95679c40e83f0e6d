"""``localspec batch`` on a pool without models: options, what is said, exit codes."""

import json
import os
import re
import sys
from contextlib import contextmanager

import pytest

from localspec import cli
from localspec.cli import batch as command
from tests.batch.fakes import TOO_LONG, FakePool


@pytest.fixture
def pool(monkeypatch):
    """Stands in for what loads models; tests may change it, and ``asked`` has the options it was asked with."""
    pool = FakePool()
    pool.asked = []

    @contextmanager
    def opened(values, bar):
        pool.asked.append(dict(values))
        pool.bar = bar
        yield pool

    monkeypatch.setattr(command, "_pool", opened)
    return pool


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def batch(*arguments):
    return cli.main(["batch", *arguments])


def test_answers_go_to_the_file_and_a_summary_to_stderr(pool, files, capfd):
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--seed", "3") == 0
    assert [record["id"] for record in records(files / "answers.jsonl")] == [1, 2, 3]
    out, err = capfd.readouterr()
    assert out == ""
    assert "3 answers, no errors; " in err
    assert "plain" not in err  # three rows are too few to say so
    assert "\x1b" not in err
    assert "\r" not in err
    assert len(err.splitlines()) == 2


def test_answers_go_to_standard_output(pool, files, capfdbinary):
    assert batch("prompts.jsonl", "-o", "-") == 0
    out, err = capfdbinary.readouterr()
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 2, 3]
    assert b"3 answers" in err


def test_prompts_come_from_standard_input(pool, files, monkeypatch):
    with open("prompts.jsonl") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert batch("-", "-o", "answers.jsonl") == 0
    assert len(records(files / "answers.jsonl")) == 3
    # A redirected file is a file: the run is known again.
    with open("prompts.jsonl") as file:
        monkeypatch.setattr(sys, "stdin", file)
        pool.answered.clear()
        assert batch("-", "-o", "answers.jsonl") == 0
    assert pool.answered == []


def test_the_options_of_rows_reach_them(pool, files):
    write(files / "prompts.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "temperature": 1}])
    assert (
        batch("prompts.jsonl", "-o", "answers.jsonl", "-t", "0.5", "--system", "Be brief.", "--max-tokens", "5") == 0
    )
    first, second = records(files / "answers.jsonl")
    assert "['Be brief.', 'x'] at " in first["text"]
    assert first["text"].endswith("with 0.5 ☃")
    assert second["text"].endswith("with 1 ☃")
    assert len(first["tokens"]) == 5


def test_error_records_are_exit_code_3_again_and_again(pool, files, capfd):
    write(files / "prompts.jsonl", [{"prompt": "one"}, {"prompt": TOO_LONG}, {"prompt": 5}])
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 3
    assert "1 answer, 2 errors" in capfd.readouterr().err
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 3
    err = capfd.readouterr().err
    assert "3 rows done before" in err
    assert "--retry-errors" in err
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--retry-errors") == 3
    assert "0 answers, 2 errors, 1 row done before" in capfd.readouterr().err


@pytest.mark.parametrize("option", [["--fail-fast"], ["--max-errors", "1"]])
def test_it_stops_at_an_error_if_asked_to(option, pool, files, capfd):
    write(files / "prompts.jsonl", [{"prompt": 5}, {"prompt": "one"}, {"prompt": "two"}])
    assert batch("prompts.jsonl", "-o", "answers.jsonl", *option) == 3
    assert "stopped by errors with 2 rows left; the same command goes on" in capfd.readouterr().err
    assert batch("prompts.jsonl", "-o", "answers.jsonl", *option) == 3
    assert len(records(files / "answers.jsonl")) == 3


def test_a_changed_setting_is_refused(pool, files, capfd):
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "-t", "0.5") == 0
    before = (files / "answers.jsonl").read_bytes()
    capfd.readouterr()
    for options, said in (
        (["-t", "0.6"], "temperature was 0.5 and is now 0.6"),
        (["-t", "0.5", "--ctx", "512"], "context was 4096 and is now 512"),
        (["-t", "0.5", "--gamma", "2"], "num_draft_tokens was None and is now 2"),
        (["-t", "0.5", "--rule", "coupled"], "rule was 'block' and is now 'coupled'"),
        (["-t", "0.5", "--format", "openai"], "format"),
        (["-t", "0.5", "--drafter", "lookup"], "drafter was 'auto' and is now 'lookup'"),
        (["-t", "0.5", "--no-draft"], "drafter was 'auto' and is now 'none'"),
    ):
        assert batch("prompts.jsonl", "-o", "answers.jsonl", *options) == 2
        assert said in capfd.readouterr().err
    assert (files / "answers.jsonl").read_bytes() == before
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "-t", "0.6", "--restart") == 0
    # What changes no text may change.
    for options in (["--parallel", "3"], ["--unordered"], ["--threads", "1"]):
        assert batch("prompts.jsonl", "-o", "answers.jsonl", "-t", "0.6", *options) == 0


def test_workers_of_a_cluster_draft_as_asked(files, monkeypatch):
    made = []

    @contextmanager
    def opened(ray, make, **options):
        made.append(make.keywords)
        yield FakePool()

    monkeypatch.setattr("localspec.batch.remote.load_ray", lambda: None)
    monkeypatch.setattr("localspec.batch.remote.RayPool.opened", opened)
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--ray", "auto", "--drafter", "lookup") == 0
    assert made[0]["drafter"] == "lookup"


@pytest.mark.parametrize("name", ["answers.jsonl", "./answers.jsonl", "prompts.jsonl", "missing/summary.json", "."])
def test_a_summary_spoils_nothing_and_does_not_fail_after_the_work(name, pool, files, capfd):
    before = (files / "prompts.jsonl").read_bytes()
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--summary", name) in (1, 2)
    assert "summary" in capfd.readouterr().err
    assert (pool.answered, (files / "prompts.jsonl").read_bytes()) == ([], before)


def test_a_template_file_is_known_by_its_content(pool, files, capfd):
    (files / "chat.jinja").write_text("one")
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--template", "chat.jinja") == 0
    (files / "chat.jinja").write_text("other")
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--template", "chat.jinja") == 2
    assert "template was" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl", "-o", "a.jsonl"], "cannot be read"),
        (["prompts.jsonl", "-o", "prompts.jsonl"], "both input and output"),
        (["prompts.jsonl", "-o", "./prompts.jsonl", "--restart"], "both input and output"),
        (["a.jsonl.state", "-o", "a.jsonl"], "which a run that writes a.jsonl has for itself"),
        (["a.jsonl.state.unfinished", "-o", "a.jsonl"], "has for itself"),
        (["a.jsonl.unfinished", "-o", "a.jsonl"], "has for itself"),
        (["a.jsonl.lock", "-o", "a.jsonl"], "has for itself"),
        (["prompts.jsonl", "-o", "a.jsonl", "--summary", "a.jsonl"], "stands beside it"),
        (["prompts.jsonl", "-o", "a.jsonl", "--summary", "./a.jsonl.state"], "stands beside it"),
        (["prompts.jsonl", "-o", "a.jsonl", "--summary", "a.jsonl.lock"], "stands beside it"),
        (["prompts.jsonl", "-o", "a.jsonl", "--summary", "-"], "- is none"),
        (["prompts.jsonl", "--system", "a\udcff"], "not text"),
        (["prompts.jsonl", "--restart"], "--restart needs an output file"),
        (["prompts.jsonl", "--retry-errors"], "--retry-errors needs an output file"),
        (["prompts.jsonl", "-o", "."], "must be a file"),
        (["prompts.jsonl", "-o", "missing/a.jsonl"], "must be a file"),
        (["prompts.jsonl", "--parallel", "0"], "parallel is 0"),
        (["prompts.jsonl", "--parallel", "65"], "parallel is 65"),
        (["prompts.jsonl", "--parallel", "many"], "neither auto nor a whole number"),
        (["prompts.jsonl", "--max-errors", "0"], "--max-errors"),
        (["prompts.jsonl", "--temperature", "-1"], "temperature is -1"),
        (["prompts.jsonl", "--draft-temperature", "-1"], "draft_temperature is -1"),
        (["prompts.jsonl", "--raw", "--system", "x"], "--system needs the chat template"),
        (["prompts.jsonl", "--cpus-per-worker", "2"], "add --ray"),
        (["prompts.jsonl", "--format", "csv"], "--format"),
        ([], "INPUT"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(arguments, said, pool, files, capfd):
    if arguments and arguments[0].startswith("a.jsonl"):
        (files / arguments[0]).write_text('{"prompt": "x"}\n')
    assert batch(*arguments) in (1, 2)
    out, err = capfd.readouterr()
    assert said in err
    assert len(err.splitlines()) == 1
    assert (out, pool.asked) == ("", [])
    assert len(records(files / "prompts.jsonl")) == 3


def test_the_summary_is_json_on_request(pool, files):
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--summary", "summary.json") == 0
    summary = json.loads((files / "summary.json").read_text())
    assert (summary["complete"], summary["rows"], summary["answers"], summary["errors"]) == (True, 3, 3, 0)
    assert summary["tokens_per_s"] > 0
    assert 0 < summary["acceptance_rate"] < 1
    assert summary["speedup_over_plain"] is None
    assert "a run of 3 answers" in summary["no_speedup_because"]


def test_a_speedup_is_said_with_what_it_rests_on(pool, files, capfd):
    write(files / "prompts.jsonl", [{"prompt": f"prompt {i}"} for i in range(50)])
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--summary", "summary.json") == 0
    assert json.loads((files / "summary.json").read_text())["speedup_over_plain"] > 0
    said = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"[\d.]+× plain decoding of one row at a time, [\d.]+ tokens/s by \d\d+ tokens of 5 rows", said
    )


def test_one_of_a_kind_is_not_several(pool, files, capfd):
    write(files / "prompts.jsonl", [{"prompt": "one", "max_tokens": 1}, {"prompt": TOO_LONG}])
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 3
    err = capfd.readouterr().err
    assert "1 answer, 1 error; 1 token in" in err
    assert "1 row ended in an error; --retry-errors does it again" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_summary_that_cannot_be_written_is_an_error(pool, files, capfd):
    assert batch("prompts.jsonl", "-o", "answers.jsonl", "--summary", "/dev/full") == 1
    assert "cannot be written" in capfd.readouterr().err
    assert len(records(files / "answers.jsonl")) == 3


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(pool, files, capfd):
    def interrupt(answer):
        if answer.index == 2:
            raise KeyboardInterrupt

    pool._on_answer = interrupt
    pool._random = None
    pool.parallel = 1
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 130
    assert "2 of 3 rows are done and kept in answers.jsonl; the same command goes on" in capfd.readouterr().err
    assert len(records(files / "answers.jsonl")) == 2
    pool._on_answer = lambda answer: None
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 0
    assert [record["line"] for record in records(files / "answers.jsonl")] == [1, 2, 3]


def test_an_interrupt_says_nothing_of_what_cannot_go_on(pool, files, capfd):
    def interrupt(answer):
        raise KeyboardInterrupt

    pool._on_answer = interrupt
    assert batch("prompts.jsonl") == 130
    assert "goes on" not in capfd.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full_is_an_error(pool, files, capfd):
    assert batch("prompts.jsonl", "-o", "/dev/full") == 1
    assert "No space left on device" in capfd.readouterr().err
    assert not os.path.exists("/dev/full.lock")


def test_a_terminal_sees_progress(pool, files, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 0
    err = capfd.readouterr().err
    assert "3/3" in err or "0/3" in err
    assert "3 answers, no errors" in err.splitlines()[-2]


def test_an_empty_file_is_a_batch_of_nothing(pool, files, capfd):
    (files / "prompts.jsonl").write_text("")
    assert batch("prompts.jsonl", "-o", "answers.jsonl") == 0
    assert "0 answers, no errors" in capfd.readouterr().err
    assert (files / "answers.jsonl").read_bytes() == b""
