"""Drafts made of other drafts: another quantisation, a smaller vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.calibration.trimming import TrimmedDraft

__all__ = ["BUILT_IN_TEXT", "derive", "describe", "register", "transcripts"]

_ANSWER_TOKENS = 96

BUILT_IN_TEXT = "calibration"
"""What names the built-in text where a file of the user's own could stand."""


def derive(source: Path, recipe: str, *, threads: int | None, prompts: str | None = None) -> Path:
    """Make a draft by a recipe such as "Q4_0", "cut:32768" or "Q4_0+cut:32768", beside the profiles.

    Args:
        source: of what.
        recipe: steps, the first one first.
        threads: for quantising.
        prompts: the user's prompts, which a cut keeps the tokens of; by default the built-in ones.
    """
    for step in recipe.split("+"):
        kind, _, size = step.strip().upper().partition(":")
        source = _cut(source, step.strip(), size, prompts) if kind == "CUT" else _quantized(source, kind, threads)
    return source


def _quantized(source: Path, type_name: str, threads: int | None) -> Path:
    from localspec.backend.quantize import quantize
    from localspec.calibration.trimming import derived_path, is_whole

    path = derived_path(source, f"{source.stem}-{type_name}.gguf")
    if not is_whole(path):
        click.echo(f"making {type_name} of {source.name}", err=True)
        quantize(source, path, type_name, threads=threads)
    return path


def _cut(source: Path, step: str, size: str, prompts: str | None) -> Path:
    from localspec.calibration.prompts import read_prompts
    from localspec.calibration.trimming import prompt_texts, trim

    if not size.isdecimal():
        raise InvalidOptionError(f"{step!r} cuts to no number of ids; use one such as cut:32768")
    texts = prompt_texts(read_prompts(Path(prompts)) if prompts else None)
    click.echo(f"cutting the vocabulary of {source.name} to {int(size):,} ids", err=True)
    return trim(source, keep=int(size), texts=texts, described=prompts or BUILT_IN_TEXT).path


def describe(trimmed: TrimmedDraft) -> str:
    """Say in one line what became of a vocabulary."""
    whole = trimmed.used + trimmed.missed
    lacking = f"; {trimmed.missed:,} did not fit: keep more of them" if trimmed.missed else ""
    return (
        f"logits for {trimmed.kept:,} of {trimmed.vocabulary_size:,} ids, among them {trimmed.used:,} of the"
        f" {whole:,} that the text uses{lacking}"
    )


def register(name: str, path: Path) -> Path:
    """Give a file a name that ``Registry.check_new`` lets pass in the user's models.toml, with its hash.

    Returns where that is.
    """
    import hashlib

    from localspec.registry import config_dir, load
    from localspec.registry.partial import store_errors, write_atomically

    file = config_dir() / "models.toml"
    with store_errors(path), path.open("rb") as data:
        sha256 = hashlib.file_digest(data, "sha256").hexdigest()
    with store_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
    entry = f'[models.{_as_toml(name)}]\nsources = [{{ path = {_as_toml(str(path))} }}]\nsha256 = "{sha256}"\n'
    write_atomically(file, f"{before.rstrip()}\n\n{entry}".lstrip())
    try:
        load()
    except InvalidOptionError:
        write_atomically(file, before)
        raise
    return file


def _as_toml(text: str) -> str:
    """Return a TOML string: JSON's, but for the escapes of what is beyond 16 bits, and for DEL."""
    import json

    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidOptionError(
            f"{text!r} is not UTF-8, so that models.toml cannot name it; name the file itself as --draft"
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def transcripts(target: str) -> list[str]:
    """Return what a model answers to the built-in prompts, a few lines each."""
    from localspec.calibration.prompts import built_in_prompts, take_turns
    from localspec.cli.running import progress_bar
    from localspec.session import load_pair

    prompts = take_turns(built_in_prompts())
    texts: list[str] = []
    with load_pair(target=target, use_draft=False, drafter="model", progress=True) as session, progress_bar() as show:
        for number, prompt in enumerate(prompts):
            show("answers", number / len(prompts))
            texts.append(session.generate(prompt.content, max_tokens=_ANSWER_TOKENS, seed=number).text)
    return texts
