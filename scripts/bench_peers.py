"""localspec beside llama-server, llama-cpp-python and node-llama-cpp, on the same files, in turn within one run.

    python scripts/setup_peers.py               once: builds llama-server, fetches node-llama-cpp
    python scripts/bench_peers.py               writes benchmarks/peers.json
    python scripts/bench_peers.py --quick       fewer sides, rounds and tokens; writes nothing unless --output
    python scripts/bench_peers.py --kinds code editing prose --sides "server|auto" --rounds 15
                                                only these kinds of text, only sides whose name matches
    python scripts/bench_peers.py ... --add     keeps what the file has of other pairs and sides

In a round every side answers the same prompt, one after the other, at each temperature; rounds go through the kinds
of text and alternate their order. Each side is a process of its own that lives for its turn only, so that no idle one
takes a core or memory. Ratios are made round by round.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _bench import RESULTS, Spread, machine, ratios
from _peers import Answer, Job, Launcher, Peer, PeerError, memory
from setup_peers import PEERS_FILE, default_folder

from localspec.backend.ik_library import find_library
from localspec.backend.threads import usable_cores
from localspec.calibration.prompts import CalibrationPrompt, built_in_prompts, take_turns
from localspec.errors import BackendError
from localspec.loading import find_files

PAIRS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-f16")
TEMPERATURES = (0.0, 0.8)
LENGTHS = (2, 3, 4, 8)
SERVER_DEFAULT_LENGTH = 3
SURETY = 0.75
CONTEXT = 4096
WARM_UP_TOKENS = 12

SERVER, LLAMA_CPP_PYTHON, NODE, OURS = "llama-server", "llama-cpp-python", "node-llama-cpp", "localspec"
AUTOMATIC = (f"{OURS}, auto", f"{OURS} on ik, auto", f"{OURS} on ik, cut draft, auto")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to ask a side.

    Attributes:
        name: what tables call it.
        num_draft_tokens: for localspec; None is its own choice.
        temperatures: at which it is asked.
    """

    name: str
    num_draft_tokens: int | None = None
    temperatures: Sequence[float] = TEMPERATURES


@dataclass(frozen=True, slots=True)
class Side:
    """A program with its models, and the settings it is asked with in one turn."""

    launch: Callable[[], Peer]
    settings: Sequence[Setting]


@dataclass(slots=True)
class Cell:
    """What one setting did at one temperature, an entry a round."""

    answers: list[Answer] = field(default_factory=list)
    peak_bytes: int = 0
    resident_bytes: int = 0

    def per_round(self, quantity: str) -> list[float]:
        """Return tokens_per_s, decoded_per_s or first_s of each round."""
        return [getattr(answer, quantity) for answer in self.answers]

    def of(self, rounds: Sequence[int]) -> Cell:
        """Return what it did in some of the rounds."""
        return Cell([self.answers[i] for i in rounds], self.peak_bytes, self.resident_bytes)

    def summary(self, baseline: Cell) -> dict[str, Any]:
        """Return what the committed file holds of it; ``baseline`` is what speeds are compared with."""
        steps = sum(answer.steps or 0 for answer in self.answers)
        spreads = {name: Spread.of(self.per_round(name)) for name in ("tokens_per_s", "decoded_per_s", "first_s")}
        return {
            **spreads,
            "over_plain_server": ratios(self.per_round("tokens_per_s"), baseline.per_round("tokens_per_s")),
            "tokens_per_step": sum(a.tokens for a in self.answers) / steps if steps else None,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "rounds": [{"tokens": a.tokens, "first_s": a.first_s, "total_s": a.total_s} for a in self.answers],
        }


Cells = dict[tuple[float, str], Cell]


