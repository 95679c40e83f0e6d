"""The entry point: what a user sees, and which exit code, when a command ends in any of the ways it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import IO

import click
import pytest

from localspec import __version__, cli, errors

ROOT = Path(__file__).resolve().parents[2]
DEV_FULL = Path("/dev/full")

# A program whose command ``act`` does what its first argument says.
ACTING = """
import sys, time, types, click, localspec.cli as cli
body = sys.argv.pop(1)
module = types.ModuleType("acting")
module.act = click.Command("act", callback=lambda text: exec(body), params=[click.Argument(["text"])])
sys.modules["acting"] = module
cli._COMMANDS["act"] = ("acting:act", "")
sys.exit(cli.main())
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Puts a command ``act`` in the table that does what it is told."""

    def install(action: Callable[[], object]) -> None:
        module = types.ModuleType("localspec_test_command")
        module.act = click.Command("act", callback=action)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli._COMMANDS, "act", (f"{module.__name__}:act", "Act."))

    return install


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


def start(*arguments: str | bytes, stdout: int | IO[bytes] = subprocess.PIPE, **env: str) -> subprocess.Popen[bytes]:
    """Python in a process of its own, buffered as a user's is."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | env
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen([sys.executable, *arguments], env=env, stdout=stdout, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


def all_errors(base=errors.LocalspecError):
    return [base, *(found for child in base.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors())
def test_each_error_is_one_line_and_its_exit_code(kind, command, capsys):
    command(raising(kind("the file 'a b.gguf'\n  is cut short:\nfetch it again")))
    assert cli.main(["act"]) == kind.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "localspec: error: the file 'a b.gguf' is cut short: fetch it again\n")


def test_what_a_command_does_decides_the_code(command, capsys):
    command(lambda: click.echo("done"))
    assert cli.main(["act"]) == 0
    command(lambda: click.get_current_context().exit(3))
    assert cli.main(["act"]) == 3
    assert capsys.readouterr() == ("done\n", "")


@pytest.mark.parametrize("arguments", [["frob"], ["--frob"], ["act", "--frob"], ["act", "surplus"]])
def test_wrong_usage_is_one_line_and_2(arguments, command, capsys):
    command(lambda: None)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("localspec: error: ")
    assert err.count("\n") == 1
    assert "--help" in err


def test_a_bad_parameter_is_one_line_and_2(command, capsys):
    command(raising(click.BadParameter("must be at least 0", param_hint="--gamma")))
    assert cli.main(["act"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("localspec: error: Invalid value for --gamma: must be at least 0")


def test_nothing_asked_shows_the_help_and_2(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: localspec")


def test_interruption_is_130_without_a_word(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["act"]) == 130
    assert capsys.readouterr() == ("", "\n")  # a new line after the terminal's ^C


def test_input_that_ends_at_a_question(command, capsys):
    command(raising(EOFError()))
    assert cli.main(["act"]) == 1
    assert "localspec: error: the input ended" in capsys.readouterr().err


def test_an_unexpected_error_names_itself_and_v_shows_where(command, capsys):
    command(raising(KeyError("gamma")))
    assert cli.main(["act"]) == 1
    assert capsys.readouterr().err == (
        "localspec: error: unexpected KeyError: 'gamma'; run it again with -v for the traceback\n"
    )
    for arguments in (["-v", "act"], ["act", "-v"]):
        assert cli.main(arguments) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert err.endswith("localspec: error: unexpected KeyError: 'gamma'\n")


def test_memory_and_operating_system_errors_are_one_line(command, capsys):
    command(raising(MemoryError()))
    assert cli.main(["act"]) == 1
    assert capsys.readouterr().err.startswith("localspec: error: not enough memory")
    command(raising(PermissionError(13, "Permission denied", "/etc/shadow")))
    assert cli.main(["act"]) == 1
    assert capsys.readouterr().err == "localspec: error: Permission denied: /etc/shadow\n"


def test_verbosity_is_known_inside_commands_only_and_does_not_last(command):
    seen: list[bool] = []
    command(lambda: seen.append(cli.is_verbose()))
    for arguments in (["-v", "act"], ["act", "--verbose"], ["act"]):
        cli.main(arguments)
    assert seen == [True, True, False]
    assert cli.is_verbose() is False


def test_verbose_reaches_nested_commands(command, monkeypatch):
    seen: list[bool] = []
    inner = click.Command("inner", callback=lambda: seen.append(cli.is_verbose()))
    command(lambda: None)
    sys.modules["localspec_test_command"].act = click.Group("act", commands=[inner])
    assert cli.main(["act", "inner", "-v"]) == 0
    assert seen == [True]


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_every_row_of_the_table_leads_to_a_command(name):
    found = cli._program.get_command(click.Context(cli._program), name)
    assert isinstance(found, click.Command)


def test_help_loads_nothing_heavy():
    code = """
import sys
from localspec.cli import main
code = main(["--help"])
loaded = {name.split(".")[0] for name in sys.modules}
heavy = loaded & {"numpy", "llama_cpp", "tqdm", "huggingface_hub", "jinja2", "logging", "asyncio"}
heavy |= {name for name in sys.modules if name.startswith("localspec.cli.")}
sys.exit(f"loaded: {heavy}" if heavy else code)
"""
    code, out, err = finish(start("-c", code))
    assert (code, err) == (0, b"")
    for name in cli._COMMANDS:
        assert f"  {name} " in out.decode()


def test_version_and_module_entry():
    expected = f"localspec {__version__}{os.linesep}".encode()
    assert finish(start("-m", "localspec", "--version")) == (0, expected, b"")


def test_a_reader_that_left_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    child = start("-m", "localspec", "--help", stdout=write_end)
    os.close(write_end)
    assert finish(child) == (1, None, b"")


@pytest.mark.skipif(not DEV_FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("body", ["print(text)", "print(text, flush=True)", "click.echo(text)"])
def test_a_full_disk_is_one_line(body):
    with DEV_FULL.open("wb") as full:
        child = start("-c", ACTING, body, "act", "something", stdout=full)
    expected = b"localspec: error: cannot write to standard output: No space left on device\n"
    assert finish(child) == (1, None, expected)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("--help >&-", 0), ("--help 2>&-", 0), ("--help >&- 2>&- <&-", 0), ("frob 2>&-", 2)],
)
def test_closed_streams_are_no_reason_to_crash(arguments, code):
    shell = f'PYTHONPATH="{ROOT}" "{sys.executable}" -m localspec {arguments}'
    done = subprocess.run(shell, shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
def test_closed_streams_can_be_used_and_leave_their_descriptors_to_no_file(tmp_path):
    body = (
        "sys.stdin.read(); print(text); sys.stdout.flush(); sys.stderr.isatty(); "
        "sys.exit(3 if open(text, 'w').fileno() > 2 else 1)"
    )
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", ACTING, body, "act"]
    done = subprocess.run([*closed, tmp_path / "file"], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 3


@pytest.mark.skipif(os.name == "nt", reason="arguments are bytes on POSIX only")
def test_any_text_passes_through_in_any_locale():
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    for text in ("gén😀".encode(), b"caf\xe9"):
        body = "click.echo(text); raise cli.LocalspecError(text)"
        code, out, err = finish(start("-c", ACTING, body, "act", text, **ascii_only))
        assert (code, out, err) == (1, text + b"\n", b"localspec: error: " + text + b"\n")


def test_text_that_no_encoding_can_say_comes_out_escaped():
    body = "click.echo(chr(0xD800) + chr(0xE9))"
    code, out, err = finish(start("-c", ACTING, body, "act", ""))
    assert (code, out.strip(), err) == (0, "\\ud800é".encode(), b"")


@pytest.mark.skipif(os.name == "nt", reason="signals are sent differently there")
def test_a_real_interrupt_leaves_with_130_and_no_traceback():
    child = start("-c", ACTING, "print('ready', flush=True); time.sleep(60)", "act", "")
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert finish(child) == (130, b"", b"\n")


@pytest.mark.parametrize("name", ["generate", "chat"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--gamma", "-1", "draft tokens is -1"),
        ("--gamma", "65", "draft tokens is 65"),
        ("--max-tokens", "0", "max_tokens is 0"),
        ("--rule", "none", "'none'"),
        ("--policy", "none", "'none'"),
        ("--stop", "", "stop string ''"),
        ("--draft-temperature", "nan", "draft_temperature is nan"),
    ],
)
def test_options_out_of_range_are_refused_before_any_model_is_sought(name, option, value, said, capsys):
    assert cli.main([name, "--target", "/no/such.gguf", option, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("arguments", [[""], ["  "], ["--raw", ""]])
def test_an_empty_prompt_is_refused_before_any_model_is_sought(arguments, capsys):
    assert cli.main(["generate", "--target", "/no/such.gguf", *arguments]) == 1
    assert capsys.readouterr().err.startswith("localspec: error: the prompt is empty")
