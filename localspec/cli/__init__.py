"""The ``localspec`` command: one module per subcommand, each imported only when it is used.

Whatever goes wrong inside a command, the user sees one line on stderr and an exit code: 1 it could not be
done, 2 wrong usage or option, 130 interrupted. A command raises what it met; only one
that printed its own account of a failure calls ``ctx.exit(code)``.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import click

from localspec._version import __version__
from localspec.errors import LocalspecError

__all__ = ["Invocation", "is_verbose", "main"]

# name: (where it is, one line for `localspec --help`, which must not import any of them)
_COMMANDS = {
    "generate": ("localspec.cli.generate:generate", "Continue one prompt."),
    "chat": ("localspec.cli.chat:chat", "Talk with a model."),
    "batch": ("localspec.cli.batch:batch", "Answer a file of prompts."),
    "models": ("localspec.cli.models:models", "List, fetch, inspect, trim and remove models."),
    "calibrate": ("localspec.cli.calibrate:calibrate", "Measure a pair on this machine and tune to it."),
    "check": ("localspec.cli.check:check", "Check on this machine that a pair's output is exact."),
    "bench": ("localspec.cli.bench:bench", "Time plain and speculative decoding in turn."),
    "predict": ("localspec.cli.predict:predict", "Predict the speedup from acceptance and cost."),
}


@dataclass(slots=True)
class Invocation:
    """What holds for one run of the program, whichever the command; click hands it around as ``ctx.obj``."""

    verbose: bool = False


def is_verbose() -> bool:
    """Whether -v was given to the command that is running; False outside of commands."""
    context = click.get_current_context(silent=True)
    return context is not None and isinstance(context.obj, Invocation) and context.obj.verbose


def _be_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and isinstance(context.obj, Invocation) and not context.obj.verbose:
        import logging

        context.obj.verbose = True
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("localspec").setLevel(logging.DEBUG)


def _verbose_option() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_be_verbose,
        help="Show diagnostics, and the traceback of an unexpected error.",
    )


def _accept_verbose(command: click.Command) -> None:
    """Let -v stand after the name of a command as well as before it."""
    if not any("-v" in parameter.opts for parameter in command.params):
        command.params.append(_verbose_option())
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            _accept_verbose(subcommand)


class _LazyGroup(click.Group):
    """A group whose commands come from ``_COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        _accept_verbose(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in _COMMANDS.items()])


_program = _LazyGroup(
    name="localspec",
    help="Exact speculative decoding of GGUF models on ordinary CPUs.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
    params=[_verbose_option()],
)
click.version_option(__version__, prog_name="localspec", message="%(prog)s %(version)s")(_program)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on ``arguments`` (those of the process if None); returns the exit code.

    Raises nothing: every error has become one line on stderr.
    """
    _replace_closed_streams()
    _use_utf8()
    invocation = Invocation()
    try:
        code = _run(arguments, invocation)
    except BaseException as error:
        code = _report(error, invocation)
    return _close_stdout() or code


def _run(arguments: Sequence[str] | None, invocation: Invocation) -> int:
    args = None if arguments is None else list(arguments)
    result = _program.main(args, prog_name="localspec", standalone_mode=False, obj=invocation)
    return result if isinstance(result, int) else 0


def _report(error: BaseException, invocation: Invocation) -> int:
    """Say what went wrong in one line; returns the exit code."""
    if isinstance(error, SystemExit):  # click itself leaves so when stdout is a closed pipe
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return 130
    if _is_closed_pipe(error):  # the reader has what it wanted
        return 1
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _tell(error.format_message())
        return 2
    if isinstance(error, LocalspecError):
        _tell_error(str(error))
        return error.exit_code
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see: {context.command_path} --help)" if context else ""
        _tell_error(error.format_message() + hint)
        return error.exit_code
    if isinstance(error, click.Abort):
        _tell_error("the input ended before an answer was given")
        return 1
    return _report_unexpected(error, invocation)


def _report_unexpected(error: BaseException, invocation: Invocation) -> int:
    if invocation.verbose:
        import traceback

        _tell("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, MemoryError):
        _tell_error("not enough memory; a smaller context or a smaller model needs less")
    elif isinstance(error, OSError):
        if not _close_stdout():  # which says so if it was stdout that could not be written
            _tell_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    else:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        hint = "" if invocation.verbose else "; run it again with -v for the traceback"
        _tell_error(f"unexpected {what}{hint}")
    return 1


def _tell_error(message: str) -> None:
    _tell("localspec: error: " + " ".join(message.split()))


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is listening, and the exit code still tells
        click.echo(text, err=True)


def _replace_closed_streams() -> None:
    """Stand in for standard streams the caller closed, as ``2>&-`` does: empty input, output that nobody reads.

    Else the next file opened would get their descriptors, and what llama.cpp prints would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 — for the whole run


def _use_utf8() -> None:
    """Read and write UTF-8 whatever the locale says, and never fail at a character.

    On output, bytes of a file name that are no UTF-8 come out as they went in, and what else cannot be
    encoded comes out escaped; on input, what is no UTF-8 reads as U+FFFD.
    """
    codecs.register_error("localspec", _escape)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "localspec"), (sys.stderr, "localspec")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


def _close_stdout() -> int:
    """Write out what is buffered; returns the exit code if that is not possible, else 0.

    What cannot be written is dropped: the interpreter would try again at shutdown and complain its own way.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except (OSError, ValueError) as error:
        if not _is_closed_pipe(error):
            _tell_error(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}")
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return 1


def _is_closed_pipe(error: BaseException) -> bool:
    if os.name == "nt" and isinstance(error, OSError):  # where it is an invalid argument
        return error.errno in (errno.EPIPE, errno.EINVAL) and not error.filename
    return isinstance(error, BrokenPipeError)
