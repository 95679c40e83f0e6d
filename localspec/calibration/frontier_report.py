"""What a search found, as a table, as values and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localspec.calibration.frontier import Candidate, Change, Frontier
from localspec.calibration.report import wrapped
from localspec.plots import Curve, Panel, save_panels
from localspec.profile import WORTHWHILE

__all__ = ["as_values", "render", "save_frontier_picture", "verdict"]

_ROWS = 20  # of the table, beside the efficient ones and the baseline
_MIB = 1 << 20


def render(frontier: Frontier) -> str:
    """Return the report for a terminal."""
    sections = [_files(frontier), _table(frontier), _way(frontier, frontier.best)]
    if frontier.fastest.target != frontier.targets[0].path:
        sections += [_way(frontier, frontier.fastest), [wrapped(_other_model(frontier))]]
    sections.append([wrapped(verdict(frontier))])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _files(frontier: Frontier) -> list[str]:
    width = max(len(file.label) for file in (*frontier.targets, *frontier.drafts))
    lines = []
    for role, files in (("target", frontier.targets), ("draft", frontier.drafts)):
        for number, file in enumerate(files):
            other = "  (another model)" if role == "target" and number else ""
            lines.append(f"{'' if number else role:8}{file.label:{width}}  {file.path.name}{other}")
    return lines


def _table(frontier: Frontier) -> list[str]:
    shown = [
        candidate
        for number, candidate in enumerate(frontier.candidates)
        if number < _ROWS or candidate == frontier.baseline or frontier.is_efficient(candidate)
    ]
    left_out = len(frontier.candidates) - len(shown)
    cells = [[c.backend, frontier.target_label(c.target), _draft(frontier, c), c.drafter] for c in shown]
    head = ["backend", "target", "draft", "drafter"]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = ["predicted speed; * marks what nothing beats in both speed and memory (estimated)"]
    lines.append(f"where drafting gains less than {WORTHWHILE - 1:.0%} over the same without, it does not count")
    lines.append(f"  tokens/s  speed    MiB  {_aligned(head, widths)}    γ  copy")
    for candidate, names in zip(shown, cells, strict=True):
        mark = "*" if frontier.is_efficient(candidate) else " "
        lengths = f"{candidate.how.num_draft_tokens or '-':>3}  {candidate.how.num_copied or '-':>4}"
        lines.append(
            f"{mark} {candidate.tokens_per_s:8.1f}  {frontier.speedup(candidate):4.2f}×"
            f"  {candidate.memory_bytes / _MIB:5.0f}  {_aligned(names, widths)}  {lengths}"
        )
    return lines + ([f"  and {left_out} slower ones (--json has them all)"] if left_out else [])


def _draft(frontier: Frontier, candidate: Candidate) -> str:
    return "-" if candidate.draft is None else frontier.draft_label(candidate.draft)


def _aligned(names: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{name:{width}}" for name, width in zip(names, widths, strict=True))


def _way(frontier: Frontier, to: Candidate) -> list[str]:
    plain, changes = frontier.baseline, frontier.changes(to)
    lines = [f"what bought what, up to the fastest with target {frontier.target_label(to.target)}"]
    lines.append(f"  {'plain':8}{plain.backend:24} {plain.tokens_per_s:8.1f} tokens/s")
    for change in changes:
        speed = f"{change.candidate.tokens_per_s:8.1f} tokens/s  {change.ratio:4.2f}×"
        lines.append(f"  {change.factor:8}{change.value:24} {speed}")
    if len(changes) > 1:
        lines.append(f"  {'':41} together  {frontier.speedup(to):4.2f}×")
    kinds = [f"{kind} {speed:.1f}" for kind, speed in to.by_kind]
    return lines + ([wrapped(f"  by kind, tokens/s: {', '.join(kinds)}", indent=4)] if kinds else [])


def _other_model(frontier: Frontier) -> str:
    fastest, given = frontier.fastest, frontier.targets[0]
    return (
        f"Beware: {frontier.target_label(fastest.target)} is another model than {given.label}. Every row gives"
        " exactly its own target's output, and another quantisation's output has another law."
    )


def verdict(frontier: Frontier) -> str:
    """Say in a sentence how to run the given target."""
    best, given = frontier.best, frontier.targets[0]
    gain = f"{frontier.speedup(best):.2f} times plain {frontier.baseline.backend}"
    ways = {
        "none": "without drafts",
        "lookup": "copying what followed the same words before",
        "model": f"drafting with {_draft(frontier, best)}",
        "auto": f"drafting with {_draft(frontier, best)} and copying",
    }
    return f"Fastest with {given.label} on this machine: {best.backend}, {ways[best.drafter]}: {gain}."


def as_values(frontier: Frontier) -> dict[str, Any]:
    """Return everything as JSON values."""

    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "backend": candidate.backend,
            "target": str(candidate.target),
            "draft": None if candidate.draft is None else str(candidate.draft),
            "drafter": candidate.drafter,
            "num_draft_tokens": candidate.how.num_draft_tokens,
            "num_copied": candidate.how.num_copied,
            "min_match": candidate.how.min_match if candidate.how.num_copied else None,
            "tokens_per_s": candidate.tokens_per_s,
            "speedup": frontier.speedup(candidate),
            "memory_bytes": candidate.memory_bytes,
            "worthwhile": frontier.is_worthwhile(candidate),
            "efficient": frontier.is_efficient(candidate),
            "given_target": candidate.target == frontier.targets[0].path,
            "by_kind": dict(candidate.by_kind),
        }

    def way(changes: Sequence[Change]) -> list[dict[str, Any]]:
        return [
            {"factor": c.factor, "value": c.value, "tokens_per_s": c.candidate.tokens_per_s, "ratio": c.ratio}
            for c in changes
        ]

    return {
        "baseline": one(frontier.baseline),
        "best": one(frontier.best),
        "best_changes": way(frontier.changes(frontier.best)),
        "fastest": one(frontier.fastest),
        "fastest_changes": way(frontier.changes(frontier.fastest)),
        "candidates": [one(candidate) for candidate in frontier.candidates],
    }


def save_frontier_picture(path: Path, frontier: Frontier) -> None:
    """Draw speed against memory; raises InvalidOptionError as ``plots.save_panels``."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in frontier.candidates:
        label = f"{candidate.backend}, {frontier.target_label(candidate.target)}"
        groups.setdefault(label, []).append(candidate)
    curves = [
        Curve(label, *_points(candidates), style="points", colour=number)
        for number, (label, candidates) in enumerate(sorted(groups.items()))
    ]
    efficient = [candidate for candidate in frontier.candidates if frontier.is_efficient(candidate)]
    curves.insert(0, Curve("frontier", *_points(efficient), style="dashed", colour=None))
    panel = Panel(
        "Speed against memory",
        "memory (estimated), MiB",
        "predicted tokens per second",
        curves,
        baseline=frontier.baseline.tokens_per_s,
        from_zero=True,
        own_legend=True,
    )
    save_panels(path, [panel], title=f"Ways to run {frontier.targets[0].path.stem}")


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    ordered = sorted(candidates, key=lambda c: c.memory_bytes)
    return [c.memory_bytes / _MIB for c in ordered], [c.tokens_per_s for c in ordered]
