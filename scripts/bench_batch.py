"""Throughput of batches: sequences times drafted tokens, the automatic choice, and llama-server beside them.

    python scripts/bench_batch.py                                writes benchmarks/batch.json
    python scripts/bench_batch.py --llama-server PATH            with llama-server on the same files

Every side generates the same records greedily, several at a time; its throughput is emitted tokens per second of
the whole, prompts included. The sides take turns, and ratios are made trial by trial. llama-server gets the same
token ids as prompts, as many slots as the automatic choice runs sequences, and all requests at once; it runs plainly
and, as another side, with the draft. Each trial has a system text of its own, so that nobody answers from what an
earlier trial left in a cache; within a trial it may be shared.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from _bench import Spread, ratios, write

import localspec
from localspec.batching import BatchRequest
from localspec.calibration.prompts import built_in_prompts
from localspec.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
SYSTEM = "You are a careful assistant. Answer briefly, to the point, and without repeating the question."

Side = Callable[[], float]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", nargs="+", default=["qwen2.5-coder-1.5b"])
    parser.add_argument("--parallel", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--gamma", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--llama-server", type=Path)
    options = parser.parse_args()
    results = {pair: bench(pair, options) for pair in options.pairs}
    settings = {name: value for name, value in vars(options).items() if name != "llama_server"}
    write("batch", settings, results)
    return 0


def bench(pair: str, options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        session = stack.enter_context(localspec.load_pair(pair, context=options.context))
        plan: dict[str, Any] = {}
        sides: dict[str, Side] = {
            f"B={b} gamma={g}": ours(session, options, {}, parallel=b, num_draft_tokens=g)
            for b in options.parallel
            for g in options.gamma
        }
        ours(session, options, plan)()  # chooses, and makes room for as many sequences
        sides["auto"] = ours(session, options, plan)
        cells = list(sides)
        if options.llama_server:
            for draft in (False, True):
                url = stack.enter_context(server(options, session, plan["parallel"], draft=draft))
                sides["llama-server" + " with draft" * draft] = theirs(url, session, options)
        speeds = take_turns(sides, options.trials)
    best = max((name for name in cells if name != "auto"), key=lambda name: statistics.median(speeds[name]))
    found: dict[str, Any] = {"auto": plan, "tokens/s": {name: Spread.of(values) for name, values in speeds.items()}}
    found["best cell"] = best
    found["auto over best cell"] = ratios(speeds["auto"], speeds[best])
    plain = f"B={min(options.parallel)} gamma=0"
    if plain in speeds:
        found[f"auto over {plain}"] = ratios(speeds["auto"], speeds[plain])
    for name in speeds:
        if name.startswith("llama-server"):
            found[f"auto over {name}"] = ratios(speeds["auto"], speeds[name])
    return found


def prompts(options: argparse.Namespace, trial: int) -> list[BatchRequest]:
    """Return records of all kinds of text under one system text."""
    system = f"Trial {trial}. {SYSTEM}"
    built_in = built_in_prompts()
    kinds = list(dict.fromkeys(prompt.kind for prompt in built_in))
    by_kind = [[p.content for p in built_in if p.kind == kind] for kind in kinds]
    texts = [
        text for turn in zip(*by_kind, strict=False) for text in turn if isinstance(text, str) and len(text) < 600
    ]
    return [
        BatchRequest(
            id=str(i),
            prompt=[{"role": "system", "content": system}, {"role": "user", "content": texts[i % len(texts)]}],
            params=GREEDY,
            max_tokens=options.tokens,
        )
        for i in range(options.records)
    ]


def ours(session: Any, options: argparse.Namespace, plan: dict[str, Any], **choice: Any) -> Side:
    turn = count()

    def side() -> float:
        records = prompts(options, next(turn))
        started = perf_counter()
        batch = session.generate_batch(records, seed=1, **choice)
        for answer in batch:
            if answer.error is not None:
                raise answer.error
        seconds = perf_counter() - started
        chosen = batch.progress.plan
        plan.update(
            parallel=chosen.parallel,
            gamma=chosen.num_draft_tokens,
            predicted_tokens_per_s=chosen.tokens_per_s,
            tokens_per_step=batch.progress.tokens_per_step,
        )
        return float(batch.progress.tokens / seconds)

    return side


@contextmanager
def server(options: argparse.Namespace, session: Any, parallel: int, *, draft: bool) -> Iterator[str]:
    """Run llama-server on the session's files; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(options.llama_server), "-m", str(session.pair.target_header.path), "--port", str(port)]
    command += ["-np", str(parallel), "-c", str(options.context * parallel), "-t", str(session.pair.target.threads)]
    if draft:
        command += ["-md", str(session.pair.draft_header.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise SystemExit(f"{options.llama_server} ended with code {process.returncode}: {' '.join(command)}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def theirs(url: str, session: Any, options: argparse.Namespace) -> Side:
    turn = count()

    def post(body: Mapping[str, Any]) -> int:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/completion", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def side() -> float:
        bodies = [
            {
                "prompt": session.encode(record.prompt),
                "n_predict": record.max_tokens,
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": True,
            }
            for record in prompts(options, next(turn))
        ]
        started = perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            tokens = sum(pool.map(post, bodies))
        return tokens / (perf_counter() - started)

    return side


def take_turns(sides: Mapping[str, Side], trials: int) -> dict[str, list[float]]:
    """Run ``trials`` rounds of all sides, every other one backwards; what they return, by side."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    for trial in range(trials):
        for name in list(sides) if trial % 2 == 0 else list(sides)[::-1]:
            results[name].append(sides[name]())
            print(f"{name}: {results[name][-1]:.1f} tokens/s", file=sys.stderr)
    return results


if __name__ == "__main__":
    raise SystemExit(main())
