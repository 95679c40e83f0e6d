"""What the loop itself costs, and what speculation brings on a pair where it pays.

    python scripts/bench_engine.py            writes benchmarks/engine.json

Overhead is the share of the wall time of decoding that is not spent inside llama_decode. The bare loop that plain
decoding is compared with calls llama_decode and argmax and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any

import llama_cpp as native
import numpy as np
from _bench import CODE_PROMPT, Spread, alternate, ratios, write

import localspec
from localspec.backend import Span
from localspec.backend.native import Batch
from localspec.calibration.prompts import built_in_prompts
from localspec.sampling import SamplingParams

TRIALS = 5
MAX_TOKENS = 96
GREEDY = SamplingParams(temperature=0)
LENGTHS = {"plain": 0, "auto": None, "4": 4, "6": 6}
OVERHEAD_SETTINGS = {
    "T 0.8, no truncation": SamplingParams(temperature=0.8),
    "T 0.8, top-k 40, top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "greedy": GREEDY,
}


def main() -> int:
    results: dict[str, object] = {"memory": memory()}
    session = localspec.load_pair("qwen2.5-coder-1.5b-f16", context=1024, backend="llamacpp")
    for name, params in OVERHEAD_SETTINGS.items():
        trials = [overhead(session, params) for _ in range(TRIALS)]
        results[f"overhead share, {name}"] = Spread.of(trials)
        print(f"overhead, {name}: {Spread.of(trials)}", file=sys.stderr)

    speeds = alternate({name: speed(session, gamma) for name, gamma in LENGTHS.items()}, TRIALS)
    for name in ("auto", "4", "6"):
        results[f"speedup over plain, code, T 0, gamma {name}"] = ratios(speeds[name], speeds["plain"])
    session.close()
    plain = localspec.load_pair("qwen2.5-coder-1.5b", use_draft=False, context=1024, backend="llamacpp")
    prompt = plain.encode(CODE_PROMPT)
    sides = {"engine": lambda: run(plain, GREEDY, 0).stats.tokens_per_s, "bare": lambda: bare(plain, prompt)}
    speeds = alternate(sides, TRIALS)
    results["plain engine over bare loop"] = ratios(speeds["engine"], speeds["bare"])
    write("engine", {"trials": TRIALS, "max_tokens": MAX_TOKENS, "gamma": 4, "context": 1024}, results)
    return 0


def speed(session: Any, num_draft_tokens: int | None) -> Callable[[], float]:
    """Return a side that goes through the built-in code prompts, one a trial."""
    prompts = [prompt.content for prompt in built_in_prompts() if prompt.kind == "code"]
    turn = count()

    def side() -> float:
        prompt = prompts[next(turn) % len(prompts)]
        result = session.generate(prompt, GREEDY, max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens, seed=1)
        return float(result.stats.tokens_per_s)

    return side


def run(session: Any, params: SamplingParams, num_draft_tokens: int) -> Any:
    return session.generate(CODE_PROMPT, params, max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens, seed=1)


def overhead(session: Any, params: SamplingParams) -> float:
    """Return the share of the decoding time spent outside llama_decode."""
    run(session, params, 4)  # the prompt is in both caches afterwards
    with native_seconds() as seconds:
        stats = run(session, params, 4).stats
    # With warm caches only the first pass belongs to the prefill.
    return float((stats.wall_s - sum(seconds[1:])) / stats.wall_s)


@contextmanager
def native_seconds() -> Iterator[list[float]]:
    """Collect the duration of every llama_decode call."""
    original, seconds = native.llama_decode, list[float]()

    def timed(*arguments: Any) -> int:
        started = perf_counter()
        code: int = original(*arguments)
        seconds.append(perf_counter() - started)
        return code

    native.llama_decode = timed
    try:
        yield seconds
    finally:
        native.llama_decode = original


def bare(session: Any, prompt: list[int]) -> float:
    """Return tokens per second of a loop of llama_decode and argmax."""
    context = session.engine.target
    context.truncate(0, 0)
    token = int(np.argmax(context.decode([Span(0, prompt, 1)])[-1]))
    pointer, batch = context._pointer, Batch(1, native.llama_batch)
    size, position = context.vocabulary_size, len(prompt)
    started = perf_counter()
    for i in range(MAX_TOKENS - 1):
        batch.fill([Span(0, [token], 1)], [position + i])
        native.llama_decode(pointer, batch.native(1))
        token = int(np.argmax(np.ctypeslib.as_array(native.llama_get_logits(pointer), (size,))))
    return (MAX_TOKENS - 1) / (perf_counter() - started)


MEMORY_PROGRAM = """
import resource, sys, localspec
from pathlib import Path
session = localspec.load_pair("qwen2.5-coder-1.5b", context=4096, backend="llamacpp")
session.generate("Count from one to a thousand in words. " * 60, max_tokens=64, num_draft_tokens=4)
pair = session.pair
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
files = sum(header.path.stat().st_size for header in (pair.target_header, pair.draft_header))
caches = sum(header.cache_bytes(4096) for header in (pair.target_header, pair.draft_header))
print(peak, files, caches)
"""


def memory() -> dict[str, int]:
    """Return the peak memory of the default pair in a fresh process beside what it must hold."""
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True)
    peak, files, caches = map(int, done.stdout.split())
    extra = peak - files - caches
    print(f"peak {peak / 1e6:.0f} MB = files + caches + {extra / 1e6:.0f} MB", file=sys.stderr)
    return {"peak_bytes": peak, "file_bytes": files, "cache_bytes": caches, "extra_bytes": extra}


if __name__ == "__main__":
    sys.exit(main())
