"""Every statement of docs/seeds.md, on models whose law is known."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec.drafters import Drafter, ModelDrafter
from localspec.engine import Engine
from localspec.generation import Request
from localspec.policy import FixedPolicy
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams
from tests import fakes
from tests.fakes import FakeContext, MarkovModel

ROOT = Path(__file__).resolve().parents[1]
END = 11
TARGET = MarkovModel.random(1, 12, spread=1.5, never=[END])
DRAFT = MarkovModel.random(2, 12, spread=1.5, never=[END])
PROMPT = (1, 2, 3, 0, 2, 1, 3)
PLAIN = SamplingParams()
PENALISED = SamplingParams(temperature=0.9, top_k=8, frequency_penalty=0.3, repetition_penalty=1.2, penalty_last_n=9)
NUM_TOKENS = 40

DrafterOf = Callable[[], Drafter | None]


def model_drafter(draft: MarkovModel = DRAFT, num_sequences: int = 1) -> ModelDrafter:
    context = FakeContext(draft, num_sequences=num_sequences)
    return ModelDrafter(context, vocabulary_size=12, ends_generation=lambda token: token == END)


def engine(drafter: Drafter | None = None, num_sequences: int = 1) -> Engine:
    return Engine(
        FakeContext(TARGET, num_sequences=num_sequences), drafter, ends_generation=lambda token: token == END
    )


def request(seed: int, *, gamma: int = 0, prompt: Sequence[int] = PROMPT, **options: Any) -> Request:
    options = {"params": PLAIN, "max_tokens": NUM_TOKENS, "rule": "block", **options}
    return Request(prompt=prompt, seed=seed, policy=FixedPolicy(gamma), **options)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    """Run the requests together, each in a sequence of its own; return their tokens."""
    generations = [engine.start(each, sequence) for sequence, each in enumerate(requests)]
    while running := [g for g in generations if g.finish_reason is None]:
        engine.step(running)
    return [g.tokens for g in generations]


def text(seed: int, drafter: Drafter | None = None, **options: Any) -> list[int]:
    return run(engine(drafter), request(seed, **options))[0]


@functools.cache
def plain(seed: int, rule: str = "coupled", params: SamplingParams = PLAIN) -> list[int]:
    return text(seed, rule=rule, params=params)


# --- for every rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_same_settings_give_the_same_text(rule: str) -> None:
    texts = {tuple(text(seed, model_drafter(), gamma=3, rule=rule)) for seed in (5, 5, 5)}
    assert len(texts) == 1
    assert len({tuple(text(seed, model_drafter(), gamma=3, rule=rule)) for seed in range(20)}) == 20


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_another_process_gives_the_same_text(rule: str) -> None:
    program = (
        f"from tests.test_seeds import *; print(text(8, model_drafter(), gamma=3, rule={rule!r}, params=PENALISED))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(text(8, model_drafter(), gamma=3, rule=rule, params=PENALISED))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_neighbours_and_place_in_a_batch_change_nothing(rule: str) -> None:
    alone = text(8, model_drafter(), gamma=3, rule=rule, params=PENALISED)
    neighbours = [
        request(1, gamma=5, rule="token"),
        request(2, rule="coupled", prompt=[3, 1]),
        request(3, gamma=2, params=LLAMACPP_DEFAULTS, max_tokens=9),
    ]
    for place in range(4):
        requests = list(neighbours)
        requests.insert(place, request(8, gamma=3, rule=rule, params=PENALISED))
        together = run(engine(model_drafter(num_sequences=4), num_sequences=4), *requests)
        assert together[place] == alone


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_what_the_caches_hold_changes_nothing(rule: str) -> None:
    cold = text(8, model_drafter(), gamma=3, rule=rule)
    warm = engine(model_drafter())
    for before in (PROMPT, PROMPT[:3], (*PROMPT, *cold[:7]), (2, 2)):
        run(warm, request(1, gamma=2, prompt=before, max_tokens=5))
        assert run(warm, request(8, gamma=3, rule=rule)) == [cold]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_at_temperature_zero_the_seed_does_not_matter(rule: str) -> None:
    expected = TARGET.greedy_path(PROMPT, NUM_TOKENS)
    for seed, gamma in itertools.product((0, 9), (0, 1, 4)):
        assert text(seed, model_drafter(), gamma=gamma, rule=rule, params=SamplingParams(temperature=0)) == expected


def test_the_low_64_bits_of_a_seed_count() -> None:
    for rule in ("token", "block", "coupled"):
        for other in (5 + 2**64, 5 - 2**64):
            assert text(5, model_drafter(), gamma=2, rule=rule) == text(other, model_drafter(), gamma=2, rule=rule)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_plain_text_can_be_continued(rule: str) -> None:
    """Noise belongs to absolute positions: the first tokens as part of the prompt give the same continuation."""
    whole = plain(5, rule)
    for at in (1, 7, 20):
        rest = text(5, rule=rule, prompt=(*PROMPT, *whole[:at]), max_tokens=NUM_TOKENS - at)
        assert rest == whole[at:]


# --- token and block ----------------------------------------------------------------------------------------------


def test_plain_decoding_is_the_same_for_token_and_block() -> None:
    for seed in range(20):
        assert plain(seed, "token") == plain(seed, "block")


def test_the_first_token_is_plain() -> None:
    for seed in range(20):
        firsts = {
            text(seed, drafter, gamma=gamma, rule=rule, max_tokens=3)[0]
            for rule in ("token", "block")
            for gamma in (0, 1, 4)
            for drafter in (model_drafter(), fakes.oracle(TARGET))
        }
        assert firsts == {plain(seed, "block")[0]}


def test_later_ones_depend_on_the_drafts() -> None:
    """Which is no fault: each text has the target's law."""
    for rule in ("token", "block"):
        texts = {
            tuple(text(3, drafter(), gamma=gamma, rule=rule))
            for gamma, drafter in itertools.product((0, 1, 2, 5), (model_drafter, lambda: model_drafter(TARGET)))
        }
        assert len(texts) >= 7
    assert any(
        text(seed, model_drafter(), gamma=4, rule="token") != text(seed, model_drafter(), gamma=4, rule="block")
        for seed in range(20)
    )


