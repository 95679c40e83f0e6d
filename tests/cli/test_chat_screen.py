"""What chat writes where, and what a line means; no model."""

import io
import os
import signal
import time
from types import SimpleNamespace

import pytest

from localspec.cli.chat import screen as screens
from localspec.cli.chat.commands import COMMANDS, find_command
from localspec.cli.chat.prompt import _is_open, _Lines, _Patient, _unquoted
from localspec.cli.chat.screen import Screen
from localspec.cli.chat.speed import MeasuredPolicy, PlainSteps
from localspec.cli.chat.talk import Interrupts, Settings, Talk
from localspec.conversation import Conversation
from localspec.errors import InvalidOptionError, PromptError
from localspec.policy import FixedPolicy, StepOutcome
from localspec.sampling import SamplingParams
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


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def quiet_talk(interrupts=None):
    """A talk of commands only; there is no session to answer."""
    interrupts = interrupts or Interrupts(False)
    settings = Settings(params=SamplingParams(temperature=0))
    return Talk(SimpleNamespace(), settings, Screen(), Conversation(), interrupts=interrupts)


def test_a_remark_that_nobody_hears_ends_nothing(streams):
    streams(io.StringIO(), Broken())
    talk = quiet_talk()
    talk.take("/frob")
    talk.take("/clear")
    talk.take("/quit")
    assert talk.over


def test_an_answer_that_nobody_reads_ends_the_talk(streams):
    streams(Broken(), io.StringIO())
    talk = quiet_talk()
    with pytest.raises(BrokenPipeError):
        talk.take("/help")


@pytest.mark.parametrize("command", ["save", "load"])
def test_a_name_with_a_zero_byte(streams, command):
    _, err = streams(io.StringIO(), io.StringIO())
    quiet_talk().take(f"/{command} a\0b")
    assert "cannot be the name of a file" in err.getvalue()


class Reader:
    """Yields lines; an exception is raised in its place, a signal sent before the line that follows it."""

    def __init__(self, *items):
        self._items = iter(items)

    def read(self):
        item = next(self._items)
        if isinstance(item, signal.Signals):
            os.kill(os.getpid(), item)
            item = next(self._items)
        if isinstance(item, type):
            raise item
        return item


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
def test_control_c_between_prompt_and_answer_stops_that_answer(streams, monkeypatch):
    streams(io.StringIO(), io.StringIO())
    talk = quiet_talk(Interrupts(True))
    seen = []
    monkeypatch.setattr(Talk, "say", lambda self, text: seen.append((text, self.interrupts.seen)))
    before = signal.getsignal(signal.SIGINT)
    talk.run(Reader(signal.SIGINT, "a", "b", None))
    assert seen == [("a", True), ("b", False)]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_control_c_in_a_row_leaves(capsys):
    reader = _Patient(Reader(KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt))
    assert reader.read() == "a"
    with pytest.raises(KeyboardInterrupt):
        reader.read()
    assert capsys.readouterr().err.count("once more") == 2


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
def test_control_c_at_a_plain_prompt(monkeypatch):
    def readline(_limit):
        os.kill(os.getpid(), signal.SIGINT)
        return "never\n"

    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=readline))
    with Interrupts(True).noted(), pytest.raises(KeyboardInterrupt):
        _Lines(prompts=True).read()


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("localspec.cli.chat.prompt.MAX_FILE_BYTES", 8)
    monkeypatch.setattr("sys.stdin", io.StringIO("1234567\n\n" + 9 * "\0"))
    reader = _Lines()
    assert (reader.read(), reader.read()) == ("1234567", "")
    with pytest.raises(PromptError, match="a line of standard input has more than"):
        reader.read()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="a device of POSIX")
def test_a_device_does_not_fill_memory(monkeypatch):
    with open("/dev/zero", encoding="utf-8") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        with pytest.raises(PromptError, match="more than 64 MiB"):
            _Lines().read()
