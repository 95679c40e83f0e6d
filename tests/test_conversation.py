"""Conversations as values: what the model sees, what is dropped, and the form on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.conversation import Conversation, Turn, load_conversation, read_messages, save_conversation
from localspec.errors import ContextOverflowError, PromptError, StoreError
from localspec.text import Message

TALK = Conversation("Be brief.", (Turn("a", "b"), Turn("c", "d", interrupted=True), Turn("e")))


def words(messages):
    """A tokeniser that counts words, and two more for each message."""
    return sum(len(message.content.split()) + 2 for message in messages)


def roles(conversation):
    return [(message.role, message.content) for message in conversation.messages()]


def test_what_the_model_sees():
    assert roles(TALK) == [
        ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"),
    ]  # fmt: skip
    assert roles(replace(TALK, num_dropped=2)) == [("system", "Be brief."), ("user", "e")]
    assert roles(Conversation("", (Turn("a", ""),))) == [("user", "a"), ("assistant", "")]


def test_asking_answering_and_taking_back():
    asked = Conversation().ask("a")
    assert asked.is_waiting
    answered = asked.answer("b", interrupted=True)
    assert answered.turns == (Turn("a", "b", True),)
    assert not answered.is_waiting
    assert answered.retry() == asked
    assert answered.undo() == Conversation()
    assert asked.ask("x").turns == (Turn("x"),), "a message without an answer gives way"
    assert replace(TALK, num_dropped=3).undo().num_dropped == 1


def test_a_turn_that_comes_last_again_is_seen_again():
    talk = replace(TALK, num_dropped=2).undo()
    assert roles(talk.retry())[-1] == ("user", "c"), "or a retry would answer no message at all"
    assert roles(replace(talk, num_dropped=2).retry())[-1] == ("user", "c"), "as a file may say"


def test_nothing_is_dropped_while_it_fits():
    talk = Conversation("s", (Turn("a b", "c"), Turn("d")))
    size = words(talk.messages())
    assert talk.fit(words, size + 5, 5) is talk
    assert talk.fit(words, size + 5, 6) is not talk


def test_a_message_that_cannot_fit_is_refused_with_both_counts():
    talk = Conversation("s", (Turn("a", "b"),)).ask("x " * 10)
    with pytest.raises(ContextOverflowError, match=r"the message and the system text take 15 tokens.* holds 15"):
        talk.fit(words, 15, 4)
    assert talk.fit(words, 16, 4).num_dropped == 1
    assert Conversation().ask("x").fit(words, 4, 0) == Conversation().ask("x")
    with pytest.raises(ContextOverflowError, match="the message takes 12 tokens"):
        Conversation().ask("x " * 10).fit(words, 12, 0)


def test_dropping_makes_room_for_several_turns():
    talk = Conversation("", tuple(Turn("q", "a") for _ in range(20))).ask("m")  # 6 words a turn
    fitted = talk.fit(words, 100, 20)
    assert words(fitted.messages()) <= 50 < words(replace(fitted, num_dropped=fitted.num_dropped - 1).messages())
    large = talk.ask("m " * 60).fit(words, 100, 20)
    assert 70 < words(large.messages()) <= 80, "half is out of reach, and as much as fits is kept"


sizes = st.integers(1, 30)


@given(st.lists(st.tuples(sizes, sizes), max_size=12), sizes, st.integers(0, 5), st.integers(8, 120), st.data())
def test_fitting_drops_whole_turns_oldest_first_and_never_the_last_message(turns, last, system, capacity, data):
    answer_room = data.draw(st.integers(1, capacity // 2))
    talk = Conversation("s " * system, tuple(Turn("q " * q, "a " * a) for q, a in turns)).ask("m " * last)
    alone = words(replace(talk, num_dropped=len(turns)).messages())
    if alone >= capacity:
        with pytest.raises(ContextOverflowError):
            talk.fit(words, capacity, answer_room)
        return
    fitted = talk.fit(words, capacity, answer_room)
    size = words(fitted.messages())
    assert replace(fitted, num_dropped=0) == talk
    assert fitted.messages()[-1] == talk.messages()[-1]
    assert [m for m in fitted.messages() if m.role == "system"] == [m for m in talk.messages() if m.role == "system"]
    assert size <= capacity - answer_room or fitted.num_dropped == len(turns)
    if fitted.num_dropped:
        assert words(talk.messages()) > capacity - answer_room
        assert size <= max(capacity // 2, capacity - answer_room) or size == alone
        fewer = words(replace(fitted, num_dropped=fitted.num_dropped - 1).messages())
        assert fewer > min(capacity // 2, capacity - answer_room), "no more is dropped than it takes"
    assert fitted.fit(words, capacity, answer_room) == fitted


# --- on disk ------------------------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=12)
turn = st.builds(Turn, text, text, st.booleans())


@given(st.builds(Conversation, text, st.lists(turn, max_size=5).map(tuple)), st.data())
def test_what_is_saved_is_loaded(tmp_path_factory, talk, data):
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    talk = replace(talk, num_dropped=data.draw(st.integers(0, len(talk.turns))))
    if data.draw(st.booleans()):
        talk = talk.ask("unanswered")
    save_conversation(talk, path, model="m.gguf")
    assert load_conversation(path) == talk
    save_conversation(talk, path, model="m.gguf")  # over itself
    if messages := replace(talk, num_dropped=0).messages():
        assert read_messages(path) == messages


def test_saving_spares_other_files(tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    with pytest.raises(PromptError, match=r"notes\.md exists and is no saved conversation"):
        save_conversation(TALK, notes, model="m")
    assert notes.read_text() == "mine"
    with pytest.raises(StoreError, match="choose another place"):
        save_conversation(TALK, tmp_path / "none" / "talk.json", model="m")
    assert list(tmp_path.iterdir()) == [notes]


def user(content="x", **more):
    return {"role": "user", "content": content, **more}


BAD = [
    (b"", "is not JSON"),
    (b"\xff\xfe", "is not UTF-8"),
    (b"[" * 100_000, "is JSON nested too deep"),
    (b"{}", "holds no messages"),
    (b'{"messages": 3}', "holds no messages"),
    ([3], "message 1: a message is 3; it must be an object"),
    ([{"role": "user"}], "message 1: a message is .* must be an object"),
    ([user(3)], "message 1: the content"),
    ([user(None)], "message 1: the content"),
    ([{"role": "wizard", "content": ""}], "message 1: a message has the role 'wizard'"),
    ([{"role": ["user"], "content": ""}], "message 1: a message has the role"),
    ([user("\ud800")], "message 1: .* not text"),
    ([user([{"type": "image_url", "image_url": "x"}])], "message 1: a user message has a part that is not text"),
    ({"format": "localspec conversation", "version": 2, "messages": []}, "of version 2"),
]
BAD_TALKS = [
    ([user(), user()], "message 2 has the role user, where assistant is due"),
    ([{"role": "assistant", "content": "x"}], "message 1 has the role assistant, where user is due"),
    ([user(), {"role": "system", "content": "x"}], "message 2 has the role system"),
    ({"messages": [user()], "dropped_turns": 2}, "dropped_turns is 2; .* from 0 to 1"),
    ({"messages": [user()], "dropped_turns": True}, "dropped_turns is True"),
]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize(("content", "complaint"), BAD + BAD_TALKS)
def test_a_file_that_is_no_conversation(tmp_path, content, complaint):
    with pytest.raises(PromptError, match=complaint):
        load_conversation(write(tmp_path / "talk.json", content))


@pytest.mark.parametrize(("content", "complaint"), [*BAD, ([], "holds no messages; give")])
def test_a_file_that_holds_no_messages(tmp_path, content, complaint):
    with pytest.raises(PromptError, match=complaint):
        read_messages(write(tmp_path / "messages.json", content))


def test_messages_as_others_write_them(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write(tmp_path / "messages.json", b"\xef\xbb\xbf" + json.dumps([user(parts), user("c")]).encode())
    assert read_messages(path) == [Message("user", "ab"), Message("user", "c")]
    assert read_messages(None, '{"messages": [{"role": "tool", "content": "t"}]}') == [Message("tool", "t")]
    with pytest.raises(PromptError, match="standard input is not JSON"):
        read_messages(None, "hello")


def test_a_developer_gives_the_system_text_and_null_is_no_text(tmp_path):
    entries = [
        {"role": "developer", "content": "Be brief."},
        user("a"),
        {"role": "assistant", "content": None, "refusal": None},
        user("b"),
    ]
    read = read_messages(write(tmp_path / "messages.json", entries))
    assert read == [
        Message("system", "Be brief."),
        Message("user", "a"),
        Message("assistant", ""),
        Message("user", "b"),
    ]
    talk = load_conversation(write(tmp_path / "talk.json", entries[:3]))
    assert talk == Conversation("Be brief.", (Turn("a", ""),))


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="no such device")
def test_a_device_is_neither_read_nor_written():
    for act in (load_conversation, read_messages):
        with pytest.raises(OSError, match="is a device"):
            act(Path("/dev/zero"))
    with pytest.raises(PromptError, match="no saved conversation"):
        save_conversation(TALK, Path("/dev/zero"), model="m")


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(StoreError, match="cannot be written: File name too long"):
        save_conversation(TALK, tmp_path / ("x" * 300), model="m")
