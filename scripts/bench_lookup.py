"""Drafting by lookup alone against plain decoding, on texts that repeat themselves much, little and not at all.

    python scripts/bench_lookup.py            writes benchmarks/lookup.json

The target of the default pair is loaded without a draft model. In every cell plain decoding and lookup take turns;
trial i of both runs the same prompt, which both find in the cache. What lookup learns of one trial holds for the
next, as in a session; it begins with nothing, and the first round is not counted. Speed is tokens after the first
per second after the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import harmonic_mean
from typing import Any

from _bench import ROOT, alternate, ratios, write

import localspec
from localspec.calibration.prompts import built_in_prompts
from localspec.sampling import SamplingParams

TARGET = "qwen2.5-coder-1.5b-q4_k_m"
RENAME = "Rename {} to {} in this file, change nothing else, and give the whole file:\n\n```python\n{}```"
RENAMED = (  # files of some 500 tokens each
    ("ConfidenceModel", "AgreementModel", "localspec/confidence.py"),
    ("ForgettingRatio", "RunningRatio", "localspec/averages.py"),
    ("deferred_interrupts", "postponed_interrupts", "localspec/backend/interrupts.py"),
    ("FixedPolicy", "ConstantPolicy", "tests/test_policy.py"),
    ("read_record", "load_record", "localspec/records.py"),
)
GREEDY = SamplingParams(temperature=0)
# At this temperature the law is almost flat over 150,000 tokens: letters of all scripts, nothing twice.
NOISE = SamplingParams(temperature=3.0)
CELLS = {
    "editing, T 0": ("editing", GREEDY),
    "code, T 0": ("code", GREEDY),
    "prose, T 0.8": ("prose", SamplingParams(temperature=0.8)),
    "nothing repeats": ("noise", NOISE),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--backend", default="llamacpp")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    options = parser.parse_args()
    session = localspec.load_pair(target=options.target, drafter="lookup", backend=options.backend, context=2048)
    results: dict[str, object] = {}
    for name in options.cells:
        results[name] = cell(session, *CELLS[name], options.trials, options.tokens)
        print(f"{name}: {results[name]}", file=sys.stderr)
    session.close()
    write(
        "lookup",
        {"backend": options.backend, "trials": options.trials, "tokens": options.tokens, "context": 2048},
        results,
    )
    return 0


def prompts_of(kind: str) -> list[str]:
    if kind == "editing":
        return [RENAME.format(old, new, (ROOT / path).read_text("utf-8")) for old, new, path in RENAMED]
    if kind == "noise":
        return ["Write words at random."]
    return [str(prompt.content) for prompt in built_in_prompts() if prompt.kind == kind]


def cell(session: Any, kind: str, params: SamplingParams, trials: int, tokens: int) -> dict[str, object]:
    prompts = prompts_of(kind)
    counts = {"drafted": 0, "accepted": 0, "tokens": 0, "steps": 0}

    def side(num_draft_tokens: int | None) -> Callable[[], float]:
        turn = iter(range(10**6))

        def run() -> float:
            trial = next(turn)
            prompt = prompts[trial % len(prompts)]
            options = {"max_tokens": tokens, "num_draft_tokens": num_draft_tokens, "seed": trial}
            stats = session.generate(prompt, params, **options).stats
            if num_draft_tokens is None and trial:
                for name in counts:
                    counts[name] += getattr(stats, name)
            return float(stats.tokens_per_s)

        return run

    speeds = alternate({"plain": side(0), "lookup": side(None)}, trials)
    return {
        "lookup over plain": ratios(speeds["lookup"], speeds["plain"]),
        "pooled": harmonic_mean(speeds["lookup"]) / harmonic_mean(speeds["plain"]),
        "plain tokens/s": harmonic_mean(speeds["plain"]),
        **counts,
    }


if __name__ == "__main__":
    sys.exit(main())
