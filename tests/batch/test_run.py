"""Whole batches on a pool without models: each row exactly once, whatever happens."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import psutil
import pytest

from localspec.batch import FileOutput, PromptFile, StreamOutput, run_batch
from localspec.errors import EvaluationError, InvalidOptionError, PromptError, StoreError
from localspec.generation import Stats
from tests.batch.fakes import TOO_LONG, FakePool, answer_of, run, settings

ROOT = Path(__file__).resolve().parents[2]


def prompts(tmp_path, rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(count):
    return [{"id": f"row-{i}", "prompt": f"prompt {i}"} for i in range(count)]


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(path):
    """The records, less what is measured."""
    return [{k: v for k, v in record.items() if k != "stats"} for record in records(path)]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "answers.jsonl"


def test_every_row_has_its_answer_in_order(tmp_path, output):
    summary = run(prompts(tmp_path, numbered(50)), output)
    found = records(output)
    assert [record["id"] for record in found] == [f"row-{i}" for i in range(50)]
    assert all("prompt " + record["id"][4:] in record["text"] for record in found)
    assert {"id", "line", "text", "tokens", "finish_reason", "seed", "stats"} == found[0].keys()
    assert (summary.complete, summary.rows, summary.answers, summary.errors) == (True, 50, 50, 0)
    assert summary.tokens == sum(len(record["tokens"]) for record in found)


def test_answers_do_not_depend_on_order_or_neighbours(tmp_path, output):
    path = prompts(tmp_path, numbered(20))
    run(path, output)
    expected = without_times(output)
    for parallel, order in ((1, None), (1, 2), (7, 3), (50, 4)):
        run(path, output, FakePool(parallel, order=order), restart=True)
        assert without_times(output) == expected


def test_unordered_answers_come_as_they_finish(tmp_path, output):
    pool = FakePool(8, order=5)
    run(prompts(tmp_path, numbered(30)), output, pool, ordered=False)
    assert [record["id"] for record in records(output)] == pool.answered
    assert pool.answered != [f"row-{i}" for i in range(30)]


def test_a_slow_row_holds_nothing_up(tmp_path, output):
    seen = []
    pool = FakePool(4, slow=["row-0"], on_answer=lambda answer: seen.append(output.read_bytes().count(b"\n")))
    run(prompts(tmp_path, numbered(30)), output, pool)
    assert pool.answered[-1] == "row-0"
    assert seen == list(range(30))  # each answer was on disk before the next one was asked for
    assert [record["line"] for record in records(output)] == list(range(1, 31))


def test_what_counts_is_synced(tmp_path, output, monkeypatch):
    """A line that only the system's memory holds is lost with the power."""
    real, synced = os.fsync, [0]

    def fsync(descriptor):
        real(descriptor)
        if output.exists() and os.path.samestat(os.fstat(descriptor), output.stat()):
            synced[0] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    sizes = []
    rows = [*numbered(5), {"prompt": 5}]
    run(prompts(tmp_path, rows), output, watch=lambda tally: sizes.append((synced[0], output.stat().st_size)))
    assert len(sizes) == 6
    assert all(on_disk == written for on_disk, written in sizes)


def test_a_finished_batch_has_nothing_left_to_do(tmp_path, output):
    path = prompts(tmp_path, numbered(5))
    run(path, output)
    before = output.read_bytes()
    pool = FakePool()
    summary = run(path, output, pool)
    assert (pool.answered, output.read_bytes()) == ([], before)
    assert (summary.complete, summary.resumed, summary.answers, summary.rows) == (True, 5, 0, 5)


def test_an_interrupted_batch_goes_on(tmp_path, output):
    path = prompts(tmp_path, numbered(40))
    run(path, output)
    expected = without_times(output)

    def interrupt(tally):
        if tally.answers == 7:
            raise KeyboardInterrupt

    done = 0
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            run(path, output, watch=interrupt, restart=done == 0)
        done += 7
        assert len(records(output)) == done
    assert run(path, output).resumed == 35
    assert without_times(output) == expected


def test_a_failing_pool_keeps_what_is_done(tmp_path, output):
    def fail(answer):
        if answer.index == 6:
            raise EvaluationError("a pass failed")

    path = prompts(tmp_path, numbered(10))
    with pytest.raises(EvaluationError):
        run(path, output, FakePool(1, on_answer=fail))
    assert len(records(output)) == 6
    run(path, output)
    assert [record["line"] for record in records(output)] == list(range(1, 11))


def test_changed_prompts_are_refused(tmp_path, output):
    path = prompts(tmp_path, numbered(5))
    run(path, output)
    prompts(tmp_path, numbered(6))
    with pytest.raises(InvalidOptionError, match="the prompt file has changed"):
        run(path, output)


