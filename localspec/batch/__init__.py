"""Batches: prompts in a JSONL file, answers in another, resumable at any moment.

>>> from localspec import load_pair
>>> from localspec.batch import BatchSettings, FileOutput, LocalPool, PromptFile, RowDefaults, run_batch
>>> with (                                                                 # doctest: +SKIP
...     PromptFile.opened("prompts.jsonl") as prompts,
...     FileOutput.opened(Path("answers.jsonl")) as output,
...     load_pair() as session,
... ):
...     settings = BatchSettings(rows=RowDefaults(params=session.default_params))
...     run_batch(prompts, output, LocalPool(session), settings)
"""

from __future__ import annotations

from localspec.batch.answers import AnswerFormat
from localspec.batch.output import FileOutput, Output, StreamOutput, files_beside
from localspec.batch.pool import LocalPool, Pool
from localspec.batch.prompts import PromptFile
from localspec.batch.rows import RowDefaults
from localspec.batch.runner import BatchSettings, run_batch
from localspec.batch.summary import Summary, Tally

__all__ = [
    "AnswerFormat",
    "BatchSettings",
    "FileOutput",
    "LocalPool",
    "Output",
    "Pool",
    "PromptFile",
    "RowDefaults",
    "StreamOutput",
    "Summary",
    "Tally",
    "files_beside",
    "run_batch",
]
