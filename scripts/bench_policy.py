"""Prediction against measurement, and the automatic policy against every fixed draft length.

    python scripts/bench_policy.py                   writes benchmarks/policy.json
    python scripts/bench_policy.py --pairs NAME --kinds code prose
                                                     measures these cells again, and keeps the others

Both pairs are calibrated first, in processes of their own, for ``auto`` to have profiles of this run. Agreement is
then measured as calibration does it, on the prompts of the benchmark and several samples of each at a temperature.
In every cell, of a pair, a kind of text and a temperature, plain decoding, fixed lengths and ``auto`` take turns;
trial i of all sides runs the same prompt. Speed is tokens after the first per second after the first.

At a temperature every side writes a text of its own, and how well 250 tokens happen to be predictable moves its speed
by a tenth. Two numbers are therefore given for a fixed length: ``raw``, the ratio to plain decoding trial by trial,
and ``even``, the measured seconds of a step with the tokens per step that the transcript recursion finds on the texts
of all sides together (each is a sample of the target's law). ``auto`` is compared with the best fixed length on its
own texts: the seconds it took, and those of as many steps as the fixed length needs for the same text. All are
medians over trials, since now and then a shared machine stalls.

A prediction has two sources, agreement and costs. On a shared machine costs move within minutes: a pass over one
token lives on memory bandwidth that neighbours take, a pass over several does not. So ``predicted`` takes costs
that are sampled before and after every run of a side, with calibration's own formula: the plain pass of the minute
in which plain decoding ran over the step of the minute in which the length ran. It is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _bench import RESULTS, Spread, alternate, ratios, write

from localspec import GenerationResult, SamplingParams, Session, load_pair
from localspec.acceptance import Transcript, agreement
from localspec.backend import Context, Span
from localspec.backend.native import NativeContext
from localspec.calibration.agreement import AgreementPlan, KindAgreement, observe, summarise
from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.drafters import read_ahead
from localspec.plans import PlannedContext
from localspec.profile import predicted_speedups
from localspec.sampling import make_law

PAIRS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-f16")
KINDS = ("code", "editing", "prose")
TEMPERATURES = (0.0, 0.7)
LENGTHS = (0, 1, 2, 4, 6)
COST_DEPTH = 96
SAMPLES = 3
"""Transcripts of every prompt in the calibration."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--budget", default="240s")
    parser.add_argument("--backend", default="llamacpp", choices=("llamacpp", "ik"))
    parser.add_argument("--no-calibrate", action="store_true", help="use the profiles there are")
    options = parser.parse_args()
    cells = kept(options.pairs, options.kinds)
    for pair in options.pairs:
        if not options.no_calibrate:
            calibrate(pair, options.budget, options.backend)
        session = load_pair(pair, context=2048, backend=options.backend)
        agreements = measure_agreement(session, options.kinds, options.trials, options.tokens)
        for kind in options.kinds:
            for temperature in TEMPERATURES:
                found = next(a for a in agreements if (a.kind, a.temperature) == (kind, temperature))
                cells.append(cell(session, pair, found, options.trials, options.tokens))
                print(line(cells[-1]), file=sys.stderr)
                save(cells, options)
        session.close()
    return 0


def save(cells: list[dict[str, Any]], options: argparse.Namespace) -> None:
    cells.sort(key=lambda c: (PAIRS.index(c["pair"]), KINDS.index(c["kind"]), c["temperature"]))
    errors = [abs(c["predicted"][g] / c["measured"][g]["even"] - 1) for c in cells for g in c["predicted"]]
    summary = {
        "prediction error, median": median(errors),
        "prediction error, worst": max(errors),
        "auto over best fixed, worst": min(value(c["auto over best fixed"]) for c in cells),
        "auto over plain, worst": min(value(c["auto over plain"]) for c in cells),
    }
    settings = {name: getattr(options, name) for name in ("trials", "tokens", "backend")}
    settings |= {"lengths": LENGTHS, "rule": "block"}
    write("policy", settings, {"cells": cells, "summary": summary})


def kept(pairs: list[str], kinds: list[str]) -> list[dict[str, Any]]:
    """Return the cells of the last run that are not measured again."""
    path = RESULTS / "policy.json"
    if not path.exists():
        return []
    cells = json.loads(path.read_text(encoding="utf-8"))["results"]["cells"]
    return [cell for cell in cells if cell["pair"] not in pairs or cell["kind"] not in kinds]


