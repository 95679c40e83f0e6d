"""From options to a running session, and from a result to a line about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from localspec.cli import is_verbose

if TYPE_CHECKING:
    from localspec.session import GenerationResult, Session

__all__ = ["open_session", "status_line"]


def open_session(values: dict[str, Any], *, use_profile: bool = True) -> Session:
    """Take the model options out of ``values`` and load what they name, with a note on stderr meanwhile."""
    from localspec.backend.llamacpp import show_native_log
    from localspec.session import load_pair

    show_native_log(is_verbose())
    use_draft = not values.pop("no_draft")
    names = {name: values.pop(name) for name in ("pair", "target", "draft", "context", "threads", "template")}
    with _note("loading the models ..."):
        session = load_pair(**names, use_draft=use_draft, use_profile=use_profile, progress=True)
    if use_profile and session.pair.draft is not None and session.pair.profile.profile is None:
        click.echo(f"localspec: {session.pair.profile.problem}; until then costs are measured roughly", err=True)
    return session


def status_line(result: GenerationResult, *, detail: bool = False) -> str:
    """Return one line about a finished generation."""
    stats = result.stats
    parts = [f"{stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s"]
    if stats.drafted:
        parts.append(
            f"{stats.tokens_per_step:.2f} per target pass, {stats.accepted} of {stats.drafted} drafts accepted"
        )
    if detail:
        parts.append(
            f"prompt {stats.prompt_tokens} tokens ({stats.reused_tokens} from the cache) in {stats.prefill_s:.2f} s"
        )
        parts.append(f"draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, sampling {stats.sampling_s:.3f} s")
        parts.append(f"seed {result.seed}")
    if result.finish_reason == "context":
        parts.append("the context is full")
    return "; ".join(parts)


@contextmanager
def _note(text: str) -> Iterator[None]:
    """Show a text on a terminal's stderr while a block runs, and take it away again."""
    shown = sys.stderr.isatty()
    if shown:
        click.echo(text, nl=False, err=True)
    try:
        yield
    finally:
        if shown:
            click.echo("\r" + " " * len(text) + "\r", nl=False, err=True)
