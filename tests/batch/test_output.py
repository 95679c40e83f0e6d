"""Where answers go: torn files, other runs, full disks, order."""

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from localspec.batch import FileOutput, StreamOutput
from localspec.batch.identity import PairFingerprint, RunIdentity
from localspec.batch.output import _disk_errors
from localspec.errors import EvaluationError, InvalidOptionError, StoreError


def identity(**changes):
    values = {
        "prompts": "hash",
        "models": PairFingerprint("target", "draft", "a library"),
        "seed": 5,
        "settings": {"temperature": 0.8, "stop": (), "context": 4096},
    }
    return RunIdentity(**{**values, **changes})


def line(row, text="ä", **more):
    return json.dumps({"id": str(row), "line": row, "text": text, **more}, ensure_ascii=False).encode() + b"\n"


def error(row):
    return line(row, error={"type": "PromptError", "message": "no"})


def write(path, rows, *, run=None, errors=(), finish=True, **options):
    """Do ``rows``; return those that were done before."""
    with FileOutput.opened(path, **options) as output:
        output.begin(run or identity())
        before = set(output.done)
        for row in rows:
            if row not in before:
                output.append(row, error(row) if row in errors else line(row), is_error=row in errors)
        if finish:
            output.finish()
    return before


def rows_of(path):
    return [json.loads(data)["line"] for data in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_a_finished_file_is_in_the_order_of_the_prompts(path):
    write(path, [3, 1, 4, 2])
    assert path.read_bytes() == b"".join(map(line, [1, 2, 3, 4]))
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "answers.jsonl",
        "answers.jsonl.lock",
        "answers.jsonl.state",
    ]


def test_an_unordered_file_stays_as_it_is(path):
    write(path, [3, 1, 4, 2], ordered=False)
    assert rows_of(path) == [3, 1, 4, 2]
    write(path, [], ordered=True)
    assert rows_of(path) == [1, 2, 3, 4]


def test_a_file_cut_anywhere_is_completed(path):
    """Whatever byte a crash leaves as the last one: whole lines stay, the rest is done again."""
    order = [2, 1, 3]
    write(path, order, finish=False)
    whole = path.read_bytes()
    lengths = [len(line(row)) for row in order]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = [row for i, row in enumerate(order) if sum(lengths[: i + 1]) <= size]
        assert write(path, order) == set(kept), size
        assert path.read_bytes() == b"".join(map(line, [1, 2, 3])), size


@pytest.mark.parametrize(
    "tail", [b"\0" * 500, b"\0" * 500 + b"\n", b"{}\n", b'{"line": "x"}\n', b'{"line": 2}\n', b"\n"]
)
def test_a_last_line_that_is_none_is_cut_off(tail, path):
    write(path, [1, 2], finish=False)
    with path.open("ab") as file:
        file.write(tail)
    assert write(path, [1, 2, 3]) == {1, 2}
    assert path.read_bytes() == b"".join(map(line, [1, 2, 3]))


@pytest.mark.parametrize("middle", [b"oops\n", b"\n", line(1), b'{"line": true}\n'])
def test_a_file_damaged_in_the_middle_is_refused_and_left_alone(middle, path):
    write(path, [1, 2], finish=False)
    damaged = line(1) + middle + line(2)
    path.write_bytes(damaged)
    with pytest.raises(InvalidOptionError, match=r"line 2 of .* is none that this program wrote"):
        write(path, [3])
    assert path.read_bytes() == damaged
    write(path, [1], restart=True)
    assert rows_of(path) == [1]


def test_a_file_that_something_else_wrote_is_refused(path):
    path.write_bytes(b"my notes\n")
    with pytest.raises(InvalidOptionError, match=r"no answers\.jsonl\.state"):
        write(path, [1])
    assert path.read_bytes() == b"my notes\n"
    write(path, [1], restart=True)
    assert rows_of(path) == [1]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": "localspec batch", "version": 3}', "\xff"])
