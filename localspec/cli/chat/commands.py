"""What a line that begins with a slash does."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.cli.options import read_bias, read_draft_temperature
from localspec.cli.running import model_lines
from localspec.conversation import Conversation, load_conversation, save_conversation
from localspec.errors import InvalidOptionError, PromptError
from localspec.policy import MAX_DRAFT_TOKENS
from localspec.sampling import SamplingParams, check_rule
from localspec.text import StopStrings
from localspec.wording import counted

if TYPE_CHECKING:
    from localspec.cli.chat.talk import Settings, Talk
    from localspec.tuning import DrafterName

__all__ = ["COMMANDS", "Command", "arguments_of", "find_command", "load_file"]

_DRAFTERS: dict[str, DrafterName] = {"auto": "auto", "model": "model", "lookup": "lookup"}
_PATTERN = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: ``act`` gets the conversation and what stands after the name."""

    name: str
    usage: str
    summary: str
    act: Callable[[Talk, str], None]


def find_command(line: str) -> Callable[[Talk], None] | None:
    """Return what a line commands; None if it is a message.

    A slash and a word is a command; a path such as /usr/bin, a comment, and what begins with two slashes is not.

    Raises:
        InvalidOptionError: there is no such command.
    """
    match = _PATTERN.fullmatch(line.strip())
    if not match:
        return None
    name = match[1].lower()
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists them;"
        raise InvalidOptionError(
            f"there is no command /{name}; {hint} a message that begins with a slash takes two: //{name}"
        )
    command, argument = COMMANDS[name], (match[2] or "").strip()
    if argument and command.usage == f"/{name}":
        raise InvalidOptionError(
            f"/{name} stands alone, and {_short(argument)!r} follows it; a message that begins with a slash takes"
            f" two: //{name}"
        )
    return lambda talk: command.act(talk, argument)


def arguments_of(name: str) -> Iterable[str]:
    """Return the words that may follow a command, for completion."""
    return {
        "set": [*_setters(), "show"],
        "gamma": ["auto"],
        "draft": ["on", "off", *_DRAFTERS],
        "stats": ["on", "off"],
        "system": ["none"],
    }.get(name, ())


def load_file(name: str) -> Conversation:
    """Read a saved conversation; raises PromptError where that is not possible."""
    path = _path(name)
    try:
        return load_conversation(path)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None


