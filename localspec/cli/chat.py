"""``localspec chat``: a conversation, line by line."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli.options import generation_options, model_options, sampling_options, sampling_params
from localspec.cli.running import open_session, status_line
from localspec.errors import PromptError

__all__ = ["chat"]


@click.command()
@model_options
@sampling_options
@generation_options
@click.option("--system", metavar="TEXT", help="System text at the head of the conversation.")
@click.option("--stats", is_flag=True, help="Say after each answer what it took.")
def chat(system: str | None, stats: bool, **values: Any) -> None:
    """Talk with a model: each line is a turn, end of input leaves."""
    sampling_params(dict(values))  # what is out of range is said before anything is loaded
    session = open_session(values)
    params = sampling_params(values, session.default_params)
    opening = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, str]] = []
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line})
        try:
            stream = session.stream([*opening, *turns], params, **values)
        except PromptError as error:
            turns.pop()
            click.echo(f"localspec: {error}", err=True)
            continue
        answer: list[str] = []
        try:
            for event in stream:
                answer.append(event.text)
                click.echo(event.text, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo("\n(interrupted)", nl=False, err=True)
        click.echo()
        turns.append({"role": "assistant", "content": "".join(answer)})
        if stats and stream.finished:
            click.echo(status_line(stream.result(), detail=True), err=True)


def _read_line() -> str | None:
    """Return the next line, or None at the end of input or at an interrupt while waiting."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    return line.rstrip("\r\n") if line else None
