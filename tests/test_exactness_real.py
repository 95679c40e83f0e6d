"""Greedy speculation says what greedy decoding says, on real models.

Kernels differ with the size of a pass, so logits are equal only up to noise, and where the two likeliest
tokens are closer than that noise either may win. A difference is allowed there and nowhere else: the noise is
measured on the very row, and what follows a difference is checked as well (see tests/replays.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from localspec.backend.cut import write_cut
from localspec.backend.native import NativeContext, NativeModel
from localspec.drafters import Drafter, ModelDrafter
from localspec.engine import Engine
from localspec.generation import Generation, Request
from localspec.lookup import LookupDrafter
from localspec.policy import FixedPolicy, Policy
from localspec.sampling import SamplingParams
from tests.backends import open_model
from tests.replays import NearTie, check_same, read

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0)

CODE = 'def is_prime(n: int) -> bool:\n    """Return whether n is a prime number."""\n'
PROSE = "The lighthouse keeper had not spoken to anyone for three weeks when"
MAX_TOKENS = 40
LIST = "Squares: 1, 4, 9, 16, 25,"
EDIT = """def mean(xs):
    return sum(xs) / len(xs)

def variance(xs):
    m = mean(xs)
    return sum((x - m) ** 2 for x in xs) / (len(xs) - 1)

