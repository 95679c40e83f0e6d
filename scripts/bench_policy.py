"""Prediction against measurement, and the automatic policy against every fixed draft length.

    python scripts/bench_policy.py            writes benchmarks/policy.json

Both pairs are calibrated first (in processes of their own, at temperature 0.7), so that the profiles are those of
this run. In every cell, of a pair, a kind of text and a temperature, plain decoding, fixed lengths and ``auto`` take
turns; trial i of all sides runs the same prompt. Speed is tokens after the first per second after the first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from _bench import Spread, alternate, ratios, write

import localspec
from localspec.calibration.prompts import built_in_prompts
from localspec.sampling import SamplingParams

PAIRS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-f16")
KINDS = ("code", "editing", "prose")
TEMPERATURES = (0.0, 0.7)
LENGTHS = (0, 1, 2, 4, 6)
NEVER_SLOWER, NEAR_BEST = 0.98, 0.97


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--no-calibrate", action="store_true", help="use the profiles there are")
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for pair in options.pairs:
        if not options.no_calibrate:
            command = [sys.executable, "-m", "localspec", "calibrate", "--pair", pair]
            subprocess.run([*command, "-t", "0.7", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--budget",
                            options.budget, "--json"], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        session = localspec.load_pair(pair, context=2048)
        for kind in KINDS:
            for temperature in TEMPERATURES:
                cells.append(cell(session, pair, kind, temperature, options.trials, options.tokens))
                print(line(cells[-1]), file=sys.stderr)
        session.close()
    errors = [abs(c["predicted"][g] / c["measured"][g]["median"] - 1) for c in cells for g in c["predicted"]]
    summary = {
        "prediction error, median": median(errors),
        "prediction error, worst": max(errors),
        "auto over best fixed, worst": min(c["auto over best fixed"]["median"] for c in cells),
        "auto over plain, worst": min(c["auto over plain"]["median"] for c in cells),
    }
    settings = {"trials": options.trials, "tokens": options.tokens, "lengths": LENGTHS, "rule": "block"}
    write("policy", settings, {"cells": cells, "summary": summary})
    return 0


def cell(session: Any, pair: str, kind: str, temperature: float, trials: int, tokens: int) -> dict[str, Any]:
    prompts = [prompt.content for prompt in built_in_prompts() if prompt.kind == kind]
    params = SamplingParams(temperature=temperature)

    def side(num_draft_tokens: int | None) -> Callable[[], float]:
        turn = iter(range(10**6))

        def run() -> float:
            trial = next(turn)
            result = session.generate(
                prompts[trial % len(prompts)],
                params,
                max_tokens=tokens,
                num_draft_tokens=num_draft_tokens,
                seed=trial,
            )
            return float(result.stats.tokens_per_s)

        return run

    speeds = alternate({"auto": side(None)} | {str(g): side(g) for g in LENGTHS}, trials)
    verdicts = session.pair.profile.profile.verdicts
    verdict = next(v for v in verdicts if v.kind == kind and v.temperature == temperature)
    medians = {name: median(values) for name, values in speeds.items() if name != "auto"}
    best = max(medians, key=medians.__getitem__)
    return {
        "pair": pair,
        "kind": kind,
        "temperature": temperature,
        "predicted": {str(g): verdict.predicted_speedup[g] for g in LENGTHS[1:]},
        "measured": {str(g): vars_of(ratios(speeds[str(g)], speeds["0"])) for g in LENGTHS[1:]},
        "auto over plain": vars_of(ratios(speeds["auto"], speeds["0"])),
        "auto over best fixed": vars_of(ratios(speeds["auto"], speeds[best])),
        "best fixed": int(best),
    }


def vars_of(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def line(c: dict[str, Any]) -> str:
    pairs = [f"{g}: {c['predicted'][g]:.2f}/{c['measured'][g]['median']:.2f}" for g in c["predicted"]]
    return (
        f"{c['pair']:<24} {c['kind']:<8} T {c['temperature']:<4} predicted/measured {'  '.join(pairs)}"
        f"  auto {c['auto over plain']['median']:.2f} of plain, {c['auto over best fixed']['median']:.2f} of best"
        f" ({c['best fixed']})"
    )


if __name__ == "__main__":
    sys.exit(main())
