"""Prediction against measurement, and the automatic policy against every fixed draft length.

    python scripts/bench_policy.py            writes benchmarks/policy.json

Both pairs are calibrated first (in processes of their own, at temperature 0.7), so that the profiles are those of
this run, and on the prompts of the benchmark, so that what is compared is the prediction and not the luck of a text.
In every cell, of a pair, a kind of text and a temperature, plain decoding, fixed lengths and ``auto`` take turns;
trial i of all sides runs the same prompt. Speed is tokens after the first per second after the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from _bench import RESULTS, alternate, ratios, write

import localspec
from localspec.calibration.prompts import built_in_prompts
from localspec.sampling import SamplingParams

PAIRS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-f16")
KINDS = ("code", "editing", "prose")
TEMPERATURES = (0.0, 0.7)
LENGTHS = (0, 1, 2, 4, 6)


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
            calibrate(pair, options.budget, options.trials)
        session = localspec.load_pair(pair, context=2048)
        for kind in KINDS:
            for temperature in TEMPERATURES:
                cells.append(cell(session, pair, kind, temperature, options.trials, options.tokens))
                print(line(cells[-1]), file=sys.stderr)
        session.close()
    errors = [abs(c["predicted"][g] / c["measured"][g]["pooled"] - 1) for c in cells for g in c["predicted"]]
    summary = {
        "prediction error, median": median(errors),
        "prediction error, worst": max(errors),
        "auto over best fixed, worst": min(c["auto over best fixed"]["pooled"] for c in cells),
        "auto over plain, worst": min(c["auto over plain"]["pooled"] for c in cells),
    }
    settings = {"trials": options.trials, "tokens": options.tokens, "lengths": LENGTHS, "rule": "block"}
    write("policy", settings, {"cells": cells, "summary": summary})
    return 0


def bench_prompts(kind: str, trials: int) -> list[str]:
    return [str(prompt.content) for prompt in built_in_prompts() if prompt.kind == kind][:trials]


def calibrate(pair: str, budget: str, trials: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "prompts.jsonl"
        records = [{"kind": kind, "prompt": text} for kind in KINDS for text in bench_prompts(kind, trials)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        untruncated = ["--top-k", "0", "--top-p", "1", "--min-p", "0"]
        command = [sys.executable, "-m", "localspec", "calibrate", "--pair", pair, "--prompts", str(path), "--json"]
        command += ["-t", "0.7", *untruncated, "--budget", budget, "--plot", str(RESULTS / f"{pair}.png")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def cell(session: Any, pair: str, kind: str, temperature: float, trials: int, tokens: int) -> dict[str, Any]:
    prompts = bench_prompts(kind, trials)
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
    # All runs emit the same number of tokens: the harmonic mean is tokens per second over all prompts together.
    pooled = {name: harmonic_mean(values) for name, values in speeds.items()}
    verdicts = session.pair.profile.profile.verdicts
    verdict = next(v for v in verdicts if v.kind == kind and v.temperature == temperature)
    best = max((str(g) for g in LENGTHS), key=pooled.__getitem__)

    def over(name: str, other: str) -> dict[str, float]:
        spread = ratios(speeds[name], speeds[other])
        pooled_ratio = pooled[name] / pooled[other]
        return {"pooled": pooled_ratio, "median": spread.median, "low": spread.low, "high": spread.high}

    return {
        "pair": pair,
        "kind": kind,
        "temperature": temperature,
        "predicted": {str(g): verdict.predicted_speedup[g] for g in LENGTHS[1:]},
        "measured": {str(g): over(str(g), "0") for g in LENGTHS[1:]},
        "auto over plain": over("auto", "0"),
        "auto over best fixed": over("auto", best),
        "best fixed": int(best),
    }


def line(c: dict[str, Any]) -> str:
    pairs = [f"{g}: {c['predicted'][g]:.2f}/{c['measured'][g]['pooled']:.2f}" for g in c["predicted"]]
    return (
        f"{c['pair']:<24} {c['kind']:<8} T {c['temperature']:<4} predicted/measured {'  '.join(pairs)}"
        f"  auto {c['auto over plain']['pooled']:.2f} of plain, {c['auto over best fixed']['pooled']:.2f} of best"
        f" ({c['best fixed']})"
    )


if __name__ == "__main__":
    sys.exit(main())
