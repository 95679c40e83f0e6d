"""``localspec generate``: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import generation_options, model_options, sampling_options, sampling_params
from localspec.cli.running import detail_line, open_session, say, status_line, why_plain
from localspec.errors import InvalidOptionError, PromptError
from localspec.reading import MAX_FILE_BYTES

if TYPE_CHECKING:
    from localspec.session import Stream

__all__ = ["generate"]


@click.command()
@click.argument("prompt", required=False)
@model_options
@sampling_options
@generation_options
@click.option("--system", metavar="TEXT", help="System text in front of the prompt.")
@click.option(
    "--messages", metavar="FILE", help="Answer the conversation in FILE, a JSON list of messages; - is stdin."
)
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the chat template.")
@click.option("--special", is_flag=True, help="With --raw: let control markers in the prompt be control tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of streaming text.")
@click.option("--json-stream", is_flag=True, help="Print a line of JSON for each token, and one when done.")
@click.option("--stats", is_flag=True, help="Say on stderr what it took.")
def generate(
    prompt: str | None,
    system: str | None,
    messages: str | None,
    as_json: bool,
    json_stream: bool,
    stats: bool,
    **values: Any,
) -> None:
    """Continue PROMPT, or what standard input holds, and print the answer.

    The draft proposes tokens and the target checks several in one pass; the answer is distributed as the
    target's alone.
    """
    if as_json and json_stream:
        raise InvalidOptionError("--json and --json-stream exclude each other; give one of them")
    text = _prompt(prompt, system, messages, raw=values["raw"])
    sampling_params(dict(values))  # what is out of range is said before anything is loaded
    with open_session(values) as session:
        stream = session.stream(text, sampling_params(values, session.default_params), **values)
        if as_json:
            for _event in stream:
                pass
            _print_json(stream.result().to_dict())
        elif json_stream:
            _print_events(stream)
        else:
            _print_text(stream)
        if stats:
            why = why_plain(session, stream.policy, stream.stats.steps)
            status = status_line(stream.stats, num_draft_tokens=values["num_draft_tokens"], why=why)
            say(f"{status}\n{detail_line(stream.stats, stream.seed)}")


def _prompt(prompt: str | None, system: str | None, messages: str | None, *, raw: bool) -> Any:
    """Return what ``Session.stream`` takes: a raw text, or messages."""
    from localspec.text import Message

    if raw and (system is not None or messages is not None):
        name = "--system" if messages is None else "--messages"
        raise InvalidOptionError(f"{name} needs the chat template; leave out --raw, or put the text into the prompt")
    if messages is None:
        text = _prompt_text(prompt)
        if not (text if raw else text.strip()):
            raise PromptError("the prompt is empty; give it as an argument or on standard input")
        if raw:
            return text
        conversation = [Message("user", text)]
    elif prompt is not None:
        raise InvalidOptionError("both a prompt and --messages are given; make the prompt the last of the messages")
    else:
        conversation = _read(messages)
    if system is not None:
        if any(message.role == "system" for message in conversation):
            raise InvalidOptionError("--messages brings a system text; leave out --system")
        conversation.insert(0, Message("system", system))
    return conversation


def _read(name: str) -> list[Any]:
    from localspec.conversation import read_messages

    try:
        return read_messages(None, _standard_input()) if name == "-" else read_messages(Path(name))
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror or error}") from None


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        raise InvalidOptionError("there is no prompt; give it as an argument, or on standard input")
    return _standard_input()


def _standard_input() -> str:
    text = sys.stdin.read(MAX_FILE_BYTES) if sys.stdin is not None else ""
    if len(text) == MAX_FILE_BYTES:
        raise PromptError(f"standard input holds more than {MAX_FILE_BYTES >> 20} MiB, more than any context does")
    return text


def _print_text(stream: Stream) -> None:
    """Print the answer as it comes; whatever ends it, the line ends too."""
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


def _print_events(stream: Stream) -> None:
    """Print each token as a line of JSON, and the result as the last line."""
    for event in stream:
        _print_json({"event": "token", "token": event.token, "text": event.text, "drafted": event.drafted})
    _print_json({"event": "done", **stream.result().to_dict()})


def _print_json(values: dict[str, Any]) -> None:
    click.echo(json.dumps(values, ensure_ascii=False))
    sys.stdout.flush()