def test_a_changed_setting_is_refused_by_name(tmp_path, output):
    path = prompts(tmp_path, numbered(5))
    run(path, output)
    for changes, name in (
        ({"max_tokens": 4}, "max_tokens"),
        ({"seed": 8}, "seed"),
        ({"system": "Be brief."}, "system"),
        ({"format": "openai"}, "format"),
        ({"drafting": (("num_draft_tokens", 3),)}, "num_draft_tokens"),
    ):
        with pytest.raises(InvalidOptionError, match=f"{name} was .* and is now"):
            run(path, output, **changes)


def test_prompts_that_change_during_the_run_are_noticed(tmp_path, output):
    path = prompts(tmp_path, [{"prompt": "x" * 100_000}, {"prompt": "y" * 100_000}])

    def change(tally):
        data = path.read_bytes()
        path.write_bytes(data[:-10] + b'zzzzzzz"}\n')

    with pytest.raises(PromptError, match="changed while it was read"):
        run(path, output, FakePool(1), watch=change)


# Bad rows

BAD_FILE = (
    b'\xef\xbb\xbf{"id": "first", "prompt": "after a mark"}\r\n'
    b"\r\n"
    b'{"id": "broken", "prompt": "x"\n'
    b'{"id": "typed", "prompt": 5}\n'
    b'{"id": "long", "prompt": "' + TOO_LONG.encode() + b'"}\n'
    b'{"id": "first", "prompt": "again"}\n'
    b'{"id": "half", "prompt": "\\ud800"}\n'
    b'{"id": "nan", "prompt": "x", "temperature": NaN}\n'
    b'{"id": "unknown", "prompt": "x", "temprature": 1}\n'
    b'\xff\xfe{"id": "latin"}\n'
    b'{"id": "last", "prompt": "no newline"}'
)


def test_bad_rows_are_errors_with_their_line_and_the_others_finish(tmp_path, output):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(BAD_FILE)
    summary = run(path, output)
    found = records(output)
    assert [record["line"] for record in found] == list(range(1, 12))
    errors = {record["line"]: record["error"]["message"] for record in found if "error" in record}
    expected = [
        "blank",
        "not JSON",
        "must be a text",
        "context",
        "earlier row",
        "surrogate",
        "NaN",
        "temprature",
        "UTF-8",
    ]
    assert list(errors) == list(range(2, 11))
    for number, (message, text) in zip(errors, zip(errors.values(), expected, strict=True), strict=True):
        assert message.startswith(f"line {number}: ")
        assert text in message
    assert [record["id"] for record in found] == [
        "first",
        None,
        None,
        "typed",
        "long",
        None,
        None,
        None,
        "unknown",
        None,
        "last",
    ]
    assert (summary.answers, summary.errors, summary.all_errors, summary.complete) == (2, 9, 9, True)
    assert {record["finish_reason"] for record in found if "error" in record} == {"error"}


def test_a_batch_of_bad_rows_resumes_with_the_same_result(tmp_path, output):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(BAD_FILE)
    run(path, output)
    expected = without_times(output)
    whole = output.read_bytes()
    for size in range(0, len(whole), 101):
        output.write_bytes(whole[:size])
        summary = run(path, output)
        assert without_times(output) == expected
        assert summary.all_errors == 9


def test_errors_are_tried_again_on_request(tmp_path, output):
    path = prompts(tmp_path, [{"prompt": "a"}, {"prompt": TOO_LONG}, {"prompt": "b"}])
    run(path, output)
    assert run(path, output).all_errors == 1
    pool = FakePool()
    summary = run(path, output, pool, retry_errors=True)
    assert (pool.answered, summary.resumed, summary.errors) == (["2"], 2, 1)
    assert [record["line"] for record in records(output)] == [1, 2, 3]


@pytest.mark.parametrize("where", ["reading", "answering"])
@pytest.mark.parametrize("most", [1, 3])
def test_too_many_errors_stop_the_batch(most, where, tmp_path, output):
    bad = {"prompt": 5} if where == "reading" else {"prompt": TOO_LONG}
    rows = [{"prompt": "a"}, bad] * 10
    path = prompts(tmp_path, rows)
    summary = run(path, output, FakePool(2, order=None), max_errors=most)
    assert (summary.errors, summary.complete) == (most, False)
    assert sum("error" in record for record in records(output)) == most
    # Errors of earlier runs do not count, so that the same command goes on.
    summary = run(path, output, FakePool(2, order=None), max_errors=most)
    assert (summary.errors, summary.all_errors) == (most, 2 * most)
    assert run(path, output).complete
    assert [record["line"] for record in records(output)] == list(range(1, 21))