def test_a_state_that_cannot_be_understood_is_refused(text, path):
    write(path, [1])
    path.with_name("answers.jsonl.state").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOptionError, match="cannot be understood"):
        write(path, [2])
    assert rows_of(path) == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": "other"}, "the prompt file has changed"),
        ({"prompts": None}, "pipe"),
        ({"models": PairFingerprint("other", "draft", "a library")}, "the target is another model file"),
        ({"models": PairFingerprint("target", "other", "a library")}, "the draft is another model file"),
        ({"models": PairFingerprint("target", None, "a library")}, "there was a draft"),
        ({"models": PairFingerprint("target", "draft", "another")}, "a library evaluated, and now it is another"),
        ({"seed": 6}, "seed was 5 and is now 6"),
        ({"settings": {"temperature": 0.7, "stop": (), "context": 4096}}, "temperature was 0.8 and is now 0.7"),
        ({"settings": {"temperature": 0.8, "stop": ("x",), "context": 4096}}, r"stop was \[\] and is now \['x'\]"),
        ({"settings": {"temperature": 0.8, "stop": (), "context": 1}}, "context was 4096 and is now 1"),
        ({"settings": {"temperature": 0.8, "stop": (), "context": 4096, "new": 1}}, "new was None and is now 1"),
    ],
)
def test_a_run_that_differs_does_not_go_on(changes, message, path):
    write(path, [1], finish=False)
    before = path.read_bytes(), path.with_name("answers.jsonl.state").read_bytes()
    with pytest.raises(InvalidOptionError, match=message):
        write(path, [2], run=identity(**changes))
    assert (path.read_bytes(), path.with_name("answers.jsonl.state").read_bytes()) == before
    write(path, [2], run=identity(**changes), restart=True)
    assert rows_of(path) == [2]
    if changes.get("prompts", "hash") is not None:
        assert write(path, [2, 3], run=identity(**changes)) == {2}


def test_every_difference_is_said(path):
    write(path, [1])
    run = identity(prompts="other", seed=6, settings={"temperature": 1, "stop": (), "context": 4096})
    with pytest.raises(InvalidOptionError, match=r"prompt file.*seed.*temperature"):
        write(path, [2], run=run)


def test_what_is_equal_in_json_is_equal(path):
    write(path, [1], run=identity(settings={"temperature": 1, "stop": (), "bias": ((1, 2.0),)}))
    assert write(path, [2], run=identity(settings={"temperature": 1.0, "stop": [], "bias": [[1, 2]]})) == {1}


def test_a_fresh_seed_is_drawn_once(path):
    with FileOutput.opened(path) as output:
        seed = output.begin(identity(seed=None))
        output.append(1, line(1), is_error=False)
    for given in (None, seed):
        with FileOutput.opened(path) as output:
            assert output.begin(identity(seed=given)) == seed
            assert output.done == {1}


def test_a_file_without_answers_belongs_to_nobody(path):
    write(path, [])
    assert write(path, [1], run=identity(prompts="other")) == set()


def test_errors_are_kept_or_done_again(path):
    write(path, [3, 1, 4, 2], errors={1, 4})
    with FileOutput.opened(path) as output:
        output.begin(identity())
        assert (output.done, output.num_errors) == ({1, 2, 3, 4}, 2)
    before = write(path, [1, 2, 3, 4], errors={4}, retry_errors=True)
    assert before == {2, 3}
    assert path.read_bytes() == line(1) + line(2) + line(3) + error(4)
    with FileOutput.opened(path) as output:
        output.begin(identity())
        assert output.num_errors == 1


def test_a_larger_context_is_what_errors_may_be_tried_again_with(path):
    larger = identity(settings={"temperature": 0.8, "stop": (), "context": 8192})
    write(path, [1, 2], errors={2})
    assert write(path, [1, 2], run=larger, retry_errors=True) == {1}
    with pytest.raises(InvalidOptionError, match="context was 8192 and is now 4096"):
        write(path, [])


def test_a_smaller_context_is_not(path):
    """Rows that were answered with the larger one would stand beside those of the smaller one."""
    write(path, [1, 2], errors={2}, run=identity(settings={"context": 8192}))
    before = [p.read_bytes() for p in sorted(path.parent.iterdir())]
    with pytest.raises(InvalidOptionError, match="context was 8192 and is now 4096"):
        write(path, [1, 2], run=identity(settings={"context": 4096}), retry_errors=True)
    assert [p.read_bytes() for p in sorted(path.parent.iterdir())] == before


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_a_file_keeps_its_mode(path):
    path.touch(mode=0o600)
    path.chmod(0o600)
    write(path, [2, 1], errors={1})
    assert path.stat().st_mode & 0o777 == 0o600
    write(path, [1], retry_errors=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_of_others_are_left_alone(path):
    other = path.with_name(path.name + ".tmp")
    other.write_text("mine")
    write(path, [2, 1])
    assert other.read_text() == "mine"


def test_a_full_disk_promises_nothing_to_prompts_that_came_through_a_pipe(path, monkeypatch):
    def full(_file):
        raise OSError(errno.ENOSPC, "full")

    with FileOutput.opened(path) as output:
        output.begin(identity(prompts=None))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"disk is full .* begin again"):
            output.append(1, line(1), is_error=False)


