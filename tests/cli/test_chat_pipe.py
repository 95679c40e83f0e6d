"""``chat`` and ``generate`` in processes of their own, their streams being pipes and files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localspec import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(smollm2_path, tmp_path_factory):
    """Runs localspec on SmolLM2 at temperature 0 and gives exit code, stdout and stderr."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LOCALSPEC_CONFIG_DIR": str(tmp_path_factory.mktemp("config")),
    }
    model = ["--target", str(smollm2_path), "--threads", "1", "-t", "0", "-n", "12", "--ctx", "512"]

    def run(*arguments, stdin=b"", stdout=subprocess.PIPE):
        command = [sys.executable, "-m", "localspec", *arguments, *model]
        done = subprocess.run(
            command, input=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False
        )
        assert b"Traceback" not in done.stderr
        for stream in (done.stdout or b"", done.stderr):
            assert b"\x1b" not in stream
            assert b"\r" not in stream.replace(os.linesep.encode(), b"")
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.model
def test_each_line_is_a_turn_and_the_end_of_input_leaves(run):
    code, out, err = run("chat", stdin=b"Hello\n\n/tokens a b\nAgain?\n")
    assert code == 0
    first, tokens, second = out.decode().splitlines()
    assert first
    assert second
    assert tokens.startswith("2 tokens: ")
    assert err.count(b"tokens/s") == 2
    assert run("chat", "--quiet", stdin=b"Hello\n/tokens a b\nAgain?")[::2] == (0, b"")


@pytest.mark.model
@pytest.mark.parametrize("line", ["grüß Gott".encode("latin-1"), b"\xf0\x9f", b"nul \x00 and \xed\xa0\x80"])
def test_input_that_is_no_utf8(run, line):
    code, out, err = run("chat", "--quiet", stdin=line + b"\n/tokens x\n")
    assert (code, err) == (0, b"")
    assert out.count(b"\n") >= 2


@pytest.mark.model
def test_output_to_a_file(run, tmp_path):
    with (tmp_path / "out").open("wb") as file:
        code, _, _ = run("chat", "--show-draft", stdin=b"Hello\n", stdout=file)
    text = (tmp_path / "out").read_bytes()
    assert code == 0
    assert text.endswith(b"\n")
    assert b"\x1b" not in text


@pytest.mark.model
@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    "pipe", ["printf 'a\\nb\\n' | {} chat {} | head -c 1", "{} generate Hello {} | head -c 1", "{} chat {} <&-"]
)
def test_streams_that_are_closed(pipe, smollm2_path):
    program = f'PYTHONPATH="{ROOT}" "{sys.executable}" -m localspec'
    shell = pipe.format(program, f'--target "{smollm2_path}" --threads 1 -t 0 -n 12 --ctx 512')
    done = subprocess.run(shell, shell=True, capture_output=True, check=False, input=b"")
    assert done.returncode == 0, "that of head, or of chat"
    assert b"Traceback" not in done.stderr
    assert b"error" not in done.stderr


@pytest.mark.model
def test_a_refused_message_is_one_line_and_the_next_is_answered(run):
    code, out, err = run("chat", "--quiet", stdin=b"word " * 900 + b"\nHello\n")
    assert code == 0
    assert err.count(b"\n") == 1
    assert b"the context holds 512" in err
    assert out.count(b"\n") >= 1


@pytest.mark.model
def test_a_template_that_cannot_be_used_is_refused_before_the_first_prompt(run, tmp_path):
    template = tmp_path / "refuses.jinja"
    template.write_text("{{ raise_exception('never') }}")
    code, out, err = run("chat", "--template", str(template), stdin=b"Hello\n")
    assert (code, out) == (1, b"")
    assert err == b"localspec: error: the chat template failed: never\n"


@pytest.mark.model
def test_a_model_without_a_template_is_refused(gemma_path):
    command = [sys.executable, "-m", "localspec", "chat", "--target", str(gemma_path), "--ctx", "64"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=b"Hi\n", capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"has no chat template" in done.stderr
    assert b"--template" in done.stderr


@pytest.mark.model
def test_a_conversation_goes_from_chat_to_chat_and_to_generate(run, tmp_path):
    talk = tmp_path / "talk.json"
    code, _, _ = run("chat", "-q", "--system", "You are brief.", stdin=f"Hello\n/save {talk}\n".encode())
    assert code == 0
    code, out, err = run("chat", "-q", "--load", str(talk), stdin=b"/undo\nHello\n")
    assert (code, err) == (0, b"")
    answer = json.loads(talk.read_text("utf-8"))["messages"][-1]["content"]
    assert out.decode() == answer + "\n"
    messages = json.dumps(json.loads(talk.read_text("utf-8"))["messages"][:-1])
    code, out, _ = run("generate", "--messages", "-", "--json", stdin=messages.encode())
    assert (code, json.loads(out)["text"]) == (0, answer)


@pytest.mark.model
def test_events_as_lines_of_json(run):
    code, out, err = run("generate", "Say: 🫠", "--json-stream")
    assert (code, err) == (0, b"")
    *events, done = map(json.loads, out.splitlines())
    assert {event["event"] for event in events} == {"token"}
    assert [event["token"] for event in events] == done["tokens"]
    assert "".join(event["text"] for event in events) == done["text"]
    assert done["event"] == "done"
    assert done["finish_reason"] in ("stop", "length")
    assert {"steps", "tokens_per_s", "prefill_s"} <= done["stats"].keys()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["generate", "x", "--json", "--json-stream"], 2, "exclude each other"),
        (["generate", "x", "--messages", "f"], 2, "make the prompt the last of the messages"),
        (["generate", "--raw", "--messages", "f"], 2, "--messages needs the chat template"),
        (["generate", "--raw", "--system", "s", "x"], 2, "--system needs the chat template"),
        (["generate", "--messages", "no/such/file"], 1, "no/such/file cannot be read"),
        (["generate", " "], 1, "the prompt is empty"),
        (["chat", "--load", "no/such/file"], 1, "no/such/file cannot be read"),
        (["chat", "--load", "f", "--system", "s"], 2, "--load brings its own system text"),
        (["chat", "-t", "-1"], 2, "temperature is -1"),
    ],
)
def test_contradictions_are_found_before_anything_is_loaded(arguments, code, complaint, capsys):
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_messages_with_a_system_text_and_another_one(tmp_path, capsys):
    path = tmp_path / "messages.json"
    path.write_text('[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]')
    assert cli.main(["generate", "--messages", str(path), "--system", "t"]) == 2
    assert "leave out --system" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.skipif(os.name == "nt", reason="a shell's pipe")
def test_chat_ends_when_nobody_reads_on(smollm2_path, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOCALSPEC_CONFIG_DIR": str(tmp_path)}
    chat = f"{sys.executable} -m localspec chat -q -t 0 -n 8 --threads 1 --target {smollm2_path}"
    command = ["bash", "-c", f"printf 'a\\n/tokens x\\n/frob\\n' | {chat} | true; exit ${{PIPESTATUS[1]}}"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
