"""Write what documents take from elsewhere: benchmark tables and a plot, help texts into docs/cli.md.

    python scripts/render_docs.py            writes
    python scripts/render_docs.py --check    leaves with 1 and names the files that are stale

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _peers_page
import click
from _peers_page import spread

from localspec.wording import counted

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers.json"  # takes an hour and two builds to make: there only once it was made
UNMEASURED = "*Not measured yet: `python scripts/bench_peers.py` does it.*\n"
FILLED = (
    "README.md",
    "docs/backends.md",
    "docs/batch.md",
    "docs/choosing.md",
    "docs/exactness.md",
    "docs/how-it-works.md",
    "docs/peers.md",
    "docs/sampling.md",
)
PAIRS = {
    "Q4_K_M, Q4_K_M": "qwen2.5-coder-1.5b",
    "F16, Q4_0": "qwen2.5-coder-1.5b-f16",
}


def main() -> int:
    wanted = {ROOT / name: filled(ROOT / name) for name in FILLED}
    wanted[ROOT / "docs" / "cli.md"] = cli_reference()
    if PEERS.exists():
        wanted[ROOT / "docs" / "peers.svg"] = _peers_page.picture(load("peers"))
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run: python scripts/render_docs.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def filled(path: Path) -> str:
    """Return the text of a document with its generated parts renewed."""
    text = path.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        if f"<!-- begin {name} -->" not in text:
            continue
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        body = part()
        text = pattern.sub(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
    return text


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def transcript() -> str:
    """Return the first answers of the recorded chat."""
    text = (ROOT / "docs" / "transcript.md").read_text(encoding="utf-8")
    start, end = text.index("$ localspec chat"), text.index("> /stats")
    return f"~~~~\n{text[start:end].rstrip()}\n~~~~\n"


def rules_table() -> str:
    lines = ["| | rule | γ = 1 | 2 | 4 | 8 |", "|---|---|---|---|---|---|"]
    results = load("rules")["results"]
    for name, row in results.items():
        for rule in ("token", "block"):
            cells = [f"{row[rule][gamma]:.2f}" for gamma in (1, 2, 4, 8)]
            lines.append(f"| {name} | {rule} | {' | '.join(cells)} |")
    tokens = ", ".join(str(row["tokens"]) for row in results.values())
    return "\n".join([*lines, "", f"Tokens of text: {tokens}.", ""])


def sampling_table() -> str:
    lines = ["| | ms | softmaxes |", "|---|---|---|"]
    for name, value in load("sampling")["results"].items():
        lines.append(f"| {name} | {value['ms']['median']:.3f} | {value['softmaxes']['median']:.2f} |")
    return "\n".join([*lines, ""])


def calibration_table() -> str:
    """Return what ``calibrate --quick --json`` found for both pairs: predictions, by kind of text."""
    found = {name: load(f"calibrate-{pair}") for name, pair in PAIRS.items()}
    kinds = [kind for kind in next(iter(found.values()))["kinds"] if all(kind in f["kinds"] for f in found.values())]
    lines = [
        f"| target, draft | a pass over 4 tokens | a draft pass | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 3) + "|",
    ]
    for name, data in found.items():
        cells = [advice(data["kinds"][kind]) for kind in kinds]
        lines.append(f"| {name} | {data['verify_cost'][3]:.1f} | {data['cost_ratio']:.2f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def advice(choice: dict[str, Any]) -> str:
    length = choice["num_draft_tokens"]
    return f"{choice['speedup']:.2f}× with {length}" if length else "do not speculate"


def policy_table() -> str:
    """Return prediction against measurement, and the automatic policy against plain decoding and the best length."""
    found = load("policy")["results"]
    lengths = list(found["cells"][0]["predicted"])
    lines = [
        f"| target, draft | text | T | {' | '.join(f'γ = {g}' for g in lengths)} | `auto` | over the best γ |",
        "|---" * (len(lengths) + 5) + "|",
    ]
    names = {pair: name for name, pair in PAIRS.items()}
    for cell in found["cells"]:
        pairs = [f"{cell['predicted'][g]:.2f} / {cell['measured'][g]['even']:.2f}" for g in lengths]
        over_best = f"{cell['auto over best fixed']['median']:.2f} ({cell['best fixed']})"
        auto = f"{cell['auto over plain']['median']:.2f} | {over_best}"
        lines.append(
            f"| {names[cell['pair']]} | {cell['kind']} | {cell['temperature']} | {' | '.join(pairs)} | {auto} |"
        )
    summary = found["summary"]
    lines += [
        "",
        f"The prediction missed by {summary['prediction error, median']:.1%} in the median and by"
        f" {summary['prediction error, worst']:.1%} at worst; `auto` reached at least"
        f" {summary['auto over plain, worst']:.2f} of plain decoding and {summary['auto over best fixed, worst']:.2f}"
        " of the best fixed length.",
        "",
    ]
    return "\n".join(lines)


def engine_table() -> str:
    data = load("engine")
    results = data["results"]
    rows = [(name, value) for name, value in results.items() if name != "memory"]
    lines = ["| | median | range |", "|---|---|---|"]
    for name, value in rows:
        form = "{:.1%}" if "share" in name else "{:.2f}"
        shown = [form.format(value[key]) for key in ("median", "low", "high")]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} to {shown[2]} |")
    memory = results["memory"]
    lines += [
        "",
        f"Peak memory of the default pair at a context of 4096: {memory['peak_bytes'] / 1e6:.0f} MB; both files are"
        f" {memory['file_bytes'] / 1e6:.0f} MB, both caches {memory['cache_bytes'] / 1e6:.0f} MB when full.",
        "",
    ]
    return "\n".join(lines)


def agreement_table() -> str:
    """Return the acceptance rates that calibration found, by kind of text and temperature."""
    found = {name: load(f"calibrate-{pair}")["profile"]["agreement"] for name, pair in PAIRS.items()}
    kinds = list(dict.fromkeys(entry["kind"] for entries in found.values() for entry in entries))
    lines = [f"| target, draft | temperature | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for name, entries in found.items():
        rates = {(e["temperature"], e["kind"]): e["acceptance_rate"]["value"] for e in entries}
        for temperature in dict.fromkeys(temperature for temperature, _ in rates):
            cells = [f"{rates[temperature, kind]:.2f}" for kind in kinds]
            lines.append(f"| {name} | {temperature:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def of_peers(part: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return ``part`` of a comparison with other programs."""
    return lambda: part(load("peers")) if PEERS.exists() else UNMEASURED


