"""What chat writes where, and what a line means; no model."""

import io
import time

import pytest

from localspec.cli.chat import screen as screens
from localspec.cli.chat.commands import COMMANDS, find_command
from localspec.cli.chat.prompt import _is_open, _unquoted
from localspec.cli.chat.screen import Screen
from localspec.cli.chat.speed import MeasuredPolicy, PlainSteps
from localspec.errors import InvalidOptionError
from localspec.policy import FixedPolicy, StepOutcome
from localspec.session import TokenEvent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def streams(monkeypatch):
    """Puts files or terminals in the place of stdout and stderr."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def install(out, err):
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        return out, err

    return install


def show(screen, *events):
    for text, drafted in events:
        screen.event(TokenEvent(1, text, drafted))
    screen.end_answer()


def test_a_file_gets_the_bare_text(streams):
    out, err = streams(io.StringIO(), io.StringIO())
    screen = Screen(show_draft=True)
    show(screen, ("a\x1b[2J", True), ("", False), ("b", False))
    show(screen, ("c\n", False))
    screen.note("noted")
    screen.waiting("reading")(1, 9)
    assert (out.getvalue(), err.getvalue()) == ("a\x1b[2Jb\nc\n", "noted\n")


def test_a_terminal_gets_colours_and_no_control_characters(streams):
    out, err = streams(Terminal(), Terminal())
    screen = Screen(show_draft=True)
    show(screen, ("a\x1b]0;t\x07\x9b", True), ("b\t", False))
    screen.note("noted")
    assert out.getvalue() == "\x1b[32ma␛]0;t␇\ufffd\x1b[0mb\t\n"
    assert err.getvalue() == "\x1b[2mnoted\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_declined(streams, monkeypatch, name, value):
    out, err = streams(Terminal(), Terminal())
    monkeypatch.setenv(name, value)
    screen = Screen(show_draft=True)
    show(screen, ("a", True))
    screen.note("noted")
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_quiet_leaves_errors_only(streams):
    out, err = streams(io.StringIO(), Terminal())
    screen = Screen(quiet=True)
    screen.note("noted")
    screen.error("two\nlines")
    assert (out.getvalue(), err.getvalue()) == ("", "localspec: two lines\n")


def test_progress_shows_after_a_moment_and_vanishes(streams, monkeypatch):
    out, err = streams(Terminal(), Terminal())
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    screen = Screen()
    advance = screen.waiting("reading")
    advance(10, 300)
    assert err.getvalue() == ""
    now = 1.5
    advance(120, 300)
    advance(240, 300)
    show(screen, ("x", False))
    assert out.getvalue() == "x\n"
    # Played back on one line, nothing is left of it.
    line, at = [" "] * 80, 0
    for character in err.getvalue():
        if character == "\b":
            at -= 1
        else:
            line[at] = character
            at += 1
    assert "(reading: 240 of 300 tokens)" in err.getvalue()
    assert ("".join(line).strip(), at) == ("", 0)


def test_hidden_keys_do_nothing_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with screens.hidden_keys():
        pass


# --- lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["hello", "/usr/bin/ls, what is it?", "//help", "/* a comment */", "/", "/ help", "/2", "a /help"]
)
def test_a_message(line):
    assert find_command(line) is None


@pytest.mark.parametrize("line", ["/help", "  /HELP  ", "/bye", "/set temperature 0.2", "/system two\nlines"])
def test_a_command(line):
    assert find_command(line) is not None


@pytest.mark.parametrize(("line", "hint"), [("/hlep", r"did you mean /help\?"), ("/zzz x", "/help lists them")])
def test_no_such_command(line, hint):
    with pytest.raises(InvalidOptionError, match=hint):
        find_command(line)


def test_the_commands_that_are_promised():
    promised = "help system set gamma draft stats undo retry clear save load tokens model quit"
    assert list(COMMANDS) == promised.split()


@pytest.mark.parametrize(
    ("text", "is_open", "message"),
    [
        ("plain", False, "plain"),
        ('"""', True, ""),
        ('"""a\nb', True, "a\nb"),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\n"""', False, "a"),
        ('x """', False, 'x """'),
        ('""""""', False, ""),
    ],
)
def test_quoted_blocks(text, is_open, message):
    assert _is_open(text) is is_open
    assert _unquoted(text) == message


# --- measured speed -----------------------------------------------------------------------------------------


def outcome(drafted, emitted, seconds):
    return StepOutcome(
        num_drafted=drafted,
        num_accepted=emitted - 1,
        num_emitted=emitted,
        depth=9,
        draft_s=seconds / 2 if drafted else 0.0,
        verify_s=seconds / 2 if drafted else seconds,
        sampling_s=0.0,
    )


def test_speedup_compares_with_plain_steps_of_the_same_answer():
    policy = MeasuredPolicy(FixedPolicy(4), PlainSteps())
    assert [policy.plan(depth).limit for depth in (1, 2, 3, 4)] == [0, 0, 4, 4]
    policy.observe(outcome(0, 1, 0.1))
    policy.observe(outcome(0, 1, 0.1))
    assert policy.speedup is None, "nothing was drafted"
    policy.observe(outcome(4, 4, 0.2))
    assert policy.speedup == pytest.approx(6 * 0.1 / 0.4)


def test_no_speedup_is_claimed_that_was_not_measured():
    policy = MeasuredPolicy(FixedPolicy(4), PlainSteps())
    policy.observe(outcome(4, 4, 0.2))
    policy.observe(outcome(0, 1, 0.1))
    assert policy.speedup is None
