"""Choosing the ids that a draft keeps: those that texts use most, and without which nothing works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from localspec.errors import InvalidOptionError, UnsupportedModelError

__all__ = ["TokenUse", "choose_ids", "count_tokens"]

_CHILD: Final = "from localspec.backend.trim import _child; _child()"
_INDISPENSABLE: Final = (2, 3, 6)  # llama.cpp's types of tokens: unknown, control, byte


@dataclass(frozen=True, slots=True)
class TokenUse:
    """What texts make of a vocabulary.

    Attributes:
        rankings: for each group of texts, the ids in it, the most frequent first, lower ids first among equals.
        ending: the ids that end a generation.
    """

    rankings: tuple[tuple[int, ...], ...]
    ending: tuple[int, ...]


def count_tokens(model: Path, groups: Sequence[Sequence[str]]) -> TokenUse:
    """Count the tokens of texts, by the tokenizer of ``model``.

    In a process of its own: loading llama.cpp would keep this one from using another backend.

    Args:
        model: a whole model file.
        groups: texts that are ranked together.

    Raises:
        UnsupportedModelError: llama.cpp cannot load the model.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(model)],
        env=environment,
        input=json.dumps([list(texts) for texts in groups]),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode:
        lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
        reason = lines[-1].split(": ", 1)[-1] if lines else f"exit code {child.returncode}"
        raise UnsupportedModelError(f"the tokens of {model} cannot be counted: {reason[:300]}")
    found = json.loads(child.stdout)
    return TokenUse(tuple(map(tuple, found["rankings"])), tuple(found["ending"]))


def choose_ids(
    use: TokenUse, *, keep: int, vocabulary_size: int, token_types: Sequence[float] = ()
) -> NDArray[np.int64]:
    """Return ``keep`` ids, ascending.

    First come control tokens, ends of generation, and bytes that stand for what has no token; then what the texts
    use, group by group, the most frequent first; then the lowest ids, which tokenizers learned first.

    Args:
        use: of the texts.
        keep: how many.
        vocabulary_size: V.
        token_types: llama.cpp's type of each id, [V], or nothing.

    Raises:
        InvalidOptionError: so many cannot be kept.

    >>> choose_ids(TokenUse(((7, 5), (5, 4)), (9,)), keep=5, vocabulary_size=10).tolist()
    [0, 4, 5, 7, 9]
    """
    always = [token for token, kind in enumerate(token_types) if kind in _INDISPENSABLE]
    chosen = dict.fromkeys([*always, *use.ending])
    if not len(chosen) < keep < vocabulary_size:
        raise InvalidOptionError(
            f"{keep:,} of {vocabulary_size:,} ids cannot be kept; use a number between {len(chosen):,}, which control"
            f" tokens and the like take, and {vocabulary_size:,}: 32768 is a good start"
        )
    for token in chain(*use.rankings, range(vocabulary_size)):
        if len(chosen) == keep:
            break
        chosen[token] = None
    return np.array(sorted(chosen), dtype=np.int64)


def _ranking(tokens: Iterable[int]) -> list[int]:
    return [token for token, _ in sorted(Counter(tokens).items(), key=lambda entry: (-entry[1], entry[0]))]


def _child() -> None:
    """What the process of its own does."""
    from localspec.backend.llamacpp import LlamaModel
    from localspec.errors import LocalspecError

    try:
        model = LlamaModel(Path(sys.argv[1]))  # its vocabulary lives as long as it does
        vocabulary = model.vocabulary
        groups = json.load(sys.stdin)
        rankings = [_ranking(chain.from_iterable(vocabulary.tokenize(text) for text in texts)) for texts in groups]
    except LocalspecError as error:
        sys.exit(f"error: {error}")
    ending = [token for token in range(vocabulary.size) if vocabulary.ends_generation(token)]
    json.dump({"rankings": rankings, "ending": ending}, sys.stdout)