def backends_table() -> str:
    """Return what ``bench_backends.py`` measured: passes, generation, noise between passes; nothing before that."""
    if not (ROOT / "benchmarks" / "backends.json").exists():
        return ""
    data = load("backends")
    results, passes = data["results"], data["results"]["passes"]
    sizes = passes["target"]["sizes"]
    lines = [f"| pass over n tokens, ms | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for model in ("target", "draft"):
        for name in ("llamacpp", "ik"):
            cells = [f"{p['median']:.1f}" for p in passes[model][name]["ms"]]
            lines.append(f"| {model}, {name} | {' | '.join(cells)} |")
    modes = list(next(iter(results["generation"].values()))["ik"])
    lines += ["", f"| speed over llama.cpp's plain | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|"]
    for text, backends in results["generation"].items():
        for name in ("llamacpp", "ik"):
            cells = [f"{backends[name][mode]['over plain llama.cpp']['median']:.2f}" for mode in modes]
            lines.append(f"| {text}, {name} | {' | '.join(cells)} |")
    lines += ["", "| logits of n at a time and one by one | 2 | 4 | 8 |", "|---|---|---|---|"]
    for name in ("llamacpp", "ik"):
        noise = [results["noise"][name][size] for size in ("2", "4", "8")]
        cells = [f"{n['rms over deviation']:.3f} (largest {n['largest of all']:.2f})" for n in noise]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    settings = data["settings"]
    lines += [
        "",
        f"Pair {settings['pair']}, {data['machine']['cores']} cores, {settings['depth']} tokens in the cache, greedy,"
        f" medians of {settings['rounds']} turns. Differences of logits: root mean square in units of a row's"
        " standard deviation, in the median row; in brackets the largest in logits.",
        "",
    ]
    return "\n".join(lines)


def batch_table() -> str:
    lines, notes = [], []
    data = load("batch")
    for pair, found in data["results"].items():
        speeds = found["tokens/s"]
        sizes, gammas = data["settings"]["parallel"], data["settings"]["gamma"]
        lines += [
            f"| sequences at once | {' | '.join(f'γ = {g}' for g in gammas)} |",
            "|---" * (len(gammas) + 1) + "|",
        ]
        for b in sizes:
            lines.append(f"| {b} | {' | '.join(spread(speeds[f'B={b} gamma={g}'], '{:.1f}') for g in gammas)} |")
        for name in ("llama-server", "llama-server with draft"):
            if name in speeds:
                lines.append(f"| {name} | {spread(speeds[name], '{:.1f}')} |{' |' * (len(gammas) - 1)}")
        auto = found["auto"]
        over = [
            f"{spread(found[key], '{:.2f}')} of {key.removeprefix('auto over ')}" for key in found if "over" in key
        ]
        chosen = f"{counted(auto['parallel'], 'sequence')}, γ = {auto['gamma']}"
        notes.append(f"{pair}: `auto` chose {chosen} and reached {', '.join(over)}.")
    settings = data["settings"]
    lines += [
        "",
        f"Tokens per second of {settings['records']} rows with answers of {settings['tokens']} tokens,"
        f" reading the prompts included; median of {settings['trials']} turns and range. llama-server"
        f" had as many slots as `auto` runs sequences.",
        *notes,
        "",
    ]
    return "\n".join(lines)


def lookup_table() -> str:
    data = load("lookup")
    lines = ["| | over plain decoding | tokens per step | copied tokens accepted |", "|---|---|---|---|"]
    for name, row in data["results"].items():
        per_step = row["tokens"] / row["steps"]
        accepted = f"{row['accepted']} of {row['drafted']}"
        lines.append(f"| {name} | {spread(row['lookup over plain'], '{:.2f}')} | {per_step:.2f} | {accepted} |")
    settings = data["settings"]
    return "\n".join(
        [
            *lines,
            "",
            f"Lookup without a draft model, Q4_K_M target, {settings['backend']}, {settings['tokens']} tokens an"
            f" answer, median of {settings['trials']} turns and range.",
            "",
        ]
    )


def mutants_table() -> str:
    lines = ["| what is broken | parts of `check` that notice it |", "|---|---|"]
    for name, parts in load("mutants")["failed"].items():
        lines.append(f"| {name} | {', '.join(parts) or 'none'} |")
    return "\n".join([*lines, ""])


def cli_reference() -> str:
    from localspec.cli import _program

    parts = ["# Command line\n\nGenerated from `--help`; `python scripts/render_docs.py` renews it.\n"]
    context = click.Context(_program, info_name="localspec", max_content_width=100, terminal_width=100)
    parts += _help(_program, context)
    return "\n".join(parts)


def _help(command: click.Command, context: click.Context) -> list[str]:
    level = "##" if context.parent is None else "###"
    parts = [f"{level} {context.command_path}\n\n```\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            parts += _help(
                child, click.Context(child, context, info_name=name, max_content_width=100, terminal_width=100)
            )
    return parts


PARTS: dict[str, Callable[[], str]] = {
    "transcript": transcript,
    "results": calibration_table,
    "agreement": agreement_table,
    "engine": engine_table,
    "policy": policy_table,
    "rules": rules_table,
    "sampling": sampling_table,
    "backends": backends_table,
    "batch": batch_table,
    "lookup": lookup_table,
    "mutants": mutants_table,
    "peers": of_peers(_peers_page.tables),
    "peer ratios": of_peers(_peers_page.comparisons),
    "peer setting": of_peers(_peers_page.setting),
    "peer kinds": of_peers(_peers_page.kinds),
}

if __name__ == "__main__":
    sys.exit(main())
