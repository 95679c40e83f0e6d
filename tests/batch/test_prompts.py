"""Reading prompt files: ends of lines, marks, sizes, and a file that changes."""

import io
import os

import pytest

from localspec.batch import PromptFile
from localspec.batch import prompts as module
from localspec.errors import PromptError


def lines(path):
    with PromptFile.opened(str(path)) as prompts:
        return [(line.number, line.data) for line in prompts.lines()], prompts.num_lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfa\nb\n", [b"a", b"b"]),
        (b"a\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),
        (b"\xef\xbb\xbf", [b""]),
        (b"a\n\n\nb\n\n", [b"a", b"", b"", b"b", b""]),
        (b"\n", [b""]),
        ("a\u2028b\x0bc\rd\n".encode(), ["a\u2028b\x0bc\rd".encode()]),
    ],
)
def test_only_newlines_end_lines_and_what_editors_add_is_taken_off(content, expected, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    found, num_lines = lines(path)
    assert found == list(enumerate(expected, 1))
    assert num_lines == len(expected)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_that_is_too_long_is_skipped_and_the_next_one_is_not(end, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 7)
    path = tmp_path / "prompts.jsonl"
    for length, kept in ((10, True), (11, False), (12, False), (13, False), (40, False)):
        path.write_bytes(b"a\n" + b"x" * length + (b"\r\nb" if end == b"\r\n" else b"\nb") + end)
        assert lines(path) == ([(1, b"a"), (2, b"x" * length if kept else None), (3, b"b")], 3)
    path.write_bytes(b"a\n" + b"x" * 10 + b"\r\r\nb" + end)
    assert lines(path) == ([(1, b"a"), (2, None), (3, b"b")], 3), "the first carriage return belongs to the line"


@pytest.mark.parametrize("now", [b"a\nc\n", b"a\n", b"a\nb", b"a\n\n\n"])
def test_a_file_that_changes_while_it_is_read_is_noticed(now, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"a\nb\n" + b"x" * 100_000)  # more than a reader holds
    with PromptFile.opened(str(path)) as prompts:
        reading = prompts.lines()
        path.write_bytes(now)
        with pytest.raises(PromptError, match="changed while it was read"):
            list(reading)


def test_what_is_appended_meanwhile_is_left_to_another_run(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"a\nb\n")
    with PromptFile.opened(str(path)) as prompts:
        with path.open("ab") as more:
            more.write(b"c\n")
        assert [line.data for line in prompts.lines()] == [b"a", b"b"]


def test_a_pipe_is_read_once_and_has_no_hash(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"a\nb")
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
        with PromptFile.opened("-") as prompts:
            assert (prompts.sha256, prompts.num_lines) == (None, None)
            assert [line.data for line in prompts.lines()] == [b"a", b"b"]


def test_standard_input_that_is_a_file_is_like_a_file(monkeypatch, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"a\nb\n")
    with PromptFile.opened(str(path)) as prompts:
        expected = prompts.sha256
    with path.open(encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdin", file)
        with PromptFile.opened("-") as prompts:
            assert (prompts.sha256, prompts.num_lines) == (expected, 2)
            assert [line.data for line in prompts.lines()] == [b"a", b"b"]
            assert prompts.is_same_file(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_what_cannot_be_read_is_a_prompt_error(name, tmp_path):
    with pytest.raises(PromptError, match="cannot be read"), PromptFile.opened(str(tmp_path / name)):
        pass


def test_an_error_of_the_block_is_not_taken_for_one_of_the_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"")
    with pytest.raises(OSError, match="mine"), PromptFile.opened(str(path)):
        raise OSError("mine")
