"""``localspec chat``: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli.options import generation_options, model_options, sampling_options, sampling_params
from localspec.cli.running import note, open_session, profile_options
from localspec.errors import InvalidOptionError

__all__ = ["chat"]


@click.command()
@model_options
@sampling_options
@generation_options
@click.option("--system", metavar="TEXT", default="", help="System text at the head of the conversation.")
@click.option("--load", metavar="FILE", help="Go on with a conversation that /save wrote.")
@click.option("--show-draft", is_flag=True, help="Colour the text that the draft proposed.")
@click.option("--stats", is_flag=True, help="Say after each answer what it took, in detail.")
@click.option("--quiet", "-q", is_flag=True, help="Print answers and errors only.")
def chat(system: str, load: str | None, show_draft: bool, stats: bool, quiet: bool, **values: Any) -> None:
    """Talk with a model.

    In a terminal /help lists the commands, Ctrl-C stops an answer and Ctrl-D leaves. From a pipe each line is a
    turn, and the end of input leaves.
    """
    from localspec.cli.chat.commands import load_file
    from localspec.cli.chat.prompt import open_reader
    from localspec.cli.chat.screen import Screen
    from localspec.cli.chat.talk import Interrupts, Settings, Talk, introduction
    from localspec.conversation import Conversation

    if load and system:
        raise InvalidOptionError("--load brings its own system text; leave out --system, or change it with /system")
    sampling_params(dict(values))  # what is out of range is said before anything is loaded
    conversation = load_file(load) if load else Conversation(system)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    screen = Screen(quiet=quiet, show_draft=show_draft)
    named = profile_options(values)
    with open_session(values, say_profile=False) as session:
        settings = Settings(params=sampling_params(values, session.default_params), show_stats=stats)
        talk = Talk(session, settings, screen, conversation, interrupts=Interrupts(interactive))
        with note("getting ready ..."):  # without a profile, a few passes are timed
            settings.take(values, session)
            talk.check()
        if interactive:
            screen.note("\n".join(introduction(session, named)))
        reader = open_reader(interactive)
        talk.run(reader)
