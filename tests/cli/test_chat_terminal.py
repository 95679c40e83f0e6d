"""``chat`` in a real pseudo-terminal, driven as a person would."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from localspec.backend.llamacpp import LlamaContext
from localspec.session import load_pair
from tests.cli.replay import check_replay

pexpect = pytest.importorskip("pexpect")
pytestmark = [pytest.mark.model, pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals there")]

ROOT = Path(__file__).resolve().parents[2]
READY, TAKEN = "\x1b\\[\\?2004h", "\x1b\\[\\?2004l"  # the editor asks for bracketed pastes while it shows a prompt
STATUS = r"\d+ tokens, [\d.]+ tokens/s"
ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """A chat in a pseudo-terminal of 24 lines and 90 columns."""

    def __init__(self, config, *arguments):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "LOCALSPEC_CONFIG_DIR": str(config),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
        }
        command = ["-m", "localspec", "chat", "-t", "0", *arguments]
        self.child = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", timeout=120, dimensions=(24, 90)
        )
        self.ready()

    def ready(self):
        """Wait for a prompt; return what came before it."""
        self.child.expect(READY)
        return self.child.before

    def type(self, text, *, enter=True):
        self.child.send(text + ("\r" if enter else ""))

    def paste(self, text):
        self.child.send(f"\x1b[200~{text}\x1b[201~")

    def say(self, text):
        """Send a message and wait for the next prompt; return what was shown."""
        self.type(text)
        return self.ready()

    def interrupt(self):
        self.child.sendintr()

    def leave(self):
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def open_terminal(tmp_path):
    opened = []

    def start(*arguments):
        opened.append(Terminal(tmp_path, *map(str, arguments)))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.child.close(force=True)


@pytest.fixture
def smol(open_terminal, smollm2_path):
    def start(*arguments):
        return open_terminal("--target", smollm2_path, "--threads", "1", "-n", "16", *arguments)

    return start


def lines(count):
    return "".join(f"x{i} = {i}\n" for i in range(count))


def saved(path):
    return json.loads(path.read_text("utf-8"))["messages"]


def test_a_terminal_session(smol, smollm2_path, tmp_path):
    chat = smol("--draft", smollm2_path, "--show-draft", "--gamma", "3")
    shown = chat.say("Hello!")
    assert re.search(STATUS, shown)
    assert "\x1b[32m" in shown, "what was drafted is green"
    chat.say('"""first line\rsecond line"""')
    chat.say("alt\x1b\renter")
    assert "Loaded" not in chat.say(f"/save {tmp_path / 'talk.json'}")
    users = [m["content"] for m in saved(tmp_path / "talk.json") if m["role"] == "user"]
    assert users == ["Hello!", "first line\nsecond line", "alt\nenter"]
    assert "there is no command /frob" in ESCAPES.sub("", chat.say("/frob"))
    assert chat.leave() == 0
    history = tmp_path / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert "+Hello!" in history.read_text("utf-8")


def test_history_comes_back_in_the_next_session(smol, tmp_path):
    chat = smol("--quiet")
    chat.say("/tokens remember this")
    assert chat.leave() == 0
    again = smol("--quiet")
    again.type("\x1b[A", enter=False)
    again.child.expect("/tokens remember this")


def test_a_paste_of_two_hundred_lines_is_one_message(smol, tmp_path):
    chat = smol("-q")
    chat.paste(lines(200).replace("\n", "\r\n"))
    chat.child.expect("199")
    chat.type("")
    chat.ready()
    chat.say(f"/save {tmp_path / 'talk.json'}")
    assert saved(tmp_path / "talk.json")[0]["content"].strip() == lines(200).strip()


def test_control_c_at_the_prompt(smol):
    chat = smol()
    chat.type("half a message", enter=False)
    chat.child.expect("message")
    chat.interrupt()  # clears the line
    chat.type("/tokens x")
    chat.child.expect("1 token: ")
    chat.ready()
    chat.interrupt()
    chat.child.expect("once more")
    chat.ready()
    assert "2 tokens" in chat.say("/tokens a b"), "anything typed in between counts as a new beginning"
    chat.interrupt()
    chat.child.expect("once more")
    chat.ready()
    chat.interrupt()
    chat.child.expect(pexpect.EOF)
    chat.child.close()
    assert chat.child.exitstatus == 130


def test_control_c_before_the_answer_has_begun(smol):
    chat = smol()
    for _ in range(3):
        chat.type("hello")
        chat.child.expect(TAKEN)
        chat.interrupt()
        chat.ready()
    assert chat.leave() == 0


def test_bytes_that_are_no_utf8_are_replaced(smol, tmp_path):
    chat = smol("-q")
    os.write(chat.child.child_fd, b"caf\xe9\r")
    chat.ready()
    chat.say(f"/save {tmp_path / 'talk.json'}")
    assert saved(tmp_path / "talk.json")[0]["content"] == "caf\ufffd"


def test_a_dumb_terminal_gets_no_escapes(smollm2_path, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LOCALSPEC_CONFIG_DIR": str(tmp_path),
        "TERM": "dumb",
    }
    command = ["-m", "localspec", "chat", "-t", "0", "-n", "8", "--target", str(smollm2_path), "--show-draft"]
    child = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=120)
    shown = ""
    for line in ("hello", "/help"):
        child.expect("> ")
        shown += child.before
        child.send(line + "\r")
    child.expect("leave; Ctrl-D does too")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "\x1b" not in shown


def test_control_z_stops_and_fg_goes_on_without_echo(smollm2_path, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LOCALSPEC_CONFIG_DIR": str(tmp_path),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "PS1": "SHELL> ",
        "TERM": "xterm",
    }
    shell = pexpect.spawn("bash", ["--norc", "-i"], env=environment, encoding="utf-8", timeout=120)
    shell.expect("SHELL> ")
    shell.send(f"{sys.executable} -m localspec chat -t 0 --threads 1 --target {smollm2_path}\r")
    shell.expect("Ctrl-D leaves")
    shell.expect(READY)
    shell.send("Tell me a very long story about a fox and a hen.\r")
    shell.expect(TAKEN)
    shell.expect("[A-Za-z]{3}")
    shell.send("\x1a")
    shell.expect("SHELL> ")
    shell.send("fg\r")
    shell.expect("[A-Za-z]{3} [A-Za-z]")
    shell.send("XYZZY")
    time.sleep(0.5)
    shell.sendintr()
    shell.expect("Interrupted")
    assert "XYZZY" not in shell.before
    shell.expect(READY)
    shell.send("\x15\x1a")
    shell.expect("SHELL> ")
    shell.close(force=True)


def test_keys_typed_during_an_answer_wait_for_the_prompt(smol):
    chat = smol("--max-tokens", "60")
    chat.type("Tell me a long story about a fox.")
    chat.child.expect(TAKEN)
    chat.child.expect("[A-Za-z]{3}")
    chat.type("/tokens later")
    before = chat.ready()
    assert "/tokens" not in before
    chat.child.expect("1 token: ")


def test_resizing_is_survived(smol):
    chat = smol()
    chat.type("a message of some length that will have to be wrapped in a narrow window", enter=False)
    for size in ((10, 30), (40, 120), (3, 12), (24, 80)):
        chat.child.setwinsize(*size)
        time.sleep(0.2)
    chat.type("")
    chat.child.setwinsize(20, 50)
    chat.child.expect(STATUS)
    chat.ready()
    assert chat.leave() == 0


def test_the_default_pair(open_terminal, qwen_target_path, qwen_draft_path, tmp_path):
    """Five turns with an interrupt in each phase, saved, loaded, and compared with a clean replay."""
    model = ["--target", qwen_target_path, "--draft", qwen_draft_path, "--ctx", "2048", "-n", "24", "--gamma", "4"]
    chat = open_terminal(*model)
    talk = tmp_path / "talk.json"
    assert re.search(STATUS, chat.say("Write a Python function that adds two numbers. Code only."))
    chat.type("/set max_tokens 400")
    chat.ready()
    for seconds in (0.3, 0.55):  # in a draft or a verification, as it comes
        chat.type("Count from one to one hundred in words.")
        chat.child.expect("[Oo]ne")
        time.sleep(seconds)
        chat.interrupt()
        assert "what there is of the answer is kept" in chat.ready()
    chat.paste(lines(200))
    chat.type("")
    chat.child.expect(r"\(reading: \d+ of \d+ tokens\)")
    chat.interrupt()
    assert "/retry asks again" in chat.ready()
    chat.say("/set max_tokens 24")
    chat.type("Now one that multiplies them.")
    chat.child.expect(TAKEN)
    chat.child.setwinsize(30, 60)
    chat.ready()
    chat.say(f"/save {talk}")
    chat.say("Which of them is commutative?")
    chat.say("/clear")
    assert "Loaded 4 turns" in chat.say(f"/load {talk}")
    chat.say("Which of them is commutative?")
    chat.say(f"/save {talk}")
    assert chat.leave() == 0
    _check(talk, qwen_target_path)


def _check(talk, path):
    """Every answer, interrupted ones included, is what the target alone says, up to near ties."""
    messages = saved(talk)
    assert json.loads(talk.read_text("utf-8"))["dropped_turns"] == 0
    assert [m.get("interrupted", False) for m in messages if m["role"] == "assistant"] == [
        False,
        True,
        True,
        False,
        False,
    ]
    with load_pair(target=path, context=2048) as session:
        judge = LlamaContext(session.pair.target.model, capacity=2048)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                tokens = session.vocabulary.tokenize(message["content"])
                # The last token of a text may have been another one, cut by the end.
                check_replay(judge, session.encode(messages[:i]), tokens[:-1])
        judge.close()
