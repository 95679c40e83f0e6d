"""Drafts made of other drafts: another quantisation, a smaller vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from localspec.calibration.trimming import TrimmedDraft

__all__ = ["BUILT_IN_TEXT", "derive", "describe", "read_recipes", "register", "transcripts"]

_ANSWER_TOKENS = 96

BUILT_IN_TEXT = "calibration"
"""What names the built-in text where a file of the user's own could stand."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a draft of another one.

    Attributes:
        type_names: quantisations, one after the other.
        keep: ids that the vocabulary is cut to in the end; None leaves it whole.
    """

    type_names: tuple[str, ...]
    keep: int | None


def read_recipes(text: str) -> tuple[Recipe, ...]:
    """Read recipes between commas, such as "Q4_0", "cut:32768" and "Q4_0+cut:32768"; each different one once.

    Raises:
        InvalidOptionError: one of them is none.
    """
    return tuple(dict.fromkeys(_read_recipe(part.strip()) for part in text.split(",") if part.strip()))


def _read_recipe(text: str) -> Recipe:
    from localspec.backend.quantize import TYPE_NAMES

    steps = [step.strip().upper() for step in text.split("+")]
    kind, _, size = steps[-1].partition(":")
    keep = None
    if kind == "CUT":
        if not (size.isdecimal() and len(size) < 10):
            raise InvalidOptionError(
                f"--derive has {text!r}, which cuts to no number of ids; use one such as cut:32768"
            )
        keep = int(size)
        del steps[-1]
    for step in steps:
        if step.startswith("CUT"):
            raise InvalidOptionError(
                f"--derive has {text!r}; what is cut can be changed no more: make that the last step"
            )
        if step not in TYPE_NAMES:
            raise InvalidOptionError(
                f"--derive has {text!r}, and there is no quantisation {step!r}; choose from {', '.join(TYPE_NAMES)}"
            )
    return Recipe(tuple(steps), keep)


def derive(source: Path, recipe: Recipe, *, threads: int | None, prompts: str | None = None) -> Path:
    """Make a draft by a recipe, beside the profiles; return ``source`` itself where it is of that type already.

    Args:
        source: of what.
        recipe: how.
        threads: for quantising.
        prompts: the user's prompts, which a cut keeps the tokens of; by default the built-in ones.
    """
    for type_name in recipe.type_names:
        source = _quantized(source, type_name, threads)
    return source if recipe.keep is None else _cut(source, recipe.keep, prompts)


def _quantized(source: Path, type_name: str, threads: int | None) -> Path:
    from localspec.backend.model_header import read_header
    from localspec.backend.quantize import quantize
    from localspec.calibration.trimming import derived_path, is_whole

    if read_header(source).file_type == type_name:
        return source
    path = derived_path(source, f"{source.stem}-{type_name}.gguf")
    if not is_whole(path):
        click.echo(f"making {type_name} of {source.name}", err=True)
        quantize(source, path, type_name, threads=threads)
    return path


def _cut(source: Path, keep: int, prompts: str | None) -> Path:
    from localspec.calibration.prompts import read_prompts
    from localspec.calibration.trimming import prompt_texts, trim

    texts = prompt_texts(read_prompts(Path(prompts)) if prompts else None)
    click.echo(f"cutting the vocabulary of {source.name} to {keep:,} ids", err=True)
    return trim(source, keep=keep, texts=texts, described=prompts or BUILT_IN_TEXT).path


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
