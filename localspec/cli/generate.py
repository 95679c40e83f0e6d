"""``localspec generate``: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import generation_options, model_options, sampling_options, sampling_params
from localspec.cli.running import open_session, status_line
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.session import GenerationResult, Session

__all__ = ["generate"]


@click.command()
@click.argument("prompt", required=False)
@model_options
@sampling_options
@generation_options
@click.option("--system", metavar="TEXT", help="System text in front of the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the chat template.")
@click.option("--special", is_flag=True, help="With --raw: let control markers in the prompt be control tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of streaming text.")
@click.option("--stats", is_flag=True, help="Say on stderr what it took.")
def generate(prompt: str | None, system: str | None, as_json: bool, stats: bool, **values: Any) -> None:
    """Continue PROMPT, or what standard input holds, and print the answer.

    The draft proposes tokens and the target checks several in one pass; the answer is distributed as the
    target's alone.
    """
    text = _prompt_text(prompt)
    if system is not None and values["raw"]:
        raise InvalidOptionError("--system needs the chat template; leave out --raw, or put the text into the prompt")
    messages: Any = text if values["raw"] else [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    sampling_params(dict(values))  # what is out of range is said before anything is loaded
    session = open_session(values)
    params = sampling_params(values, session.default_params)
    result = session.generate(messages, params, **values) if as_json else _stream(session, messages, params, values)
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    if stats:
        click.echo(status_line(result, detail=True), err=True)


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidOptionError("there is no prompt; give it as an argument, or on standard input")
    return sys.stdin.read()


def _stream(session: Session, prompt: Any, params: Any, values: dict[str, Any]) -> GenerationResult:
    """Print the answer as it comes; whatever ends it, the line ends too."""
    stream = session.stream(prompt, params, **values)
    written = False
    try:
        for event in stream:
            if event.text:
                click.echo(event.text, nl=False)
                sys.stdout.flush()
                written = True
    finally:
        if written:
            click.echo()
    return stream.result()
