"""Write what documents take from elsewhere: benchmark tables into README.md, help texts into docs/cli.md.

    python scripts/render_docs.py            writes
    python scripts/render_docs.py --check    leaves with 1 and names the files that are stale

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ("1", "2", "4", "6")


def main() -> int:
    wanted = {ROOT / "README.md": readme(), ROOT / "docs" / "cli.md": cli_reference()}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run: python scripts/render_docs.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, part in (("transcript", transcript), ("results", policy_table), ("engine", engine_table)):
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        body = part()
        text = pattern.sub(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
    return text


def record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def transcript() -> str:
    """Return the first answers of the recorded chat."""
    text = (ROOT / "docs" / "transcript.md").read_text(encoding="utf-8")
    start, end = text.index("$ localspec chat"), text.index("> /stats")
    return f"~~~~\n{text[start:end].rstrip()}\n~~~~\n"


def policy_table() -> str:
    data = record("policy")
    machine, summary = data["machine"], data["results"]["summary"]
    lines = [
        f"Measured on {machine['cores']} cores ({machine['cpu']}), {data['settings']['trials']} alternating trials a"
        " cell, tokens per second over plain decoding's in the same run; predicted by `calibrate` / measured:",
        "",
        "| target | text | T | γ = 1 | γ = 2 | γ = 4 | γ = 6 | auto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in data["results"]["cells"]:
        speeds = [f"{cell['predicted'][g]:.2f} / {cell['measured'][g]['pooled']:.2f}" for g in LENGTHS]
        target = "F16" if cell["pair"].endswith("f16") else "Q4_K_M"
        auto = f"**{cell['auto over plain']['pooled']:.2f}**"
        lines.append(f"| {target} | {cell['kind']} | {cell['temperature']:g} | {' | '.join(speeds)} | {auto} |")
    lines += [
        "",
        f"The prediction missed by {summary['prediction error, median']:.1%} in the median and by"
        f" {summary['prediction error, worst']:.0%} at worst; `auto` was never below"
        f" {summary['auto over plain, worst']:.2f} of plain decoding and"
        f" {summary['auto over best fixed, worst']:.2f} of the best fixed length in hindsight.",
        "",
    ]
    return "\n".join(lines)


def engine_table() -> str:
    data = record("engine")
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
        f"Peak memory of the default pair at a context of 4096: {memory['peak_bytes'] / 1e6:.0f} MB, which is both"
        f" files, both caches and {memory['extra_bytes'] / 1e6:.0f} MB.",
        "",
    ]
    return "\n".join(lines)


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


if __name__ == "__main__":
    sys.exit(main())