def bench_prompts(kind: str, trials: int) -> list[str]:
    return [str(prompt.content) for prompt in built_in_prompts() if prompt.kind == kind][:trials]


def calibrate(pair: str, budget: str, backend: str) -> None:
    command = [sys.executable, "-m", "localspec", "calibrate", "--pair", pair, "--backend", backend, "--json"]
    untruncated = ["-t", "0.7", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    subprocess.run([*command, *untruncated, "--budget", budget], check=True, stdout=subprocess.DEVNULL)


def measure_agreement(session: Session, kinds: list[str], trials: int, tokens: int) -> list[KindAgreement]:
    """Do what calibration does, on the prompts of the benchmark, as long as it takes."""
    pair, profile = session.pair, session.pair.profile.profile
    assert pair.draft is not None
    assert profile is not None
    target, draft = (
        NativeContext(
            context.model,
            capacity=640,
            num_sequences=4,
            threads=profile.threads,
            flash_attention=profile.flash_attention,
        )
        for context in (pair.target, pair.draft)
    )
    found: list[KindAgreement] = []
    prompts = [CalibrationPrompt(kind, text) for kind in kinds for text in bench_prompts(kind, trials)]
    for temperature in TEMPERATURES:
        plan = AgreementPlan(params=SamplingParams(), temperatures=(temperature,), tokens_per_prompt=tokens)
        observations = observe(
            target,
            draft,
            prompts * (SAMPLES if temperature else 1),
            plan,
            encode=session.encode,
            ends_generation=session.vocabulary.ends_generation,
        )
        found += summarise(list(observations), max_draft_tokens=max(LENGTHS))
    target.close(), draft.close()
    return found


def cell(session: Session, pair: str, found: KindAgreement, trials: int, tokens: int) -> dict[str, Any]:
    kind, temperature = found.kind, found.temperature
    prompts = bench_prompts(kind, trials)
    params = SamplingParams(temperature=temperature)
    results: dict[str, list[GenerationResult]] = {}

    def side(name: str, num_draft_tokens: int | None) -> Callable[[], float]:
        past = results[name] = []

        def run() -> float:
            trial = len(past)
            result = session.generate(
                prompts[trial % len(prompts)],
                params,
                max_tokens=tokens,
                num_draft_tokens=num_draft_tokens,
                seed=trial + trials * (name == "again"),
            )
            past.append(result)
            return result.stats.tokens_per_s

        return run

    # Twice as much of ``auto``: its acceptance is the one thing here that no recursion makes even.
    sides = {"auto": side("auto", None)} | {str(g): side(str(g), g) for g in LENGTHS} | {"again": side("again", None)}
    for name in LENGTHS:
        session.generate(prompts[0], params, max_tokens=4, num_draft_tokens=name, seed=0)
    costs: dict[str, list[Costs]] = {name: [] for name in sides}
    latest = sample_costs(session)

    def between_costs(run: Callable[[], float], name: str) -> Callable[[], float]:
        def both() -> float:
            nonlocal latest
            before, speed = latest, run()
            latest = sample_costs(session)
            costs[name].append({key: before[key] + latest[key] for key in latest})
            return speed

        return both

    speeds = alternate({name: between_costs(run, name) for name, run in sides.items()}, trials, warm_up=False)
    texts = {
        name: [transcript(session, prompts[i % len(prompts)], r, params) for i, r in enumerate(past)]
        for name, past in results.items()
    }
    step_s = {g: [seconds_per_step(r) for r in results[str(g)]] for g in LENGTHS}
    everything = [text for written in texts.values() for text in written]
    # Round by round, since the machine's pace is of the minute.
    relative_s = {g: median(one / plain for one, plain in zip(step_s[g], step_s[0], strict=True)) for g in LENGTHS}
    even = {g: steps_of(everything, g) / relative_s[g] for g in LENGTHS}
    own = texts["auto"] + texts["again"]
    best = max(LENGTHS, key=lambda g: steps_of(own, g) / relative_s[g])
    # The run's own text at the best length's pace in that round, against the run.
    over_best = [
        len(text) / steps_of([text], best) * pace / result.stats.wall_s
        for result, text, pace in zip(results["auto"] + results["again"], own, step_s[best] * 2, strict=True)
    ]
    auto = speeds["auto"] + speeds["again"]
    profile = session.pair.profile.profile
    assert profile is not None
    speedups = {
        g: [
            predicted_speedups(
                found.block.tokens_per_step,
                target=curves(own, "target"),
                draft=curves(own, "draft"),
                depth=COST_DEPTH,
                sampler=profile.sampler,
            )[g]
            * median(then["target", 1])
            / median(own["target", 1])
            for own, then in zip(costs[str(g)], costs["0"], strict=True)
        ]
        for g in LENGTHS
    }
    predicted = {g: median(by_round) for g, by_round in speedups.items()}
    return {
        "pair": pair,
        "kind": kind,
        "temperature": temperature,
        "predicted": {str(g): predicted[g] for g in LENGTHS[1:]},
        "tokens per step": {
            str(g): {"predicted": found.block.tokens_per_step[g], "texts": steps_of(everything, g)}
            for g in LENGTHS[1:]
        },
        "measured": {
            str(g): {
                "even": even[g] / even[0],
                "raw": ratios(speeds[str(g)], speeds["0"]),
            }
            for g in LENGTHS[1:]
        },
        "auto over plain": ratios(auto, speeds["0"] * 2),
        "auto over best fixed": Spread.of(over_best),
        "best fixed": best,
        "texts": {"tokens": sum(map(len, everything)), "auto tokens": sum(map(len, own))},
    }


Costs = dict[tuple[str, int], list[float]]
"""Seconds of passes, by model and tokens."""


def sample_costs(session: Session) -> Costs:
    """Time passes as the engine makes them, behind what the caches hold, which they hold again afterwards."""
    profile, draft = session.pair.profile.profile, session.pair.draft
    assert profile is not None
    assert draft is not None
    costs: Costs = {}
    models: list[tuple[str, Context, list[int]]] = [
        ("target", PlannedContext(session.pair.target, profile.target_plan), [g + 1 for g in LENGTHS]),
        ("draft", PlannedContext(draft, profile.draft_plan), [1, 2]),
    ]
    for name, context, sizes in models:
        depth = context.length(0)
        for size in sizes:
            for run in range(3 if size <= 2 else 2):
                started = perf_counter()
                context.decode([Span(0, range(2000, 2000 + size), size if name == "target" else 1)])
                if run:  # the first pass of another size builds its graph, as calibration knows too
                    costs.setdefault((name, size), []).append(perf_counter() - started)
                context.truncate(0, depth)
    return costs


def curves(costs: Costs, model: str) -> CostCurves:
    points = [
        PassCost(size, size, median(times), 0.0, len(times)) for (name, size), times in costs.items() if name == model
    ]
    return CostCurves((CostCurve(COST_DEPTH, tuple(points)),))


def seconds_per_step(result: GenerationResult) -> float:
    """Without the step that reads the prompt."""
    return result.stats.wall_s / (result.stats.steps - 1)


def steps_of(texts: list[Transcript], num_draft_tokens: int) -> float:
    """Return tokens per step on these texts."""
    return agreement(texts, max(num_draft_tokens, 1), rule="block").tokens_per_step[num_draft_tokens]


def transcript(session: Session, prompt: str, result: GenerationResult, params: SamplingParams) -> Transcript:
    """Return what both models think of every token of a result but the first, which is never drafted."""
    session.engine.clear()
    tokens = session.encode(prompt) + result.tokens
    scored = result.tokens[1:]
    # A greedy law's token is certain, and after a near-tie another pass would have it impossible.
    columns = [[1.0] * len(scored)] if params.greedy else []
    for context in (session.pair.target, session.pair.draft)[len(columns) :]:
        assert context is not None
        read_ahead(context, 0, tokens[: -len(scored) - 1])
        rows = context.decode([Span(0, tokens[-len(scored) - 1 : -1], len(scored))])[:, : session.vocabulary.size]
        columns.append([make_law(r, params).prob(token) for r, token in zip(rows, scored, strict=True)])
        context.truncate(0, 0)
    return Transcript(np.array(columns[0]), np.array(columns[1]))


def value(spread: Any) -> float:
    """Return the median of a spread of this run, or of one read back."""
    return float(spread["median"] if isinstance(spread, dict) else spread.median)


def line(c: dict[str, Any]) -> str:
    pairs = [f"{g}: {c['predicted'][g]:.2f}/{c['measured'][g]['even']:.2f}" for g in c["predicted"]]
    return (
        f"{c['pair']:<24} {c['kind']:<8} T {c['temperature']:<4} predicted/measured {'  '.join(pairs)}"
        f"  auto {value(c['auto over plain']):.2f} of plain, {value(c['auto over best fixed']):.2f} of best"
        f" ({c['best fixed']})"
    )


if __name__ == "__main__":
    sys.exit(main())