def test_retrying_a_run_cut_short_loses_nothing(path):
    write(path, [3, 1], errors={3}, finish=False)
    write(path, [1, 2], retry_errors=True, finish=False)
    assert rows_of(path) == [1, 2]
    assert write(path, [1, 2, 3]) == {1, 2}


def test_a_second_run_is_refused(path):
    with FileOutput.opened(path) as output:
        output.begin(identity())
        with pytest.raises(StoreError, match="another run is writing"), FileOutput.opened(path):
            pass
        with pytest.raises(StoreError, match="another run is writing"), FileOutput.opened(path, restart=True):
            pass
        output.append(1, line(1), is_error=False)
    assert rows_of(path) == [1]
    assert write(path, [2]) == {1}


def test_a_link_stays_one(path, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write(link, [2, 1])
    assert link.is_symlink()
    assert rows_of(path) == [1, 2]


@pytest.mark.parametrize("name", [".", "missing/answers.jsonl"])
def test_what_can_be_no_file_is_refused(name, tmp_path):
    with pytest.raises(StoreError, match="must be a file"), FileOutput.opened(tmp_path / name):
        pass


# A full disk. POSIX lets a process have files up to a size only, which fails in the middle of a line as a disk does.

TEXT = "x" * 1000
LIMITED = """
import resource, sys
from pathlib import Path
from localspec.errors import StoreError
from tests.batch import test_output
from tests.batch.test_output import TEXT, line, write
test_output.line = lambda row: line(row, TEXT)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    write(Path(sys.argv[1]), [4, 3, 2, 1])
except StoreError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize("room", [0, 1, 999, 1000, 1999, 2500, 3999, 5000])
def test_a_disk_that_fills_up_costs_no_whole_line(room, path):
    size = len(line(1, TEXT))
    command = [sys.executable, "-c", LIMITED, path, str(size * room // 1000)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if room >= 4000:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    kept = rows_of(path) if path.exists() else []
    # Below the size of the state file nothing can begin; above it, every line left is whole.
    assert kept == ([4, 3, 2, 1][: room // 1000] if room >= 999 else [])
    assert write(path, [1, 2, 3, 4]) == set(kept)
    assert rows_of(path) == [1, 2, 3, 4]


def test_a_full_disk_says_what_to_do(path):
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(StoreError, match=r"disk is full .* run the same command again"), _disk_errors(path):
            raise OSError(number, os.strerror(number))


def test_a_full_disk_while_lines_are_put_in_order_loses_nothing(path, monkeypatch):
    write(path, [2, 1], finish=False)
    real = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with FileOutput.opened(path) as output:
        output.begin(identity())
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StoreError, match="disk is full"):
            output.finish()
    monkeypatch.setattr("os.fsync", real)
    assert rows_of(path) == [2, 1]
    assert not list(path.parent.glob("*.unfinished"))
    assert write(path, [1, 2]) == {1, 2}
    assert rows_of(path) == [1, 2]


# Streams


def stream(rows, *, ordered):
    """Return what has been written after each row."""
    file, seen = io.BytesIO(), []
    with StreamOutput(file, ordered=ordered) as output:
        output.begin(identity())
        for row in rows:
            output.append(row, line(row), is_error=False)
            seen.append([json.loads(data)["line"] for data in file.getvalue().splitlines()])
        output.finish()
    return seen


def test_a_stream_gets_lines_in_turn():
    assert stream([2, 3, 1, 5, 4], ordered=True) == [[], [], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert stream([2, 3, 1], ordered=False) == [[2], [2, 3], [2, 3, 1]]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, EvaluationError, None])
def test_a_stream_that_ends_early_gets_what_was_ahead(ending):
    file = io.BytesIO()
    with suppress(KeyboardInterrupt, EvaluationError), StreamOutput(file, ordered=True) as output:
        for row in (1, 5, 3):
            output.append(row, line(row), is_error=False)
        if ending is not None:
            raise ending("no")
    assert [json.loads(data)["line"] for data in file.getvalue().splitlines()] == [1, 3, 5]


def test_a_stream_that_broke_gets_nothing_more():
    file = io.BytesIO()
    with suppress(BrokenPipeError), StreamOutput(file, ordered=True) as output:
        output.append(2, line(2), is_error=False)
        raise BrokenPipeError
    assert file.getvalue() == b""


def test_a_stream_keeps_no_run():
    output = StreamOutput(io.BytesIO(), ordered=True)
    with output:
        assert output.begin(identity(seed=4)) == 4
        assert isinstance(output.begin(identity(seed=None)), int)
        assert not output.done