def test_an_error_at_the_very_end_leaves_the_batch_complete(tmp_path, output):
    path = prompts(tmp_path, [{"prompt": "a"}, {"prompt": 5}])
    assert run(path, output, FakePool(1, order=None), max_errors=1).errors == 1
    path = prompts(tmp_path, [{"prompt": "a"}, {"prompt": TOO_LONG}])
    assert run(path, output, FakePool(1, order=None), max_errors=1, restart=True).complete


# OpenAI's shape


def test_openai_responses(tmp_path, output):
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    rows = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": {"prompt": "q"}},
        {"custom_id": "bad", "body": {"messages": 5}},
        {"prompt": "own shape"},
    ]
    run(prompts(tmp_path, rows), output, format="openai")
    chat, raw, bad, own = records(output)
    response = chat["response"]["body"]
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("chat", None, 200)
    assert (response["object"], response["model"]) == ("chat.completion", "m")
    (choice,) = response["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert "q" in choice["message"]["content"]
    assert response["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert "q" in raw["response"]["body"]["choices"][0]["text"]
    assert (raw["response"]["body"]["object"], raw["response"]["body"]["model"]) == ("text_completion", "fake")
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == ("bad", None, "PromptError")
    assert (own["custom_id"], own["error"]) == ("4", None)
    summary = run(prompts(tmp_path, rows), output, format="openai")
    assert (summary.resumed, summary.all_errors) == (4, 1)


# What a run needs


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """20,000 rows of 5 kB, answered out of order behind a slow one: 100 MB would not hold them and their answers."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # 20,000 of them take minutes, and no memory
    count, text = 20_000, "x" * 5000
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": f"row-{i}", "prompt": text}) + "\n")
        file.write(json.dumps({"id": "row-7", "prompt": "again"}) + "\n")
    process = psutil.Process()
    before = process.memory_info().rss
    peak = 0

    def watch(tally):
        nonlocal peak
        if tally.done % 500 == 0:
            peak = max(peak, process.memory_info().rss)

    summary = run(path, tmp_path / "answers.jsonl", FakePool(8, slow=["row-0"]), watch=watch, max_tokens=20)
    peak = max(peak, process.memory_info().rss)
    assert (summary.answers, summary.errors) == (count, 1)  # the id that came twice was found
    assert (tmp_path / "answers.jsonl").stat().st_size > 100 << 20
    assert peak - before < 50 << 20
    with (tmp_path / "answers.jsonl").open() as file:
        assert all(json.loads(line)["line"] == number for number, line in enumerate(file, 1))


def test_a_stream_holds_no_answers_either(tmp_path):
    path = prompts(tmp_path, [{"id": str(i), "prompt": "x" * 20_000} for i in range(300)])
    file = open(os.devnull, "wb")  # noqa: SIM115
    tracemalloc.start()
    try:
        with file, StreamOutput(file, ordered=True) as output:
            run(path, output, FakePool(8, slow=["0"]), max_tokens=5)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_gets_every_answer_in_order(tmp_path):
    file = io.BytesIO()
    with StreamOutput(file, ordered=True) as output:
        summary = run(prompts(tmp_path, numbered(30)), output, FakePool(5))
    assert [json.loads(line)["id"] for line in file.getvalue().splitlines()] == [f"row-{i}" for i in range(30)]
    assert summary.complete


# What is measured


def test_the_speedup_is_that_over_plain_decoding_of_a_sample(tmp_path, output):
    summary = run(prompts(tmp_path, numbered(50)), output)
    # A second for each prompt of 10 tokens with the answer's first, two for each of the others: the pool says so.
    plain_s = 50 * 1.0 + (summary.tokens - 50) * 2.0
    assert summary.speedup_over_plain == pytest.approx(plain_s / summary.elapsed_s)
    assert summary.plain_tokens_per_s == pytest.approx(summary.tokens / plain_s)
    assert (summary.sample_rows, summary.no_speedup_because) == (5, None)
    assert 64 <= summary.sample_tokens <= summary.tokens / 20 + 5


def test_a_sample_is_of_all_rows_and_not_of_the_first(tmp_path, output):
    pool = FakePool()
    run(prompts(tmp_path, numbered(400)), output, pool)
    places = [pool.answered.index(row) for row in pool.sampled]
    assert len(set(places)) == 5
    assert max(places) >= 200


@pytest.mark.parametrize(
    ("num_rows", "max_tokens", "said"),
    [
        (1, None, "a run of 1 answer and"),
        (29, None, "a run of 29 answers and"),
        (40, 31, "and 1240 tokens; it takes"),
    ],
)
def test_a_run_too_small_for_a_sample_claims_no_speedup(num_rows, max_tokens, said, tmp_path, output):
    pool = FakePool()
    summary = run(prompts(tmp_path, numbered(num_rows)), output, pool, max_tokens=max_tokens)
    assert (summary.complete, summary.speedup_over_plain, summary.plain_tokens_per_s) == (True, None, None)
    assert (summary.sample_rows, summary.sample_tokens, pool.sampled) == (0, 0, [])
    assert said in summary.no_speedup_because


def test_a_sample_that_ends_early_claims_no_speedup(tmp_path, output):
    pool = FakePool()
    pool.plain = lambda requests: [Stats(prompt_tokens=10, tokens=9, prefill_s=1.0, wall_s=1.0) for _ in requests]
    summary = run(prompts(tmp_path, numbered(50)), output, pool)
    assert summary.speedup_over_plain is None
    assert summary.no_speedup_because == "the sample of plain decoding has only 45 tokens of 5 rows"


def test_a_sample_that_fails_spoils_nothing(tmp_path, output):
    pool = FakePool()

    def fail(requests):
        raise EvaluationError("no")

    pool.plain = fail
    summary = run(prompts(tmp_path, numbered(50)), output, pool)
    assert (summary.complete, summary.speedup_over_plain) == (True, None)
    assert summary.no_speedup_because == "the sample of plain decoding failed: no"


# Kills

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")


def check_prefix(output, ids):
    """Every whole line is a record, and none is there twice."""
    if not output.exists():
        return
    data = output.read_bytes()
    whole = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    found = [record["id"] for record in whole]
    assert len(set(found)) == len(found)
    assert set(found) <= set(ids)


@POSIX
@pytest.mark.parametrize("retry", [False, True])
def test_killed_before_and_after_every_step_on_disk_it_goes_on(retry, tmp_path, output):
    rows = [{"id": f"row-{i}", "prompt": TOO_LONG if i == 3 else f"prompt {i}"} for i in range(6)]
    path = prompts(tmp_path, rows)
    ids = [row["id"] for row in rows]
    run(path, output)
    expected = without_times(output)
    survived = False
    step = 0
    while not survived:
        if not retry:
            for leftover in output.parent.glob("answers.jsonl*"):
                leftover.unlink()
        survived = killed_at(step, path, output, retry_errors=retry)
        check_prefix(output, ids)
        run(path, output)
        assert without_times(output) == expected, step
        assert not list(output.parent.glob("*.unfinished"))
        step += 1
    assert step > (8 if retry else 20)


def killed_at(step, path, output, **options):
    """Run a batch in a child that kills itself around its disk operation ``step`` // 2; return whether it lived."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads; the child starts none and takes no lock of theirs
        child = os.fork()
    if child == 0:
        count = 0

        def wrapped(operation):
            def call(*arguments, **keywords):
                nonlocal count
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = operation(*arguments, **keywords)
                if count + 1 == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 2
                return result

            return call

        try:
            os.fsync, os.replace = wrapped(os.fsync), wrapped(os.replace)
            Path.unlink = wrapped(Path.unlink)
            run(path, output, **options)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


@POSIX
def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_random_moments_every_row_is_there_once(tmp_path, output):
    rows = numbered(150)
    path = prompts(tmp_path, rows)
    ids = [row["id"] for row in rows]
    run(path, tmp_path / "uninterrupted.jsonl")
    chance = random.Random(1)
    kills = 0
    for attempt in range(60):
        command = [sys.executable, "-m", "tests.batch.driver", path, output, str(attempt)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"started\n"
        # After so many rows more, and a moment: a clock alone would find a fast machine done.
        wanted = lines_of(output) + chance.randint(0, 25)
        while lines_of(output) < wanted and child.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        child.kill()
        child.stdout.close()
        code = child.wait()
        check_prefix(output, ids)
        if code == 0:
            break
        kills += 1
    assert kills >= 3
    run(path, output)
    assert without_times(output) == without_times(tmp_path / "uninterrupted.jsonl")


def test_a_second_run_is_refused_and_the_first_is_not_disturbed(tmp_path, output):
    path = prompts(tmp_path, numbered(5))

    def second(tally):
        for restart in (False, True):
            with pytest.raises(StoreError, match="another run is writing"):
                run(path, output, restart=restart)

    assert run(path, output, watch=second).complete
    assert [record["line"] for record in records(output)] == [1, 2, 3, 4, 5]


def test_the_library_call_of_the_page(tmp_path, output):
    path = prompts(tmp_path, [{"prompt": "hello"}])
    with PromptFile.opened(str(path)) as opened, FileOutput.opened(output) as target:
        run_batch(opened, target, FakePool(), settings())
    (record,) = records(output)
    assert record["text"].startswith("'hello' at ")
    assert record["seed"] != 7
    assert answer_of is not None