def main() -> int:
    options = _options()
    peers = json.loads((options.peers / PEERS_FILE).read_text(encoding="utf-8"))
    prompts = take_turns([p for p in built_in_prompts() if p.kind in options.kinds])[: options.rounds]
    results: dict[str, Any] = {}
    for pair in options.pairs:
        files = find_files(pair, progress=True)
        assert files.draft is not None
        launcher = Launcher(files.target, files.draft, usable_cores(), CONTEXT)
        everyone = chosen(
            sides(launcher, peers, options.lengths, quick=options.quick, cut=options.cut), options.sides
        )
        cells = run_pair(launcher, everyone, prompts, options)
        kinds = [prompt.kind for prompt in prompts]
        results[pair] = {"temperatures": report(cells, options.lengths, kinds)}
    settings = {
        "kinds": list(dict.fromkeys(prompt.kind for prompt in prompts)),
        "max_tokens": options.tokens,
        "context": CONTEXT,
        "threads": usable_cores(),
        "peers": {name: value for name, value in peers.items() if name.endswith("version")},
    }
    record = {"machine": machine(), "settings": settings, "results": results}
    if options.add:
        record = merged(json.loads(options.output.read_text(encoding="utf-8")), record)
    if options.output:
        text = json.dumps(record, indent=1, default=_plain)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(record, default=_plain))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_peers.py", description="Compare localspec with its peers.")
    parser.add_argument("--quick", action="store_true", help="fewer sides, rounds and tokens: six minutes at most")
    parser.add_argument("--rounds", type=int, help="how often each side answers (default 10, quick: 1)")
    parser.add_argument("--tokens", type=int, help="of each answer, at most (default 128, quick: 48)")
    parser.add_argument("--kinds", nargs="+", default=sorted({p.kind for p in built_in_prompts()}), help="of text")
    parser.add_argument("--sides", default="", help="a regular expression: which sides run, by name")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), help="names in models.toml")
    parser.add_argument("--peers", type=Path, default=default_folder(), help="what scripts/setup_peers.py filled")
    parser.add_argument("--cut", type=Path, help="a draft of `localspec models trim`, for one side more")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other pairs and sides")
    parser.add_argument("--output", type=Path, help="where to write (default benchmarks/peers.json, quick: nowhere)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 10)
    options.tokens = options.tokens or (48 if options.quick else 128)
    options.output = options.output or (None if options.quick else RESULTS / "peers.json")
    options.lengths = (SERVER_DEFAULT_LENGTH,) if options.quick else LENGTHS
    return options


def sides(
    launcher: Launcher, peers: dict[str, Any], lengths: Sequence[int], *, quick: bool, cut: Path | None = None
) -> list[Side]:
    """Return everything that takes turns; a quick run leaves out plain decoding by what is also run with a draft."""
    program = peers["llama_server"]
    ours = [Setting(f"{OURS}, γ {length}", length) for length in lengths] + [Setting(f"{OURS}, auto")]
    found = [Side(partial(launcher.llama_server, program), [Setting(f"{SERVER}, plain")])]
    for length in lengths:
        name = f"{SERVER}, draft {length}"
        found.append(Side(partial(launcher.llama_server, program, draft_tokens=length), [Setting(name)]))
    found.append(Side(partial(launcher.localspec, speculative=True), ours))
    try:
        find_library()
    except BackendError as error:
        print(f"without ik_llama.cpp: {error}", file=sys.stderr)
    else:
        fast = [Setting(f"{OURS} on ik, plain", 0), Setting(f"{OURS} on ik, auto")]
        found.append(Side(partial(launcher.localspec, speculative=True, backend="ik"), fast))
        if cut:
            with_cut = partial(launcher.localspec, speculative=True, backend="ik", draft=cut)
            found.append(Side(with_cut, [Setting(f"{OURS} on ik, cut draft, auto")]))
    warm = [temperature for temperature in TEMPERATURES if temperature]  # at 0 both ways to draw are one
    for length in lengths:
        name = f"{SERVER}, draft {length}, probabilistic"
        launch = partial(launcher.llama_server, program, draft_tokens=length, sampling="probabilistic")
        found.append(Side(launch, [Setting(name, temperatures=warm)]))
    found.append(Side(partial(launcher.localspec, speculative=False), [Setting(f"{OURS}, plain", 0)]))
    lookup = Setting(f"{LLAMA_CPP_PYTHON}, prompt lookup")
    found.append(Side(partial(launcher.llama_cpp_python, lookup=True), [lookup]))
    if not quick:
        name = f"{SERVER}, draft {max(lengths)}, p-min {SURETY}"
        launch = partial(launcher.llama_server, program, draft_tokens=max(lengths), surety=SURETY)
        found.append(Side(launch, [Setting(name)]))
        found.append(Side(partial(launcher.llama_cpp_python, lookup=False), [Setting(f"{LLAMA_CPP_PYTHON}, plain")]))
    if peers["node"]:
        # By default a step takes what the draft has ready, and waits for nothing.
        waiting = f"{NODE}, draft, waiting for {SERVER_DEFAULT_LENGTH}"
        drafting: dict[str, int | None] = {} if quick else {f"{NODE}, plain": None}
        drafting |= {f"{NODE}, draft": 0, waiting: SERVER_DEFAULT_LENGTH}
        for name, least in drafting.items():
            start = partial(launcher.node, peers["node"], peers["node_folder"], least_drafted=least)
            found.append(Side(start, [Setting(name)]))
    return found


def chosen(everyone: Sequence[Side], pattern: str) -> list[Side]:
    """Return the sides with the settings whose name matches; plain llama-server is what all are compared with."""
    wanted = re.compile(f"^{SERVER}, plain$|{pattern}")
    kept = (Side(side.launch, [s for s in side.settings if wanted.search(s.name)]) for side in everyone)
    return [side for side in kept if side.settings]


def run_pair(
    launcher: Launcher, everyone: Sequence[Side], prompts: Sequence[CalibrationPrompt], options: argparse.Namespace
) -> Cells:
    """Run all rounds; what each setting did, by temperature and name."""
    cells: Cells = {}
    with closing(launcher.localspec(speculative=False)) as encoder:
        texts = [str(prompt.content) for prompt in prompts]
        encoded = [encoder.encode(text) for text in texts]
    for turn, (text, prompt) in enumerate(zip(texts, encoded, strict=True)):
        jobs = _Jobs(text, prompt, options.tokens, seed=turn + 1)
        for side in everyone if turn % 2 == 0 else everyone[::-1]:
            started = time.monotonic()
            with closing(side.launch()) as peer:
                for temperature, setting, answer in _turn(peer, side.settings, jobs):
                    cell = cells.setdefault((temperature, setting.name), Cell())
                    cell.answers.append(answer)
                    held = memory(peer.process)
                    cell.peak_bytes = max(cell.peak_bytes, held.peak_bytes)
                    cell.resident_bytes = max(cell.resident_bytes, held.resident_bytes)
                    print(
                        f"{turn + 1}/{len(prompts)} {setting.name}, T {temperature}: {answer.tokens} tokens,"
                        f" {answer.tokens_per_s:.1f}/s, first {answer.first_s:.2f} s",
                        file=sys.stderr,
                    )
            print(f"   turn of {time.monotonic() - started:.1f} s", file=sys.stderr)
    return cells


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Makes the requests of one round."""

    text: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int

    def at(self, temperature: float, setting: Setting, max_tokens: int | None = None) -> Job:
        return Job(
            self.text, self.prompt, temperature, max_tokens or self.max_tokens, self.seed, setting.num_draft_tokens
        )


def _turn(peer: Peer, settings: Sequence[Setting], jobs: _Jobs) -> Iterator[tuple[float, Setting, Answer]]:
    for temperature in TEMPERATURES:
        for setting in settings:
            if temperature in setting.temperatures:
                peer.ask(jobs.at(temperature, setting, WARM_UP_TOKENS))
                yield temperature, setting, peer.ask(jobs.at(temperature, setting))


def report(cells: Cells, lengths: Sequence[int], kinds: Sequence[str]) -> dict[str, Any]:
    """Return summaries of all cells, and the comparisons that matter, by temperature and by kind of text."""
    found = {}
    for temperature in TEMPERATURES:
        here = {name: cell for (t, name), cell in cells.items() if t == temperature}
        baseline = here[f"{SERVER}, plain"]
        found[f"{temperature:g}"] = {
            "sides": {name: here[name].summary(baseline) for name in sorted(here)},
            "ratios": comparisons(here, lengths),
            "kinds": by_kind(here, kinds),
        }
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a record of both; what both have is the new one's, and a side's ratios are to llama-server in its run.

    Raises:
        PeerError: they are of other texts or lengths.
    """
    for key in ("kinds", "max_tokens", "context", "threads"):
        if old["settings"].get(key) != new["settings"][key]:
            raise PeerError(f"--add: {key} is {new['settings'][key]}, in the file {old['settings'].get(key)}")
    results = dict(old["results"])
    for pair, found in new["results"].items():
        before = results.get(pair, {}).get("temperatures", {})
        results[pair] = {
            "temperatures": {t: _merged_cell(before.get(t), cell) for t, cell in found["temperatures"].items()}
        }
    return new | {"results": results}


def _merged_cell(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    if old is None:
        return new
    sides = old["sides"] | new["sides"]
    kinds = {kind: found if found["ratios"] else old["kinds"][kind] for kind, found in new["kinds"].items()}
    baseline = f"{SERVER}, plain"
    if not any(name in new["sides"] for name in AUTOMATIC):
        sides[baseline] = old["sides"][baseline]  # what the ratios by kind belong to
    return {"sides": dict(sorted(sides.items())), "ratios": old["ratios"] | new["ratios"], "kinds": kinds}


def comparisons(cells: dict[str, Cell], lengths: Sequence[int]) -> dict[str, Any]:
    """Return localspec over llama-server: at the same draft length, and each at its best; over 1 is faster."""
    likes = [
        (f"{OURS}, γ {length}", f"{SERVER}, draft {length}{sampling}")
        for length in lengths
        for sampling in ("", ", probabilistic")
    ]
    likes.append((f"{OURS}, plain", f"{SERVER}, plain"))
    likes += [(name, best_of(cells, SERVER)) for name in AUTOMATIC]
    return {
        f"{ours} / {theirs}{' (its best)' if ours in AUTOMATIC else ''}": over(cells[ours], cells[theirs])
        for ours, theirs in likes
        if {ours, theirs} <= cells.keys()
    }


def by_kind(cells: dict[str, Cell], kinds: Sequence[str]) -> dict[str, Any]:
    """Return localspec's own choice over llama-server's best setting for each kind of text, best in hindsight."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        here = {name: cell.of([i for i, k in enumerate(kinds) if k == kind]) for name, cell in cells.items()}
        best = best_of(here, SERVER)
        ratios_here = {name: over(here[name], here[best]) for name in AUTOMATIC if name in here}
        found[kind] = {"best of llama-server": best, "ratios": ratios_here}
    return found


def best_of(cells: dict[str, Cell], program: str) -> str:
    """Return the setting of a program that was fastest."""
    names = (name for name in cells if name.startswith(program))
    return max(names, key=lambda name: Spread.of(cells[name].per_round("tokens_per_s")).median)


def over(ours: Cell, theirs: Cell) -> dict[str, Any]:
    """Return one side over another, round by round."""
    quantities = ("tokens_per_s", "decoded_per_s", "first_s")
    found: dict[str, Any] = {q: ratios(ours.per_round(q), theirs.per_round(q)) for q in quantities}
    return found | {"peak_bytes": ours.peak_bytes / theirs.peak_bytes}


def _plain(value: Spread) -> dict[str, float]:
    return {"median": value.median, "low": value.low, "high": value.high}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PeerError, OSError) as error:
        sys.exit(f"{error}; scripts/setup_peers.py sets the peers up")
