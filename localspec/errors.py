"""Every error localspec raises on purpose.

    LocalspecError                  exit code 1
    ├── InvalidOptionError          2  an option or argument is out of range or contradicts another
    ├── ModelError                     something about a model file
    │   ├── ModelNotFoundError         no file, no such name
    │   ├── InvalidModelFileError      not a GGUF file, cut short, damaged
    │   ├── UnsupportedModelError      a sound file that this build or task cannot use
    │   ├── IncompatibleModelsError    target and draft do not share a vocabulary
    │   └── RollbackError              the cache cannot forget tokens, so a draft cannot be taken back
    ├── DownloadError                  a file could not be fetched
    │   └── IntegrityError             it was fetched, and its hash or size is wrong
    ├── StoreError                     the store on disk: full, unwritable, locked
    ├── PromptError                    a prompt, message or template cannot be used
    │   ├── ContextOverflowError       it does not fit the context
    │   └── TemplateError              no chat template, or the template refused the messages
    ├── BackendError                   a native library is missing, of another version, or one too many
    ├── EvaluationError                a model pass failed
    │   ├── OutOfMemoryError           the backend could not allocate
    │   └── InvalidLogitsError         a row of logits no law can be made of
    └── ProfileError                   a calibration profile is missing, damaged or of another machine or file

A message says what was wrong, with which value, and what to do; of a very long value only the beginning. The command
line prints it as one line and leaves with the class's ``exit_code``; 130 is kept for interruption.
"""

from __future__ import annotations

import re
from typing import ClassVar

__all__ = [
    "BackendError",
    "ContextOverflowError",
    "DownloadError",
    "EvaluationError",
    "IncompatibleModelsError",
    "IntegrityError",
    "InvalidLogitsError",
    "InvalidModelFileError",
    "InvalidOptionError",
    "LocalspecError",
    "ModelError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "ProfileError",
    "PromptError",
    "RollbackError",
    "StoreError",
    "TemplateError",
    "UnsupportedModelError",
]


_LONG_WORD = re.compile(r"\S{300,}")
_LONGEST = 3000  # characters of a message


class LocalspecError(Exception):
    """Base of all errors raised on purpose; catching it catches every one of them."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        text = _LONG_WORD.sub(lambda word: f"{word[0][:60]}… ({len(word[0])} characters)", super().__str__())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 500]} … {text[-500:]}"


class InvalidOptionError(LocalspecError, ValueError):
    """An option or argument is out of range, of the wrong kind, or contradicts another."""

    exit_code: ClassVar[int] = 2


class ModelError(LocalspecError):
    """Something about a model file."""


class ModelNotFoundError(ModelError):
    """No file at that path, or no model of that name."""


class InvalidModelFileError(ModelError):
    """The file is not GGUF, is cut short, or is damaged."""


class UnsupportedModelError(ModelError):
    """A sound file that this build of the backend, or this task, cannot use."""


class IncompatibleModelsError(ModelError):
    """Target and draft do not share a vocabulary."""


class RollbackError(ModelError):
    """The model's cache cannot forget tokens, so drafted tokens cannot be taken back."""


class DownloadError(LocalspecError):
    """A file could not be fetched."""


class IntegrityError(DownloadError):
    """A file was fetched and its size or hash is not the expected one."""


class StoreError(LocalspecError):
    """The store on disk cannot be used: full, unwritable or locked."""


class PromptError(LocalspecError):
    """A prompt, message or template cannot be used."""


class ContextOverflowError(PromptError):
    """The prompt does not fit the context."""


class TemplateError(PromptError):
    """There is no chat template, or it refused the messages."""


class BackendError(LocalspecError):
    """A native library that evaluates models is missing, not one that is known here, or one too many."""


class EvaluationError(LocalspecError):
    """A model pass failed."""


class OutOfMemoryError(EvaluationError):
    """The backend could not allocate memory."""


class InvalidLogitsError(EvaluationError):
    """A row of logits that no probability law can be made of: NaN, or nothing finite."""


class ProfileError(LocalspecError):
    """A calibration profile is missing, damaged, or belongs to another machine or file."""
