"""A session whose models write what a test wants written, with a real vocabulary around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.backend import Span
from localspec.backend.vocabulary import Vocabulary
from localspec.sampling import LLAMACPP_DEFAULTS
from localspec.session import Session
from localspec.tuning import ProfileLookup

PROMPT = "x"


class ScriptedContext:
    """A ``Context`` that is sure of every token: those of ``script`` after the prompt, then the end."""

    num_sequences = 1
    chunk = 128
    capacity = 4096
    kept_ids = None

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], script: Sequence[int], end: int) -> None:
        self.vocabulary_size = vocabulary.size
        self.model = SimpleNamespace(vocabulary=vocabulary, path=Path("scripted.gguf"))
        self._first = len(prompt)
        self._script = [*script, end]
        self._held = 0

    def length(self, sequence: int) -> int:
        return self._held

    def truncate(self, sequence: int, length: int) -> None:
        self._held = min(self._held, length)

    def decode(self, batch: Sequence[Span]) -> NDArray[np.float32]:
        (span,) = batch
        self._held += len(span.tokens)
        rows = np.zeros((span.rows, self.vocabulary_size), np.float32)
        for i, row in enumerate(rows):
            at = self._held - span.rows + i + 1 - self._first
            row[self._script[min(max(at, 0), len(self._script) - 1)]] = 30.0
        return rows


def scripted_session(
    vocabulary: Vocabulary, end: int, script: Sequence[int], *, wrong_at: Sequence[int] = (), **options: Any
) -> Session:
    """Return a session that answers ``PROMPT``, taken raw, with ``script``; its draft errs at ``wrong_at``.

    ``options`` are a session's; ``use_draft=False`` leaves the draft out.
    """
    prompt = [*[vocabulary.bos] * vocabulary.adds_bos, *vocabulary.tokenize(PROMPT)]
    drafted = [token if i not in wrong_at else (token + 1) % vocabulary.size for i, token in enumerate(script)]
    target, draft = (ScriptedContext(vocabulary, prompt, tokens, end) for tokens in (script, drafted))
    pair: Any = SimpleNamespace(
        target=target,
        draft=draft if options.pop("use_draft", True) else None,
        profile=ProfileLookup(None, None),
        default_params=LLAMACPP_DEFAULTS,
    )
    return Session(pair, template=None, **options)
