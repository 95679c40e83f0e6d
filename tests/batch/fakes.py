"""A pool without models: what it answers is a function of the request, when it answers is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from localspec.batch import BatchSettings, FileOutput, PromptFile, RowDefaults, Summary, run_batch
from localspec.batch.identity import PairFingerprint
from localspec.batching import BatchAnswer, BatchRequest
from localspec.errors import ContextOverflowError
from localspec.generation import Stats
from localspec.sampling import SamplingParams
from localspec.session import GenerationResult

PARAMS = SamplingParams(temperature=0.8, top_k=40)
TOO_LONG = "too long"
"""A prompt with this in it does not fit."""


def expected_text(request: BatchRequest) -> str:
    messages = request.prompt if isinstance(request.prompt, str) else [m.content for m in request.prompt]
    return f"{messages!r} at {request.seed} with {request.params.temperature} ☃"


def answer_of(request: BatchRequest) -> GenerationResult | ContextOverflowError:
    if TOO_LONG in str(request.prompt):
        return ContextOverflowError("the prompt has 9 tokens and the context holds 8; shorten it")
    text = expected_text(request)
    tokens = list(text.encode())[: request.max_tokens]
    stats = Stats(prompt_tokens=10, tokens=len(tokens), steps=4, drafted=8, accepted=5, prefill_s=0.5, wall_s=2.0)
    stats.drafted_at, stats.accepted_at = [4, 4], [3, 2]
    return GenerationResult(text, tokens, "stop", request.seed, stats)


class FakePool:
    """Answers ``parallel`` requests at a time, and finishes them in an order of its own.

    Args:
        parallel: how many are at work at once.
        order: seed of the order; None finishes the oldest first.
        slow: ids that wait until nothing else is left.
        pause_s: taken by each answer.
        on_answer: called before each answer is handed out.
    """

    models = PairFingerprint("target", "draft", "a library")
    model_name = "fake"
    default_params = PARAMS

    def __init__(
        self,
        parallel: int = 4,
        *,
        order: int | None = 1,
        slow: Iterable[str] = (),
        pause_s: float = 0.0,
        on_answer: Callable[[BatchAnswer], None] = lambda answer: None,
    ) -> None:
        self.parallel = parallel
        self._random = None if order is None else random.Random(order)
        self._slow = set(slow)
        self._pause_s = pause_s
        self._on_answer = on_answer
        self.answered: list[str] = []
        self.sampled: list[str] = []
        self.most_ahead = 0

    def answers(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer]:
        waiting = iter(requests)
        running: list[tuple[int, BatchRequest]] = []
        number = 0
        while True:
            for request in waiting:
                running.append((number, request))
                number += 1
                if len(running) == self.parallel:
                    break
            if not running:
                return
            ready = [i for i, (_, request) in enumerate(running) if request.id not in self._slow] or [0]
            index, request = running.pop(self._random.choice(ready) if self._random else ready[0])
            if self._pause_s:
                time.sleep(self._pause_s)
            found = answer_of(request)
            is_error = isinstance(found, ContextOverflowError)
            answer = BatchAnswer(request, index, None if is_error else found, found if is_error else None)
            self._on_answer(answer)
            self.answered.append(request.id)
            yield answer

    def plain(self, requests: Sequence[BatchRequest]) -> list[Stats]:
        self.sampled += [request.id for request in requests]
        counts = [request.max_tokens for request in requests]
        return [Stats(prompt_tokens=10, tokens=n, steps=n, prefill_s=1.0, wall_s=2.0 * (n - 1)) for n in counts]


def settings(**changes: object) -> BatchSettings:
    """Settings whose changes may be those of rows as well."""
    rows = {name: changes.pop(name) for name in list(changes) if name in RowDefaults.__dataclass_fields__}
    return BatchSettings(rows=RowDefaults(**{"params": PARAMS, **rows}), **{"seed": 7, **changes})


def run(prompts: Path, output: Path | object, pool: FakePool | None = None, **options: object) -> Summary:
    """Run a batch as the command does; ``options`` are of ``FileOutput.opened``, ``run_batch`` and settings."""
    of_file = {name: options.pop(name) for name in ("ordered", "restart", "retry_errors") if name in options}
    of_run = {name: options.pop(name) for name in ("max_errors", "watch") if name in options}
    file = FileOutput.opened(output, **of_file) if isinstance(output, Path) else nullcontext(output)
    with PromptFile.opened(str(prompts)) as opened, file as target:
        return run_batch(opened, target, pool or FakePool(), settings(**options), **of_run)
