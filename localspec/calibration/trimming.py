"""Drafts with a cut vocabulary: from texts to a file."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.backend.cut import check_cuttable, open_cut, write_cut
from localspec.backend.gguf import read_numbers
from localspec.backend.identity import file_fingerprint
from localspec.backend.model_header import ModelHeader, read_header
from localspec.backend.trim import choose_ids, count_tokens
from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts
from localspec.errors import InvalidOptionError, ModelError, PromptError
from localspec.locations import cache_dir
from localspec.reading import read_whole
from localspec.registry.partial import check_space, store_errors

__all__ = [
    "TrimmedDraft",
    "check_trim",
    "derived_path",
    "is_whole",
    "library_text",
    "prompt_texts",
    "read_text",
    "trim",
]

_LIBRARY_CHARACTERS = 3_000_000
_LIBRARY_SHARE = 4  # of all ids kept, one in so many at most


@dataclass(frozen=True, slots=True)
class TrimmedDraft:
    """A cut file.

    Attributes:
        path: of it.
        kept: how many ids it has logits for.
        used: how many of them the user's texts use.
        missed: how many ids those texts use that it lacks.
        vocabulary_size: ids before the cut.
    """

    path: Path
    kept: int
    used: int
    missed: int
    vocabulary_size: int


def trim(source: Path, *, keep: int, texts: Sequence[str], described: str) -> TrimmedDraft:
    """Cut the vocabulary of a draft down to what texts like these use; there is one file for each choice of ids.

    Args:
        source: the whole model.
        keep: ids to keep logits for.
        texts: of the user's kind. What they leave room for goes by ``library_text``, then by the lowest ids.
        described: what the texts are, in words.

    Raises:
        InvalidOptionError: ``keep`` is out of range.
        UnsupportedModelError: this model cannot be cut.
        StoreError: the file cannot be written.
    """
    header = check_trim(source, keep)
    use = count_tokens(source, [texts, [library_text()]])
    # Of the library its frequent tokens only: the others are its own names, and the lowest ids do better than those.
    use = replace(use, rankings=(use.rankings[0], use.rankings[1][: keep // _LIBRARY_SHARE]))
    types = read_numbers(header.token_types) if header.token_types else ()
    kept = choose_ids(use, keep=keep, vocabulary_size=header.vocabulary_size, token_types=types)
    name = f"{source.stem}-cut{keep}-{hashlib.sha256(kept.tobytes()).hexdigest()[:8]}.gguf"
    path = derived_path(source, name)
    if not is_whole(path):
        check_space(path.parent, source.stat().st_size)
        write_cut(source, path, kept, text=described)
    own = set(use.rankings[0])
    found = len(own.intersection(kept.tolist()))
    return TrimmedDraft(path, keep, found, len(own) - found, header.vocabulary_size)


def check_trim(source: Path, keep: int) -> ModelHeader:
    """Return the header of a model that may be cut to ``keep`` ids, as far as that can be told in an instant.

    Raises:
        InvalidOptionError: ``keep`` is out of range.
        UnsupportedModelError: this model cannot be cut.
    """
    check_cuttable(source)
    header = read_header(source)
    if not 1 <= keep < header.vocabulary_size:
        raise InvalidOptionError(
            f"{keep:,} of {header.vocabulary_size:,} ids cannot be kept; 32768 is a good start of a large vocabulary"
        )
    return header


def derived_path(source: Path, name: str) -> Path:
    """Return where a file made of ``source`` goes; its directory is there."""
    # Files of one name are not one file.
    path = cache_dir() / "derived" / file_fingerprint(source)[:12] / name
    with store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def is_whole(path: Path) -> bool:
    """Whether a derived file is there, with all that its header tells of; if not, it has to be made again."""
    try:
        open_cut(path)
    except ModelError:
        return False
    return True


def prompt_texts(prompts: Sequence[CalibrationPrompt] | None = None) -> list[str]:
    """Return the texts of prompts, by default the built-in ones."""
    texts: list[str] = []
    for prompt in built_in_prompts() if prompts is None else prompts:
        parts = [prompt.content] if isinstance(prompt.content, str) else [m.content for m in prompt.content]
        texts += parts
    return texts


def library_text() -> str:
    """Return sources of Python's own library: code, and the English of its comments, on every machine."""
    parts: list[str] = []
    room = _LIBRARY_CHARACTERS
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if room <= 0:
            break
        try:
            parts.append(path.read_text(encoding="utf-8")[:room])
        except (OSError, UnicodeDecodeError):
            continue
        room -= len(parts[-1])
    return "\n".join(parts)


def read_text(path: Path) -> str:
    """Return a text of the user's own.

    Raises:
        PromptError: it cannot be read, is not UTF-8, or empty.
    """
    try:
        text = read_whole(path).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise PromptError(f"cannot read the text in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if not text.strip():
        raise PromptError(f"{path} is empty; give a text of the kind that the draft is to write")
    return text
