"""What slash commands make of what stands after them, without a model."""

from types import SimpleNamespace

import pytest

from localspec.cli.chat.commands import find_command
from localspec.cli.chat.talk import Settings
from localspec.conversation import Conversation, Turn
from localspec.errors import InvalidOptionError
from localspec.sampling import SamplingParams


@pytest.fixture
def talk():
    notes = []
    turns = tuple(Turn(f"question {i}", f"answer {i}") for i in range(1, 5))
    return SimpleNamespace(
        conversation=Conversation("You are brief.", turns, num_dropped=2),
        settings=Settings(params=SamplingParams()),
        screen=SimpleNamespace(note=notes.append, result=notes.append),
        notes=notes,
        over=False,
    )


def do(talk, line):
    find_command(line)(talk)
    return talk.notes[-1] if talk.notes else ""


@pytest.mark.parametrize(
    ("line", "left", "said"),
    [
        ("/undo", 3, "Taken back: question 4"),
        ("/undo 1", 3, "Taken back: question 4"),
        ("/undo 3", 1, "Taken back 3 turns, from this one on: question 2"),
        ("/undo 4", 0, "Taken back 4 turns, from this one on: question 1"),
    ],
)
def test_undo_takes_back_as_many_turns_as_it_is_told(talk, line, left, said):
    turns = talk.conversation.turns
    assert do(talk, line) == said
    assert talk.conversation.turns == turns[:left]
    assert talk.conversation.num_dropped <= max(0, left - 1)
    assert talk.conversation.system == "You are brief."


@pytest.mark.parametrize("count", ["5", "0", "-1", "two", "1 2"])
def test_undo_refuses_what_it_cannot_take_back(talk, count):
    before = talk.conversation
    with pytest.raises(InvalidOptionError):
        do(talk, f"/undo {count}")
    assert talk.conversation == before


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("###", ("###",), '"###"'),
        ("End of text", ("End of text",), '"End of text"'),
        ('"###" "User:"', ("###", "User:"), '"###" "User:"'),
        (r'"\n\n", "É"', ("\n\n", "É"), r'"\n\n" "É"'),
        (r'"\""', ('"',), r'"\""'),
        ("none", (), "none"),
    ],
)
def test_several_stop_strings_can_be_set(talk, text, stops, shown):
    talk.settings.stop = ("before",)
    assert do(talk, f"/set stop {text}") == f"stop is {shown}"
    assert talk.settings.stop == stops
    if stops:
        do(talk, f"/set stop {shown}")  # what is shown can be typed
        assert talk.settings.stop == stops


@pytest.mark.parametrize("text", ['"', '"###', '"###" User', '"a" 5', '"a" ""'])
def test_stop_strings_that_are_none_change_nothing(talk, text):
    talk.settings.stop = ("before",)
    with pytest.raises(InvalidOptionError, match="stop"):
        do(talk, f"/set stop {text}")
    assert talk.settings.stop == ("before",)


@pytest.mark.parametrize("line", ["/clear all", "/quit now", "/retry 2", "/help set", "/model x"])
def test_what_a_command_cannot_take_is_not_ignored(talk, line):
    before = talk.conversation
    with pytest.raises(InvalidOptionError, match="stands alone"):
        do(talk, line)
    assert (talk.conversation, talk.over) == (before, False)