def _path(name: str) -> Path:
    if not name:
        raise InvalidOptionError("name a file, such as talk.json")
    if "\0" in name:
        raise InvalidOptionError(f"{name!r} cannot be the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidOptionError(f"{name}: {error}") from None


def _help(talk: Talk, _argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.summary}" for command in COMMANDS.values()]
    lines += [
        "",
        'Alt-Enter starts a new line, and so does Enter between """ and """.',
        "Ctrl-C stops an answer, Ctrl-D leaves. // begins a message with a slash.",
    ]
    talk.screen.result("\n".join(lines))


def _system(talk: Talk, argument: str) -> None:
    if argument:
        changed = dataclasses.replace(talk.conversation, system="" if argument == "none" else argument)
        changed.ask("Hello").fit(lambda messages: len(talk.session.encode(messages)), talk.session.context, 0)
        talk.conversation = changed
    talk.screen.note(f"System text: {talk.conversation.system or 'none'}")


def _set(talk: Talk, argument: str) -> None:
    setters = _setters()
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if name in ("", "show"):
        talk.screen.result("\n".join(f"{name:<18}  {_shown(talk.settings, name)}" for name in setters))
        return
    if name not in setters:
        raise InvalidOptionError(f"there is no setting {name!r}; there are {', '.join(setters)}")
    if not value.strip():
        raise InvalidOptionError(f"{name} needs a value, such as /set {name} {_shown(talk.settings, name)}")
    setters[name](talk.settings, value.strip())
    talk.screen.note(f"{name} is {_shown(talk.settings, name)}")


def _setters() -> dict[str, Callable[[Settings, str], None]]:
    """Return what sets each setting; sampling options are those that ``SamplingParams`` has."""
    readers: dict[str, Callable[[str], Any]] = {"float": _float, "int": _int, "bool": _switch}
    setters: dict[str, Callable[[Settings, str], None]] = {
        field.name: partial(_set_param, field.name, readers[str(field.type)])
        for field in dataclasses.fields(SamplingParams)
        if str(field.type) in readers
    }

    def optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda text: None if text == "none" else read(text)

    return setters | {
        "penalty_last_n": partial(_set_param, "penalty_last_n", optional(_int)),
        "draft_temperature": partial(
            _assign, "draft_temperature", optional(lambda text: read_draft_temperature(_float(text)))
        ),
        "sampler_order": partial(_set_param, "sampler_order", str),
        "logit_bias": partial(_set_param, "logit_bias", partial(_several, read_bias)),
        "banned": partial(_set_param, "banned", partial(_several, _int)),
        "seed": partial(_assign, "seed", optional(partial(_at_least, 0))),
        "max_tokens": partial(_assign, "max_tokens", optional(partial(_at_least, 1))),
        "rule": partial(_assign, "rule", check_rule),
        "stop": partial(_assign, "stop", _stops),
    }


def _stops(text: str) -> tuple[str, ...]:
    """Read one stop string as it stands, or several in double quotes, written as in JSON."""
    if text == "none":
        return ()
    if not text.startswith('"'):
        return (text,)
    stops: list[str] = []
    rest, decoder = text, json.JSONDecoder()
    while rest:
        try:
            stop, end = decoder.raw_decode(rest)
        except ValueError:
            stop, end = None, 0
        if not isinstance(stop, str):
            raise InvalidOptionError(
                rf'stop is {text}; write one text as it stands, or several in double quotes: /set stop "###" "\n\n"'
            )
        stops.append(stop)
        rest = rest[end:].lstrip(" ,")
    StopStrings(stops)  # checks them
    return tuple(stops)


def _assign(name: str, read: Callable[[str], Any], settings: Settings, value: str) -> None:
    setattr(settings, name, read(value))


def _set_param(name: str, read: Callable[[str], Any], settings: Settings, value: str) -> None:
    settings.params = dataclasses.replace(settings.params, **{name: read(value)})


def _several(read: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    """Read values between commas or spaces."""
    return () if text == "none" else tuple(read(part) for part in text.replace(",", " ").split())


def _shown(settings: Settings, name: str) -> str:
    value = getattr(settings.params, name, None) if hasattr(settings.params, name) else getattr(settings, name)
    if name == "logit_bias":
        value = ", ".join(f"{token}{bias:+g}" for token, bias in value or ())
    elif name == "stop":
        value = " ".join(json.dumps(stop, ensure_ascii=False) for stop in value or ())
    elif isinstance(value, tuple):
        value = ", ".join(map(repr, value))
    return "none" if value in (None, "") else str(value)


def _float(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidOptionError(f"{value!r} is not a number") from None


def _int(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidOptionError(f"{value!r} is not a whole number") from None


def _at_least(least: int, value: str) -> int:
    number = _int(value)
    if number < least:
        raise InvalidOptionError(f"it is {number}; use {least} or more, or none")
    return number


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise InvalidOptionError(f"it is {value!r}; use on or off")
    return value == "on"


def _gamma(talk: Talk, argument: str) -> None:
    settings = talk.settings
    if argument:
        if argument != "auto" and not argument.isdecimal():
            raise InvalidOptionError(f"γ is {argument!r}; use auto, or a number from 0 to {MAX_DRAFT_TOKENS}")
        settings.draft_by(None if argument == "auto" else int(argument), talk.session)
    gamma = settings.gamma
    talk.screen.note("The draft goes as far as it pays" if gamma is None else f"γ is {gamma}")


def _draft(talk: Talk, argument: str) -> None:
    settings = talk.settings
    if argument in _DRAFTERS:
        settings.draft_with(_DRAFTERS[argument], talk.session)
    elif argument:
        wanted = _switch(argument)
        if wanted and not talk.session.can_draft:
            raise InvalidOptionError("no draft model was loaded; start again with --draft, or without --no-draft")
        settings.use_draft = wanted
    drafter = settings.drafter or talk.session.drafter
    talk.screen.note(f"The draft is {f'on: {drafter}' if settings.use_draft else 'off: plain decoding'}")


def _stats(talk: Talk, argument: str) -> None:
    if argument:
        talk.settings.show_stats = _switch(argument)
        talk.screen.note(f"Details after each answer: {argument}")
        return
    totals = talk.totals
    lines = [talk.last or "No answer yet."]
    if totals.answers:
        share = (
            f"{totals.accepted} of {counted(totals.drafted, 'draft')} accepted"
            if totals.drafted
            else "nothing drafted"
        )
        lines.append(
            f"{counted(totals.answers, 'answer')} in all: {counted(totals.tokens, 'token')}, {share},"
            f" {totals.reused_tokens} of {counted(totals.prompt_tokens, 'prompt token')} from the cache"
        )
    talk.screen.result("\n".join(lines))


def _undo(talk: Talk, argument: str) -> None:
    turns = talk.conversation.turns
    if not turns:
        raise InvalidOptionError("there is nothing to undo")
    count = _int(argument) if argument else 1
    if not 1 <= count <= len(turns):
        raise InvalidOptionError(f"{count} turns cannot be taken back; there may be 1 to {len(turns)}")
    for _ in range(count):
        talk.conversation = talk.conversation.undo()
    what = "Taken back" if count == 1 else f"Taken back {count} turns, from this one on"
    talk.screen.note(f"{what}: {_short(turns[-count].user)}")


def _retry(talk: Talk, _argument: str) -> None:
    if not talk.conversation.turns:
        raise InvalidOptionError("there is nothing to retry")
    if talk.settings.params.greedy and not talk.conversation.is_waiting:
        talk.screen.note("The temperature is 0: the answer will be the same, unless a setting changed.")
    talk.retry()


def _clear(talk: Talk, _argument: str) -> None:
    talk.conversation = Conversation(talk.conversation.system)
    talk.screen.note(
        "The conversation begins anew" + (", with the same system text." if talk.conversation.system else ".")
    )


def _save(talk: Talk, argument: str) -> None:
    path = _path(argument)
    save_conversation(talk.conversation, path, model=talk.session.pair.target.model.path.name)
    talk.screen.note(f"Saved {_turns(talk.conversation)} to {path}")


def _load(talk: Talk, argument: str) -> None:
    talk.conversation = load_file(argument)
    talk.screen.note(f"Loaded {_turns(talk.conversation)} from {argument}")


def _tokens(talk: Talk, argument: str) -> None:
    vocabulary = talk.session.vocabulary
    tokens = vocabulary.tokenize(argument)
    pieces = (json.dumps(vocabulary.piece(t).decode(errors="replace"), ensure_ascii=False) for t in tokens)
    listed = "  ".join(f"{token} {piece}" for token, piece in zip(tokens, pieces, strict=True))
    talk.screen.result(counted(len(tokens), "token") + (f": {listed}" if tokens else ""))


def _model(talk: Talk, _argument: str) -> None:
    session = talk.session
    used = len(session.encode(messages)) if (messages := talk.conversation.messages()) else 0
    lines = model_lines(session)
    lines += [str(context.model.path) for context in (session.pair.target, session.pair.draft) if context]
    threads = session.pair.target.threads
    lines.append(
        f"{used} of {counted(session.context, 'token')} of context in use; {counted(threads, 'thread')} per pass"
    )
    talk.screen.result("\n".join(lines))


def _quit(talk: Talk, _argument: str) -> None:
    talk.over = True


def _turns(conversation: Conversation) -> str:
    return counted(len(conversation.turns), "turn")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


_ALIASES = {"exit": "quit", "bye": "quit", "q": "quit"}

COMMANDS = {
    command.name: command
    for command in (
        Command("help", "/help", "list the commands", _help),
        Command("system", "/system [TEXT|none]", "show or change the system text", _system),
        Command("set", "/set [NAME VALUE]", "show or change a setting: /set temperature 0.2", _set),
        Command("gamma", "/gamma [N|auto]", "tokens drafted per step", _gamma),
        Command("draft", "/draft [on|off|HOW]", "speculate, by model, lookup or auto; or decode plainly", _draft),
        Command("stats", "/stats [on|off]", "what the last answer took; on: after each", _stats),
        Command("undo", "/undo [N]", "take back the last message and its answer, or N of them", _undo),
        Command("retry", "/retry", "answer the last message again", _retry),
        Command("clear", "/clear", "begin anew, keep the system text", _clear),
        Command("save", "/save FILE", "write the conversation as JSON", _save),
        Command("load", "/load FILE", "go on with a saved one", _load),
        Command("tokens", "/tokens TEXT", "show how the model cuts a text", _tokens),
        Command("model", "/model", "what is loaded, and how full the context is", _model),
        Command("quit", "/quit", "leave; Ctrl-D does too", _quit),
    )
}
