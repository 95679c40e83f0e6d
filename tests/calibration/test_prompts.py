"""Built-in prompts, and files of the user's own."""

import json

import pytest

from localspec.calibration.prompts import (
    OWN_KIND,
    CalibrationPrompt,
    built_in_prompts,
    read_prompts,
    take_turns,
)
from localspec.errors import PromptError
from localspec.text import Message


class TestBuiltIn:
    def test_every_kind_has_enough_different_prompts(self):
        prompts = built_in_prompts()
        kinds = {prompt.kind for prompt in prompts}
        assert kinds == {"code", "editing", "prose", "questions", "summarising"}
        assert len(set(prompts)) == len(prompts)
        for kind in kinds:
            assert sum(prompt.kind == kind for prompt in prompts) >= 6

    def test_they_are_texts_of_a_size_that_is_soon_read(self):
        for prompt in built_in_prompts():
            assert isinstance(prompt.content, str)
            assert 50 <= len(prompt.content) <= 800
            assert prompt.content == prompt.content.strip()


def test_kinds_take_turns():
    prompts = [
        CalibrationPrompt(kind, str(i)) for kind, count in (("a", 3), ("b", 1), ("c", 2)) for i in range(count)
    ]
    assert [p.kind for p in take_turns(prompts)] == ["a", "b", "c", "a", "c", "a"]
    assert set(take_turns(prompts)) == set(prompts)


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "mine.txt"

    def test_text(self, path):
        path.write_bytes(
            "\ufeff\n\nOne,\r\nin two lines.\r\n \r\n\t\nZweite: größer\nOne\n\nZweite: größer\nOne\n".encode()
        )
        assert read_prompts(path) == (
            CalibrationPrompt(OWN_KIND, "One,\nin two lines."),
            CalibrationPrompt(OWN_KIND, "Zweite: größer\nOne"),
        )

    def test_jsonl(self, path):
        records = [
            {"prompt": "Hello\n\nthere\u2028.", "id": 7},
            {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                "kind": "chat",
            },
            {"prompt": "Hello\n\nthere\u2028.", "id": 8},
        ]
        path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n", encoding="utf-8")
        assert read_prompts(path) == (
            CalibrationPrompt(OWN_KIND, "Hello\n\nthere\u2028."),
            CalibrationPrompt("chat", (Message("system", "Be brief."), Message("user", "Hi"))),
        )

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "holds 0 different prompts"),
            ("One\n\nOne\n", "holds 1 different prompt; agreement needs 2"),
            ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
            ("{" + "[" * 100_000, "line 1: not JSON"),
            ('{"text": "a"}', 'line 1: must be an object with either "prompt" or "messages"'),
            ('{"prompt": "a", "messages": []}', "either"),
            ('{"prompt": " "}', "not empty"),
            ('{"prompt": 3}', "is 3"),
            ('{"prompt": "a", "kind": ""}', "\"kind\" is ''"),
            ('{"prompt": "a", "kind": "all"}', 'other than "all"'),
            ('{"messages": []}', "must be a list of messages"),
            ('{"messages": ["Hi"]}', "must be an object with role and content"),
            ('{"messages": [{"role": "king", "content": "a"}]}', "line 1: a message has the role 'king'"),
            ('{"messages": [{"role": [], "content": "a"}]}', "line 1: a message has the role"),
        ],
    )
    def test_refuses(self, path, content, message):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(PromptError, match=message):
            read_prompts(path)

    def test_a_file_called_jsonl_is_read_as_such(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("One\n\nTwo\n")
        with pytest.raises(PromptError, match="line 1: not JSON"):
            read_prompts(path)

    def test_refuses_what_is_no_text(self, path):
        path.write_bytes(b"abc\xff")
        with pytest.raises(PromptError, match="not UTF-8 at byte 3"):
            read_prompts(path)

    def test_refuses_what_is_not_there(self, path):
        with pytest.raises(PromptError, match=r"cannot read the prompts in .*mine\.txt: No such file"):
            read_prompts(path)
