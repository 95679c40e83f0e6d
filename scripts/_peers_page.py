"""The tables and the picture of docs/peers.md, from benchmarks/peers.json; scripts/render_docs.py writes them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

FILES = {
    "qwen2.5-coder-1.5b": "Q4_K_M target, Q4_K_M draft",
    "qwen2.5-coder-1.5b-f16": "F16 target, Q4_0 draft",
}

_LABEL_WIDTH, _BAR_WIDTH, _ROW, _HEAD = 232, 220, 17, 42
_OURS, _OTHERS = "#1f6feb", "#9aa4b2"


def tables(data: dict[str, Any]) -> str:
    """Return one table of all sides for each pair and temperature."""
    parts = []
    for title, cell in _cells(data):
        parts += [f"**{title}**", "", _HEADER, "|---|---|---|---|---|---|---|---|"]
        parts += [_side(name, value) for name, value in cell["sides"].items()]
        parts.append("")
    return "\n".join(parts)


_HEADER = (
    "| | over llama-server, plain | tokens/s | after the first | tokens per step | first token, s | peak memory, MB"
    " | rounds |"
)


def _side(name: str, value: dict[str, Any]) -> str:
    step = value["tokens_per_step"]
    cells = [
        f"**{name}**" if name.startswith("localspec") else name,
        spread(value["over_plain_server"]),
        f"{value['tokens_per_s']['median']:.1f}",
        f"{value['decoded_per_s']['median']:.1f}",
        "" if step is None else f"{step:.2f}",
        f"{value['first_s']['median']:.2f}",
        f"{value['peak_bytes'] / 1e6:.0f}",
        f"{len(value['rounds'])}",
    ]
    return f"| {' | '.join(cells)} |"


def comparisons(data: dict[str, Any]) -> str:
    """Return localspec over llama-server, like with like."""
    lines = []
    for title, cell in _cells(data):
        lines += [f"**{title}**", "", "| | tokens/s | after the first | time to the first | peak memory |"]
        lines.append("|---|---|---|---|---|")
        for name, value in cell["ratios"].items():
            shown = [spread(value[quantity]) for quantity in ("tokens_per_s", "decoded_per_s", "first_s")]
            lines.append(f"| {name} | {' | '.join(shown)} | {value['peak_bytes']:.2f} |")
        lines.append("")
    return "\n".join(lines)


def kinds(data: dict[str, Any]) -> str:
    """Return localspec's own choice over llama-server's best setting, by kind of text."""
    lines = [
        "| | T | text | best of llama-server | localspec, auto | on ik_llama.cpp | and with a cut draft |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair, found in data["results"].items():
        for temperature, cell in found["temperatures"].items():
            for kind, value in cell["kinds"].items():
                shown = [
                    spread(value["ratios"][name]["tokens_per_s"]) if name in value["ratios"] else ""
                    for name in ("localspec, auto", "localspec on ik, auto", "localspec on ik, cut draft, auto")
                ]
                best = value["best of llama-server"].removeprefix("llama-server, ")
                lines.append(f"| {' | '.join([FILES.get(pair, pair), temperature, kind, best, *shown])} |")
    return "\n".join(lines) + "\n"


def setting(data: dict[str, Any]) -> str:
    """Return what was run, in a sentence, and the picture."""
    machine, settings = data["machine"], data["settings"]
    peers = settings["peers"]
    node = peers["node_llama_cpp_version"]
    versions = [f"llama-server of llama.cpp build {peers['llama_server_version'].split('.')[0]}"]
    versions.append(f"llama-cpp-python {machine['llama_cpp_python']}")
    versions += [f"node-llama-cpp {node}"] if node else []
    return (
        f"{machine['date']}, {machine['cpu']}, {settings['threads']} threads, a context of {settings['context']};"
        f" {', '.join(versions)}. Answers of up to {settings['max_tokens']} tokens: {', '.join(settings['kinds'])}."
        "\n\n"
        "![Tokens per second over llama-server without a draft](peers.svg)\n"
    )


def spread(value: dict[str, float], form: str = "{:.2f}") -> str:
    """Return a median and, where there was more than one, the lowest and the highest."""
    median, low, high = (form.format(value[key]) for key in ("median", "low", "high"))
    return median if value["low"] == value["high"] else f"{median} ({low}–{high})"


def _cells(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for pair, found in data["results"].items():
        for temperature, cell in found["temperatures"].items():
            yield f"{FILES.get(pair, pair)}, temperature {temperature}", cell


def picture(data: dict[str, Any]) -> str:
    """Return an SVG: speed over llama-server's plain decoding, a bar a side, with the range over the rounds."""
    cells = list(_cells(data))
    most = max(side["over_plain_server"]["high"] for _, cell in cells for side in cell["sides"].values())
    scale = _BAR_WIDTH / most
    parts: list[str] = []
    top = 0
    for title, cell in cells:
        parts.append(f'<text x="8" y="{top + 24}" font-weight="bold">{escape(title)}</text>')
        top += _HEAD
        start = top
        for name, side in cell["sides"].items():
            parts += _bar(name, side["over_plain_server"], top, scale)
            top += _ROW
        one = _LABEL_WIDTH + scale
        parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{start - 4}" y2="{top}" stroke="#000" />')
    width = _LABEL_WIDTH + _BAR_WIDTH + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 12}" font-family="sans-serif"'
        f' font-size="11">\n<title>Tokens per second over llama-server without a draft</title>\n'
        f'<rect width="100%" height="100%" fill="#fff" />\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _bar(name: str, value: dict[str, float], top: int, scale: float) -> list[str]:
    low, middle, high = (_LABEL_WIDTH + scale * value[key] for key in ("low", "median", "high"))
    colour = _OURS if name.startswith("localspec") else _OTHERS
    line = top + _ROW / 2 - 2
    return [
        f'<text x="{_LABEL_WIDTH - 6}" y="{top + 11}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{_LABEL_WIDTH}" y="{top + 1}" width="{middle - _LABEL_WIDTH:.1f}" height="{_ROW - 5}"'
        f' fill="{colour}" />',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{line}" y2="{line}" stroke="#333" />',
        f'<text x="{high + 5:.1f}" y="{top + 11}">{value["median"]:.2f}</text>',
    ]