# The same functions, with the argument renamed from xs to values:
def mean(values):
"""


def run(
    target: NativeContext,
    drafter: Drafter | None,
    prompt: list[int],
    num: int,
    max_tokens: int,
    *,
    policy: Policy | None = None,
) -> Generation:
    ends = target.model.vocabulary.ends_generation
    engine = Engine(target, drafter, ends_generation=ends)
    target.truncate(0, 0)
    if drafter is not None:
        drafter.keep(0, 0)
    generation = engine.start(
        Request(prompt=prompt, params=GREEDY, max_tokens=max_tokens, seed=1, policy=policy or FixedPolicy(num))
    )
    while generation.finish_reason is None:
        engine.step([generation])
    return generation


def drafter_on(draft: NativeContext, target: NativeContext) -> ModelDrafter:
    ends = target.model.vocabulary.ends_generation
    return ModelDrafter(draft, vocabulary_size=target.vocabulary_size, ends_generation=ends)


# --- the default pair ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    target: NativeContext
    draft: NativeContext
    texts: dict[str, list[int]] = field(default_factory=dict)

    def plain(self, text: str) -> list[int]:
        """Return what the target says after ``text``."""
        if text not in self.texts:
            prompt = self.target.model.vocabulary.tokenize(text)
            self.texts[text] = run(self.target, None, prompt, 0, MAX_TOKENS).tokens
        return self.texts[text]


@pytest.fixture(scope="module")
def qwen(qwen_target_path: Path, qwen_draft_path: Path) -> Iterator[Pair]:
    target, draft = (NativeContext(open_model(path), capacity=256) for path in (qwen_target_path, qwen_draft_path))
    yield Pair(target, draft)
    for context in (target, draft):
        context.close()
        context.model.close()


@pytest.mark.parametrize(
    ("num_draft_tokens", "text"),
    [
        pytest.param(number, text, id=f"{number}-{name}")
        for name, text, numbers in (("code", CODE, (1, 4, 8)), ("prose", PROSE, (2, 4)), ("list", LIST, (8,)))
        for number in numbers
    ],
)
def test_greedy_speculation_is_greedy_decoding(qwen: Pair, num_draft_tokens: int, text: str) -> None:
    prompt = qwen.target.model.vocabulary.tokenize(text)
    generation = run(qwen.target, drafter_on(qwen.draft, qwen.target), prompt, num_draft_tokens, MAX_TOKENS)
    check_same(qwen.target, prompt, qwen.plain(text), generation.tokens)
    assert generation.stats.drafted > 0
    assert generation.stats.accepted > 0


@pytest.mark.parametrize("num_copied", [2, 8, 16])
def test_greedy_lookup_is_greedy_decoding(qwen: Pair, num_copied: int) -> None:
    vocabulary = qwen.target.model.vocabulary
    prompt = vocabulary.tokenize(EDIT)
    lookup = LookupDrafter(ends_generation=vocabulary.ends_generation)
    generation = run(qwen.target, lookup, prompt, 0, MAX_TOKENS, policy=FixedPolicy(0, num_copied))
    check_same(qwen.target, prompt, qwen.plain(EDIT), generation.tokens)
    assert generation.stats.accepted > generation.stats.tokens / 4, "most of the answer stands in the prompt"


# --- a model as its own draft -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> NativeModel:
    return open_model(smollm2_path)


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_a_model_accepts_its_own_drafts(smollm2: NativeModel, num_draft_tokens: int) -> None:
    target, draft = (NativeContext(smollm2, capacity=256, threads=1) for _ in range(2))
    for text in (PROSE, LIST):
        prompt = smollm2.vocabulary.tokenize(text)
        plain = run(target, None, prompt, 0, MAX_TOKENS).tokens
        generation = run(target, drafter_on(draft, target), prompt, num_draft_tokens, MAX_TOKENS)
        check_same(target, prompt, plain, generation.tokens)
        stats = generation.stats
        if stats.accepted == stats.drafted:
            continue
        # A draft was rejected, which only a near-tie excuses: find it by walking the steps again.
        for emitted in before_rejections(target, draft, prompt, num_draft_tokens):
            text = [*prompt, *emitted]
            readings = [read(target, text, 1)[0], read(target, text, 1, singly_from=len(prompt) - 1)[0]]
            second = int(np.argsort(readings[0])[-2])
            tie = NearTie.of(len(emitted), second, readings)
            assert tie.excuses, f"a draft was rejected after {len(emitted)} tokens, {tie}"


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_greedy_speculation_with_a_cut_vocabulary(
    smollm2: NativeModel, smollm2_path: Path, tmp_path: Path, num_draft_tokens: int
) -> None:
    """The model drafts for itself, without a third of what it will say: that is rejected, and the text the same."""
    prompts = [smollm2.vocabulary.tokenize(text) for text in (PROSE, LIST, EDIT)]
    target = NativeContext(smollm2, capacity=256, threads=1)
    plain = [run(target, None, prompt, 0, MAX_TOKENS).tokens for prompt in prompts]
    missing = sorted({token for tokens in plain for token in tokens})[::3]
    write_cut(smollm2_path, tmp_path / "cut.gguf", np.setdiff1d(np.arange(16384), missing), text="all but a third")
    draft = NativeContext(open_model(tmp_path / "cut.gguf"), capacity=256, threads=1)
    accepted = rejected = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        generation = run(target, drafter_on(draft, target), prompt, num_draft_tokens, MAX_TOKENS)
        check_same(target, prompt, expected, generation.tokens)
        accepted += generation.stats.accepted
        rejected += generation.stats.drafted - generation.stats.accepted
    assert accepted > 0
    assert rejected > 0


def before_rejections(
    target: NativeContext, draft: NativeContext, prompt: list[int], num_draft_tokens: int
) -> list[list[int]]:
    """Return what had been emitted wherever a drafted token was rejected."""
    engine = Engine(target, drafter_on(draft, target), ends_generation=target.model.vocabulary.ends_generation)
    generation = engine.start(
        Request(prompt=prompt, params=GREEDY, max_tokens=MAX_TOKENS, seed=1, policy=FixedPolicy(num_draft_tokens))
    )
    emitted = []
    while generation.finish_reason is None:
        before, drafted = len(generation.tokens), generation.stats.drafted
        (step,) = engine.step([generation])
        if step.num_accepted < generation.stats.drafted - drafted:
            emitted.append(generation.tokens[: before + step.num_accepted])
    target.truncate(0, 0)
    draft.truncate(0, 0)
    return emitted


@pytest.mark.parametrize("prompt_length", range(55, 64))
def test_a_full_context_ends_as_plain_decoding_does(smollm2: NativeModel, prompt_length: int) -> None:
    """A context of 64, filled to the last token by steps of every size; the longest are of nine tokens."""
    target, draft = (NativeContext(smollm2, capacity=64, threads=1) for _ in range(2))
    text = smollm2.vocabulary.tokenize(" ".join(f"Line {i} names {i * i}." for i in range(40)))
    prompt = text[:prompt_length]
    plain = run(target, None, prompt, 0, 1000)
    assert plain.finish_reason == "context"
    assert len(plain.history) == 64
    for num_draft_tokens in (1, 4, 8):
        generation = run(target, drafter_on(draft, target), prompt, num_draft_tokens, 1000)
        check_same(target, prompt, plain.tokens, generation.tokens)
        if generation.tokens == plain.tokens:
            assert generation.finish_reason == "context"
