"""Kill a batch again and again, run it again each time, and compare with one that was left alone.

    python scripts/stress_batch.py                       200 rows, 30 kills, SmolLM2 with its Q4_0 copy as draft
    python scripts/stress_batch.py --rows 20 --kills 4

Half of the rows are greedy, half are drawn with a fixed seed and the coupled rule: both are to repeat to the token,
near-ties of the kernels aside, whose rounding differs with what else is in a pass. Such a tie is measured: the two
tokens must be closer than twice the noise of the row. Prints one line of JSON; leaves with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _bench import ROOT

TOPICS = ("the sea", "compilers", "bread", "a lighthouse", "prime numbers", "owls", "trains", "rain", "chess", "tea")
KINDS = ("Write a sentence about {}.", "What is the first thing to know about {}?", "List three words for {}.")
TEMPERATURE = 0.8


@dataclass(slots=True)
class Report:
    """What happened.

    Attributes:
        rows: in the prompt file.
        kills: SIGKILLs that met a running batch.
        lines_at_kill: whole lines in the file at each of them.
        torn: how often the last line was cut short.
        equal: rows with the tokens of the run that was left alone.
        near_ties: rows that first differ where the noise of the logits decides.
        margins: of these and of the problems: how far apart the two tokens were, and the noise.
        problems: broken promises.
    """

    rows: int
    kills: int = 0
    lines_at_kill: list[int] = field(default_factory=list)
    torn: int = 0
    equal: int = 0
    near_ties: int = 0
    margins: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a batch again and again, and check what it leaves.")
    parser.add_argument("--target", default="smollm2-135m-q4_1")
    parser.add_argument("--draft", default="smollm2-135m-q4_0")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--parallel", default="4")
    parser.add_argument("--gamma", default="2")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = stress(options, Path(directory))
    print(json.dumps(asdict(report)))
    return 1 if report.problems else 0


def stress(options: argparse.Namespace, directory: Path) -> Report:
    prompts, killed, alone = (directory / name for name in ("prompts.jsonl", "killed.jsonl", "alone.jsonl"))
    rows = list(make_rows(options.rows))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    report = Report(options.rows)
    subprocess.run(command(options, prompts, alone), check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    chance = random.Random(options.seed)
    for at in sorted(chance.randrange(options.rows) for _ in range(options.kills)):
        kill_once(command(options, prompts, killed), killed, at, chance.uniform(0, 0.2), report)
    code = subprocess.run(command(options, prompts, killed), cwd=ROOT, stderr=subprocess.DEVNULL).returncode
    if code != 0:
        report.problems.append(f"the last run left with {code}")
    compare(options, rows, read(killed, report), read(alone, report), report)
    return report


def make_rows(count: int) -> Any:
    for i in range(count):
        prompt = KINDS[i // len(TOPICS) % len(KINDS)].format(TOPICS[i % len(TOPICS)]) + f" ({i})"
        drawn = {"temperature": TEMPERATURE, "rule": "coupled"} if i % 2 else {"temperature": 0}
        yield {"id": f"row-{i}", "prompt": prompt, **drawn}


def command(options: argparse.Namespace, prompts: Path, output: Path) -> list[str]:
    models = ["--target", options.target, "--draft", options.draft, "--ctx", "256", "--threads", options.threads]
    how = ["--parallel", options.parallel, "--gamma", options.gamma, "--seed", "1"]
    # Cuts that hardly ever move a token in or out, so that a near-tie can be measured without building a law.
    laws = ["--top-k", "40", "--top-p", "1", "--min-p", "0", "--max-tokens", str(options.max_tokens)]
    run = [sys.executable, "-m", "localspec", "batch", str(prompts), "-o", str(output)]
    return [*run, *models, *how, *laws]


def kill_once(run: list[str], output: Path, at: int, delay_s: float, report: Report) -> None:
    """Run until ``at`` lines are there, and a random moment longer; then kill, and look at what is left."""
    child = subprocess.Popen(run, cwd=ROOT, stderr=subprocess.DEVNULL)
    while child.poll() is None and num_lines(output) < at:
        time.sleep(0.002)
    time.sleep(delay_s)
    if child.poll() is None:
        child.kill()
        report.kills += 1
    elif child.returncode != 0:
        report.problems.append(f"a run left with {child.returncode}")
    child.wait()
    if output.exists():
        data = output.read_bytes()
        report.torn += not data.endswith(b"\n") and bool(data)
        report.lines_at_kill.append(data.count(b"\n"))
        check_lines(data[: data.rfind(b"\n") + 1], report)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_lines(data: bytes, report: Report) -> dict[str, dict[str, Any]]:
    records = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            report.problems.append(f"line {number} is no JSON")
            continue
        if record["id"] in records:
            report.problems.append(f"{record['id']} is there twice")
        if "error" in record:
            report.problems.append(f"{record['id']}: {record['error']['message']}")
        records[record["id"]] = record
    return records


def read(path: Path, report: Report) -> dict[str, dict[str, Any]]:
    return check_lines(path.read_bytes(), report)


def compare(options: argparse.Namespace, rows: list[Any], killed: Any, alone: Any, report: Report) -> None:
    if list(killed) != [row["id"] for row in rows]:
        report.problems.append("the rows are not all there, in order")
        return
    differing = [row for row in rows if killed[row["id"]]["tokens"] != alone[row["id"]]["tokens"]]
    report.equal = len(rows) - len(differing)
    if not differing:
        return
    from localspec.backend.llamacpp import LlamaContext
    from localspec.session import load_pair

    with load_pair(target=options.target, use_draft=False, context=256, threads=int(options.threads)) as session:
        context = LlamaContext(session.pair.target.model, capacity=256, threads=int(options.threads))
        for row in differing:
            one, other = alone[row["id"]], killed[row["id"]]
            margin, noise = near_tie(context, session.encode(row["prompt"]), row, one, other["tokens"])
            report.near_ties += margin <= 2 * noise
            report.margins.append((round(margin, 4), round(noise, 4)))
            if margin > 2 * noise:
                report.problems.append(f"{row['id']} differs by {margin:.3f} where the noise is {noise:.3f}")
        context.close()


def near_tie(context: Any, prompt: list[int], row: Any, one: Any, other: list[int]) -> tuple[float, float]:
    """Return how far apart the first two tokens that differ are, and the noise of the row they come from: logits.

    The noise is between passes of several sizes, over the prompt as well: a batch reads it together with others.
    """
    from localspec.backend import Span
    from localspec.sampling import PositionNoise

    plain = one["tokens"]
    at = next(i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    prefix = [*prompt, *plain[:at]]
    found = []
    for size in (1, 2, 3, 8, 12, 32):
        context.truncate(0, 0)
        while (held := context.length(0)) < len(prefix):
            tokens = prefix[held : held + size]
            padding = [tokens[-1]] * min(size - len(tokens), context.capacity - held - len(tokens))
            logits = context.decode([Span(0, [*tokens, *padding], len(tokens) + len(padding))])
        found.append(logits[len(tokens) - 1].astype(np.float64))
    noise = max(float(np.abs(logits - found[0]).max()) for logits in found[1:])
    ids = np.array([plain[at], other[at]])
    margin = float(found[0][ids[0]] - found[0][ids[1]])
    if row["temperature"]:
        arrivals = np.log(PositionNoise(one["seed"], len(prefix)).at(ids))
        margin -= TEMPERATURE * float(arrivals[0] - arrivals[1])
    return abs(margin), noise


if __name__ == "__main__":
    sys.exit(main())
