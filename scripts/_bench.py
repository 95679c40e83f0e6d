"""What the benchmarks share: alternating trials, medians with spread, the machine, a committed JSON file.

A ratio of two sides measured in turn within one run is a result; an absolute time on a shared machine is not.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

from localspec.benchmark import Spread, ratios
from localspec.benchmark import alternate as in_turn

__all__ = [
    "CHAT_PROMPT",
    "CODE_PROMPT",
    "EDIT_PROMPT",
    "RESULTS",
    "ROOT",
    "Spread",
    "alternate",
    "machine",
    "ratios",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks"

CODE_PROMPT = "Write a Python class for a least-recently-used cache with get and put in O(1), with type hints."
CHAT_PROMPT = "Tell me about a walk through a harbour town on a foggy morning."
EDIT_PROMPT = """Add type hints and docstrings to this code and change nothing else:

def mean(xs):
    return sum(xs) / len(xs)

def variance(xs):
    m = mean(xs)
    return sum((x - m) ** 2 for x in xs) / (len(xs) - 1)

def histogram(xs, bins):
    low, high = min(xs), max(xs)
    width = (high - low) / bins
    counts = [0] * bins
    for x in xs:
        index = min(int((x - low) / width), bins - 1)
        counts[index] += 1
    return counts
"""


def alternate(
    sides: Mapping[str, Callable[[], float]], trials: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Do as ``localspec.benchmark.alternate``, with a dot on stderr for each round."""

    def dot() -> None:
        print(".", end="", flush=True, file=sys.stderr)

    results = in_turn(sides, trials, warm_up=warm_up, progress=dot)
    print(file=sys.stderr)
    return results


def machine() -> dict[str, object]:
    """Say what ran, without saying whose it is."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "llama_cpp_python": version("llama-cpp-python"),
    }


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in facts.items()}
    wide = "AVX-512" if "avx512f" in fields.get("flags", "") else "AVX2" if "avx2" in fields.get("flags", "") else ""
    return f"{fields.get('model name', platform.machine())} {wide}".strip()


def write(name: str, settings: Mapping[str, object], results: Mapping[str, object]) -> None:
    """Write ``benchmarks/NAME.json`` and print it as one line."""
    record = {"machine": machine(), "settings": dict(settings), "results": dict(results)}
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, default=asdict)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(json.dumps(record, default=asdict))
