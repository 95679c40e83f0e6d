"""Where padding and splitting passes gains, and that it never loses: planned against naive evaluation.

    python scripts/bench_plan.py              writes benchmarks/plan.json

The plan follows from one measurement, as in calibration; the ratios come from another one, in which the naive and the
planned evaluation of n tokens alternate. Where the plan keeps the single pass, the ratio shows the noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np
from _bench import Spread, alternate, ratios, write

from localspec.backend import Context, Span
from localspec.calibration.costs import PassLoad, measure_costs
from localspec.drafters import read_ahead
from localspec.loading import load_models
from localspec.plans import PlannedContext, evaluation_plan

PAIRS = {
    "Q4_K_M": ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_k_m"),
    "Q4_0": ("qwen2.5-coder-1.5b-q4_0", "qwen2.5-coder-0.5b-q4_0"),
}
DEPTH = 128
LIMIT = 7
SIZES = (*range(1, LIMIT + 1), 8, 12, 16)
BUDGET_S = 14.0
TRIALS = 5


def main() -> int:
    results: dict[str, object] = {}
    for quantisation, (target, draft) in PAIRS.items():
        pair = load_models(target=target, draft=draft, context=DEPTH + 64)
        assert pair.draft is not None
        loads = {
            f"{target}, n rows": PassLoad(pair.target, SIZES, lambda n: n),
            f"{draft}, 1 row": PassLoad(pair.draft, SIZES, lambda n: 1),
        }
        print(f"measuring {quantisation}", file=sys.stderr)
        measured = measure_costs(list(loads.values()), depths=[DEPTH], budget_s=BUDGET_S)
        for (name, load), curves in zip(loads.items(), measured.curves, strict=True):
            plan = evaluation_plan(curves, limit=LIMIT)
            results[name] = {
                "ms by tokens": {
                    point.num_tokens: round(1000 * point.seconds, 2) for point in curves.curves[0].points
                },
                "passes": {n: plan.sizes(n) for n in plan.rearranged},
                "naive over planned by tokens": compare(load, PlannedContext(load.context, plan)),
            }
        pair.close()
    write("plan", {"depth": DEPTH, "trials": TRIALS, "budget_s": BUDGET_S}, results)
    return 0


def compare(load: PassLoad, planned: PlannedContext) -> dict[int, Spread]:
    """Return naive over planned seconds by number of tokens."""
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, load.context.vocabulary_size, DEPTH)]
    load.context.truncate(0, 0)
    read_ahead(load.context, 0, tokens)

    def side(context: Context, count: int) -> Callable[[], float]:
        span = Span(0, tokens[:count], load.rows(count))

        def run() -> float:
            for _ in range(2):  # the first builds the graph of this size
                started = perf_counter()
                context.decode([span])
                seconds = perf_counter() - started
                context.truncate(0, DEPTH)
            return seconds

        return run

    sizes = range(1, planned.plan.limit + 1)
    contexts: dict[str, Context] = {"naive": load.context, "planned": planned}
    sides = {f"{name} {n}": side(context, n) for n in sizes for name, context in contexts.items()}
    seconds = alternate(sides, TRIALS)
    return {n: ratios(seconds[f"naive {n}"], seconds[f"planned {n}"]) for n in sizes}


if __name__ == "__main__":
    sys.exit(main())