def test_one_drafted_token_is_the_same_for_token_and_block() -> None:
    for seed in range(20):
        assert text(seed, model_drafter(), gamma=1, rule="token") == text(
            seed, model_drafter(), gamma=1, rule="block"
        )


# --- coupled ------------------------------------------------------------------------------------------------------

COUPLED: dict[str, tuple[DrafterOf, int, dict[str, Any]]] = {
    **{f"gamma {gamma}": (model_drafter, gamma, {}) for gamma in (1, 2, 3, 4, 8)},
    "a draft that is the target": (lambda: model_drafter(TARGET), 4, {}),
    "always right at temperature 0": (lambda: fakes.oracle(TARGET), 3, {}),
    "hopeless": (lambda: fakes.always_wrong(TARGET), 4, {}),
    "ids out of range": (lambda: fakes.token_at_offset(TARGET, 1, 99), 4, {}),
    "a cold draft": (model_drafter, 4, {"draft_params": SamplingParams(temperature=0.2)}),
    "a draft with other cuts": (model_drafter, 2, {"draft_params": SamplingParams(top_k=3)}),
}


@pytest.mark.parametrize("params", [PLAIN, PENALISED], ids=["plain", "penalties"])
def test_coupled_text_does_not_depend_on_drafts(params: SamplingParams) -> None:
    """11,000 tokens for each setting, every one of them what plain decoding with the same seed gives."""
    compared = accepted = 0
    for name, (make, gamma, options) in COUPLED.items():
        shared = engine(make())
        for seed in range(25):
            generation = shared.start(request(seed, gamma=gamma, rule="coupled", params=params, **options))
            while generation.finish_reason is None:
                shared.step([generation])
            assert generation.tokens == plain(seed, "coupled", params), (name, seed)
            compared += len(generation.tokens)
            accepted += generation.stats.accepted
    assert compared == 11 * 25 * NUM_TOKENS == 11_000
    assert accepted > compared / 5, "drafts must be accepted for this to say anything"


def test_coupled_drafts_share_the_noise() -> None:
    """A draft that is the target draws what the target draws: everything is accepted."""
    generation = (shared := engine(model_drafter(TARGET))).start(request(1, gamma=4, rule="coupled"))
    while generation.finish_reason is None:
        shared.step([generation])
    assert generation.stats.accepted == generation.stats.drafted > 0


def test_a_seed_means_something_else_under_the_coupled_rule() -> None:
    assert plain(3, "coupled") != plain(3, "block")
