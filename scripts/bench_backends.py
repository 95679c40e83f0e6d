"""llama.cpp against ik_llama.cpp on the same files: what passes cost, how fast text comes, how much kernels differ.

    python scripts/bench_backends.py            writes benchmarks/backends.json

Each backend has a process of its own, and they take turns; a ratio is that of two neighbouring turns. ik_llama.cpp
has to be at hand (scripts/build_ik.py). Speed is tokens after the first per second after the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _bench import CHAT_PROMPT, CODE_PROMPT, EDIT_PROMPT, Spread, ratios, write

BACKENDS = ("llamacpp", "ik")
SIZES = (1, 2, 3, 4, 5, 8)
DEPTH = 256
PROMPTS = {"code": CODE_PROMPT, "editing": EDIT_PROMPT, "chat": CHAT_PROMPT}
MODES: dict[str, int | None] = {"plain": 0, "4 drafted": 4, "auto": None}
NOISE_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", default="qwen2.5-coder-1.5b")
    parser.add_argument("--target", help="a file, with --draft, in place of the pair")
    parser.add_argument("--draft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    workers = {name: Worker(name, sys.argv[1:]) for name in BACKENDS}
    builds = {name: worker.ask(what="build") for name, worker in workers.items()}
    passes = {model: curves(workers, model, options.rounds) for model in ("target", "draft")}
    results = {
        "builds": builds,
        "passes": passes,
        "noise": {name: worker.ask(what="noise") for name, worker in workers.items()},
        "generation": {text: generation(workers, text, options) for text in options.texts},
    }
    for worker in workers.values():
        worker.close()
    settings = {"pair": options.pair, "rounds": options.rounds, "tokens": options.tokens, "depth": DEPTH}
    write("backends", settings, results)
    return 0


class Worker:
    """A process with one backend, asked in lines of JSON."""

    def __init__(self, backend: str, arguments: list[str]) -> None:
        command = [sys.executable, str(Path(__file__)), *arguments, "--worker", backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("bench_backends: a backend's process ended, see above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def curves(workers: dict[str, Worker], model: str, rounds: int) -> dict[str, Any]:
    """Return milliseconds of passes over n tokens with n rows, by backend, and v(n)."""
    times: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            times[name].append(worker.ask(what="curve", model=model))
    print(f"{model} passes", file=sys.stderr)
    out: dict[str, Any] = {"sizes": SIZES}
    for name, turns in times.items():
        columns = list(zip(*turns, strict=True))
        out[name] = {
            "ms": [Spread.of([1000 * t for t in column]) for column in columns],
            "v": [ratios(list(column), list(columns[0])) for column in columns],
        }
    both = [list(zip(*times[name], strict=True)) for name in BACKENDS]
    out["llamacpp over ik"] = [ratios(list(a), list(b)) for a, b in zip(*both, strict=True)]
    return out


def generation(workers: dict[str, Worker], text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of every backend and mode, and what each is of llama.cpp's plain decoding."""
    speeds: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in MODES} for name in workers}
    for turn in range(options.rounds):
        for mode, num in MODES.items():
            for name, worker in workers.items():
                speeds[name][mode].append(worker.ask(what="text", prompt=PROMPTS[text], num=num, seed=turn))
    print(text, file=sys.stderr)
    plain = speeds["llamacpp"]["plain"]
    return {
        name: {
            mode: {"tokens_per_s": Spread.of(values), "over plain llama.cpp": ratios(values, plain)}
            for mode, values in modes.items()
        }
        for name, modes in speeds.items()
    }


# What a process does


def work(options: argparse.Namespace) -> int:
    from localspec.session import load_pair

    files = {"target": options.target, "draft": options.draft} if options.target else {"pair": options.pair}
    session = load_pair(**files, context=1024, use_profile=False, backend=options.worker)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(session, options.tokens, **question)), flush=True)
    return 0


def answer(session: Any, max_tokens: int, *, what: str, **values: Any) -> Any:
    from localspec.sampling import SamplingParams

    if what == "build":
        return session.pair.target.model.binding.build()
    if what == "curve":
        return curve(getattr(session.pair, values["model"]))
    if what == "noise":
        return noise(session.pair.target, session.encode(EDIT_PROMPT, raw=True))
    result = session.generate(
        values["prompt"],
        SamplingParams(temperature=0),
        max_tokens=max_tokens,
        num_draft_tokens=values["num"],
        seed=values["seed"],
    )
    return result.stats.tokens_per_s


def curve(context: Any) -> list[float]:
    """Return seconds of one pass of each size, the median of five, at a depth of DEPTH tokens."""
    from localspec.backend import Span

    tokens = [(1000 + 37 * i) % context.vocabulary_size for i in range(DEPTH + max(SIZES))]
    context.truncate(0, 0)
    context.decode([Span(0, tokens[:DEPTH], 0)])
    seconds = []
    for size in SIZES:
        times = []
        for _ in range(6):
            started = perf_counter()
            context.decode([Span(0, tokens[DEPTH : DEPTH + size], size)])
            times.append(perf_counter() - started)
            context.truncate(0, DEPTH)
        seconds.append(median(times[1:]))
    context.truncate(0, 0)
    return seconds


def noise(context: Any, text: list[int]) -> dict[str, Any]:
    """Return how far logits differ between passes of one token and of several over the same text.

    In logits: the largest difference in a row, and the root mean square in units of the row's deviation.
    """
    import numpy as np

    from localspec.backend import Span

    start, tokens = len(text) - NOISE_TOKENS, text[-NOISE_TOKENS:]

    def rows(size: int) -> Any:
        context.truncate(0, 0)
        context.decode([Span(0, text[:start], 0)])
        parts = [context.decode([Span(0, tokens[at : at + size], size)]).copy() for at in range(0, len(tokens), size)]
        context.truncate(0, 0)
        return np.concatenate(parts)

    single = rows(1)
    again = rows(1)
    out: dict[str, Any] = {"single passes, repeated": float(np.abs(single - again).max())}
    for size in (2, 4, 8):
        difference = rows(size) - single
        out[str(size)] = {
            "largest, median row": float(np.median(np.abs(difference).max(axis=1))),
            "largest of all": float(np.abs(difference).max()),
            "rms over deviation": float(np.median(np.sqrt((difference**2).mean(axis=1)) / single.std(axis=1))),
            "likeliest differs": int((np.argmax(rows(size), axis=1) != np.argmax(single, axis=1)).sum()),
        }
    return out


if __name__ == "__main__":
    sys.exit(main())
