"""From options to a running session, and from a result to a line about it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from localspec.cli import is_verbose
from localspec.wording import counted

if TYPE_CHECKING:
    from localspec.generation import Stats
    from localspec.policy import Policy
    from localspec.session import Session
    from localspec.tuning import DrafterName

__all__ = [
    "MODEL_OPTIONS",
    "detail_line",
    "model_lines",
    "note",
    "open_session",
    "profile_options",
    "progress_bar",
    "say",
    "status_line",
    "what_runs",
    "why_plain",
]

MODEL_OPTIONS = ("pair", "target", "draft", "context", "threads", "backend", "template")
"""What ``model_options`` adds to a command, apart from ``no_draft``: the arguments of ``load_pair``."""

_PLAIN_STEPS = 3  # the pass that reads the prompt, and two that tell what plain decoding takes


def open_session(values: dict[str, Any], *, use_profile: bool = True, say_profile: bool = True) -> Session:
    """Take the model options out of ``values`` and load what they name, with a note on stderr meanwhile.

    Without a profile of the pair a line on stderr says so, unless ``say_profile`` is False.
    """
    from localspec.backend.binding import show_native_log
    from localspec.session import load_pair

    show_native_log(is_verbose())
    use_draft, drafter = not values.pop("no_draft"), values.pop("drafter", "auto")
    named = profile_options(values)
    names = {name: values.pop(name) for name in MODEL_OPTIONS}
    with note("loading the models ..."):
        session = load_pair(**names, use_draft=use_draft, drafter=drafter, use_profile=use_profile, progress=True)
    if session.pair.draft is None and use_draft and session.drafter == "model":
        say("localspec: this model cannot take tokens back, so nothing is drafted")
    unmeasured = session.pair.draft is not None and session.pair.profile.profile is None
    if say_profile and use_profile and unmeasured and values.get("num_draft_tokens") is None:
        say(f"localspec: {session.pair.profile.problem}{named}; until then costs are measured roughly")
    return session


def say(text: str) -> None:
    """Say something on stderr; an answer is not lost because nobody can hear a remark about it."""
    with suppress(OSError):
        click.echo(text, err=True)


def profile_options(values: dict[str, Any]) -> str:
    """Return the options that decide which profile holds, to stand behind `localspec calibrate` in a hint."""
    names = [(name, values[name]) for name in ("pair", "target", "draft", "threads", "backend")]
    names = [(name, value) for name, value in names if value and value != "auto"]
    return "".join(f" --{name} {shlex.quote(str(value))}" for name, value in names)


def model_lines(session: Session) -> list[str]:
    """Return what is loaded, and what drafts."""
    pair = session.pair
    lines = [f"Target {pair.target.model.path.stem}, {counted(pair.target.capacity, 'token')} of context"]
    if pair.draft is not None:
        lines.append(f"Draft  {pair.draft.model.path.stem}")
    elif session.can_draft:
        lines.append("Draft  none: by lookup of what followed the same words before")
    return lines


def what_runs(session: Session) -> dict[str, str]:
    """Return the files of target and draft, and the library with its build: what a report is about."""
    pair = session.pair
    draft = {} if pair.draft is None else {"draft": pair.draft.model.path.name}
    return {"target": pair.target.model.path.name, **draft, "backend": pair.target.model.binding.build()}


def why_plain(session: Session, policy: Policy, num_steps: int, *, drafter: DrafterName | None = None) -> str:
    """Return why nothing was drafted for an answer of so many steps, in few words.

    Args:
        session: answered.
        policy: decided.
        num_steps: it took.
        drafter: where drafts were to come from; None is the session's.
    """
    from localspec.adaptive import AdaptivePolicy
    from localspec.policy import FixedPolicy

    if not session.can_draft:
        return "no draft model"
    if isinstance(policy, FixedPolicy) and not (policy.limit or policy.lookup_limit):
        return "γ is 0"
    if session.pair.draft is None or (drafter or session.drafter) == "lookup":
        rests = isinstance(policy, AdaptivePolicy) and policy.lookup_guard.rests
        return "copying lost time and rests" if rests else "nothing worth copying"
    if num_steps > _PLAIN_STEPS or not getattr(policy, "worthwhile", True):
        return policy.why_idle if isinstance(policy, AdaptivePolicy) else ""
    return "too short to try"


def status_line(
    stats: Stats, *, num_draft_tokens: int | None = None, speedup: float | None = None, why: str = ""
) -> str:
    """Return one line about an answer.

    Args:
        stats: what it took.
        num_draft_tokens: γ as set, 0 without a draft; None if it was chosen step by step.
        speedup: over plain decoding, where that was measured.
        why: the reason, if nothing was drafted.
    """
    parts = [f"{counted(stats.tokens, 'token')}, {stats.tokens_per_s:.1f} tokens/s"]
    if stats.drafted:
        per_step = stats.accepted / stats.steps
        parts.append(f"{stats.tokens_per_step:.2f} per step ({per_step:.2f} of them drafted)")
        gamma = f"{stats.drafted / stats.steps:.1f} on average" if num_draft_tokens is None else num_draft_tokens
        parts.append(f"γ {gamma}")
    else:
        parts.append("nothing drafted" + (f" ({why})" if why else ""))
    if speedup is not None:
        parts.append(f"{speedup:.2f}× plain")
    return "; ".join(parts)


def detail_line(stats: Stats, seed: int) -> str:
    """Return where the time went."""
    drafts = f"{stats.accepted} of {counted(stats.drafted, 'draft')} accepted; " if stats.drafted else ""
    return (
        f"{drafts}prompt {counted(stats.prompt_tokens, 'token')} ({stats.reused_tokens} from the cache),"
        f" {stats.prefill_s:.2f} s;"
        f" draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, sampling {stats.sampling_s:.3f} s; seed {seed}"
    )


@contextmanager
def note(text: str) -> Iterator[None]:
    """Show a text on a terminal's stderr while a block runs, and take it away again."""
    shown = sys.stderr.isatty()
    if shown:
        click.echo(text, nl=False, err=True)
    try:
        yield
    finally:
        if shown:
            click.echo("\r" + " " * len(text) + "\r", nl=False, err=True)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Give a function that shows a phase and the share of the whole that is done, on a terminal's stderr."""
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    layout = "{desc:<10} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, leave=False, bar_format=layout, disable=not on_terminal) as bar:

        def report(phase: str, share: float) -> None:
            if on_terminal:
                bar.set_description_str(phase, refresh=False)
                bar.update(max(0.0, share - bar.n))

        yield report
