"""What making a law and drawing from it costs, at a vocabulary of 151,936.

    python scripts/bench_sampling.py            writes benchmarks/sampling.json

Every setting is timed in turn with a float32 softmax of the same row, the least anyone can do without truncation; the
ratio of the two is the result. The rows are made up: a peak of 40 tokens over a Gaussian floor, as models give them,
and a floor alone, as they do not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from _bench import Spread, alternate, ratios, write
from numpy.typing import NDArray

from localspec.sampling import (
    Law,
    PositionNoise,
    RecentTokens,
    SamplingParams,
    StepNoise,
    Stream,
    make_law,
    verify_coupled,
    verify_laws,
)

VOCABULARY_SIZE = 151_936
TRIALS = 15
CALLS = 40
CUTS = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
SETTINGS: dict[str, SamplingParams] = {
    "no truncation": SamplingParams(temperature=0.8),
    "no truncation, penalties over 64": SamplingParams(temperature=0.8, **PENALTIES),  # type: ignore[arg-type]
    "top-k 40, top-p 0.95, min-p 0.05": SamplingParams(temperature=0.8, **CUTS),  # type: ignore[arg-type]
    "the same, penalties over 64": SamplingParams(temperature=0.8, **CUTS, **PENALTIES),  # type: ignore[arg-type]
    "the same, bias and bans": SamplingParams(
        temperature=0.8,
        logit_bias={7: 1.0, 11: -1.0},
        banned=(5, 6),
        **CUTS,  # type: ignore[arg-type]
        **PENALTIES,  # type: ignore[arg-type]
    ),
    "top-p 0.95 alone": SamplingParams(top_p=0.95),
    "min-p 0.05 alone": SamplingParams(min_p=0.05),
    "typical-p 0.9 after top-k 100": SamplingParams(top_k=100, typical_p=0.9),
    "typical-p 0.9 alone": SamplingParams(typical_p=0.9),
    "greedy": SamplingParams(temperature=0),
}


def main() -> int:
    rng = np.random.default_rng(0)
    floor = (2.5 * rng.standard_normal(VOCABULARY_SIZE)).astype(np.float32)
    peaked = floor.copy()
    peaked[rng.choice(VOCABULARY_SIZE, 40, replace=False)] += np.linspace(8, 18, 40, dtype=np.float32)
    history = [int(token) for token in rng.integers(VOCABULARY_SIZE, size=400)]
    results: dict[str, object] = {}
    for name, row in (("peaked", peaked), ("flat", floor)):
        sides: dict[str, Callable[[], float]] = {"softmax": timed(lambda row=row: softmax(row))}  # type: ignore[misc]
        for setting, params in SETTINGS.items():
            sides[setting] = timed(one_row(row, params, history))
        law = make_law(row, SETTINGS["no truncation"])
        sides["coupled draw without truncation, beyond the law"] = timed(race(law))
        times = alternate(sides, TRIALS)
        results |= report(times, name)
    results |= verification(peaked, rng)
    write("sampling", {"vocabulary": VOCABULARY_SIZE, "trials": TRIALS, "calls": CALLS}, results)
    return 0


def report(times: dict[str, list[float]], name: str) -> dict[str, object]:
    """Return milliseconds per row and the ratio to the softmax, and print them."""
    found: dict[str, object] = {}
    for side, values in times.items():
        milliseconds = Spread.of([1e3 * value for value in values])
        ratio = ratios(values, times["softmax"])
        found[f"{side}, {name}"] = {"ms": milliseconds, "softmaxes": ratio}
        print(f"{name:<7} {side:<48} {milliseconds} ms, {ratio} softmaxes", file=sys.stderr)
    return found


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Return seconds per call, over CALLS of them."""

    def run() -> float:
        started = perf_counter()
        for _ in range(CALLS):
            call()
        return (perf_counter() - started) / CALLS

    return run


def softmax(row: NDArray[np.float32]) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = row - row.max()
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def one_row(row: NDArray[np.float32], params: SamplingParams, history: Sequence[int]) -> Callable[[], int]:
    """Do what a step does for one row: look at what is recent, make the law, draw."""

    def call() -> int:
        recent = RecentTokens(params, history).then([1, 2])
        return make_law(row, params, recent).draw(0.7)

    return call


def race(law: Law) -> Callable[[], int]:
    position = itertools.count()
    return lambda: law.race(PositionNoise(1, next(position)))


def verification(row: NDArray[np.float32], rng: np.random.Generator) -> dict[str, object]:
    """Time the rules on four drafted tokens, laws given: with dense laws and with those of llama.cpp's defaults."""
    results: dict[str, object] = {}
    for kind, params in (("dense", SETTINGS["no truncation"]), ("cut", SETTINGS["top-k 40, top-p 0.95, min-p 0.05"])):
        rows = [(row + 0.3 * rng.standard_normal(len(row))).astype(np.float32) for _ in range(9)]
        p, q = [make_law(r, params) for r in rows[:5]], [make_law(r, params) for r in rows[5:]]
        steps = itertools.count()

        def step(rule: str, p: list[Law] = p, q: list[Law] = q, steps: itertools.count[int] = steps) -> object:
            at = next(steps)
            noise = StepNoise(1, at, Stream.DRAFT)
            drafted = [law.draw(noise.next()) for law in q]
            if rule == "coupled":
                return verify_coupled(p, drafted, seed=1, position=at)
            return verify_laws(p, q, drafted, rule=rule, uniforms=StepNoise(1, at, Stream.VERIFY))

        sides: dict[str, Callable[[], float]] = {"softmax": timed(lambda: softmax(row))}
        for rule in ("token", "block", "coupled"):
            sides[f"four drafted tokens, {rule} rule"] = timed(lambda rule=rule, step=step: step(rule))  # type: ignore[misc]
        results |= report(alternate(sides, TRIALS), f"{kind} laws")
    return results


if __name__ == "__main__":
    sys.exit(main())
