"""Pictures, drawn with matplotlib if it is installed (``pip install 'localspec[plot]'``)."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localspec.acceptance import Interval
from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["Curve", "Panel", "check_picture_path", "save_panels", "save_speedups"]

_PANEL_INCHES = (5.6, 3.9)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, or a set of points.

    Attributes:
        label: in the legend.
        x: positions.
        y: as many values.
        band: an interval around each value.
        style: "line" with a mark at every value, "dashed" without marks, or "points" alone.
        colour: number in the palette; the same number is the same colour in every panel; None is nearly black.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[Interval] | None = None
    style: Literal["line", "dashed", "points"] = "line"
    colour: int | None = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram of a picture.

    Attributes:
        title: above it.
        x_label: below it.
        y_label: beside it.
        curves: at least one.
        baseline: a value to compare with, drawn across.
        from_zero: whether the vertical axis begins at 0.
        own_legend: explain the curves inside; otherwise the picture's common legend does.
        ticks: where to mark the horizontal axis; None leaves it to the drawing.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    baseline: float | None = None
    from_zero: bool = False
    own_legend: bool = False
    ticks: Sequence[float] | None = None


def save_panels(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Write a picture of several diagrams, two in a row; errors as ``save_speedups``."""
    figure = _new_figure(path)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 0.9)
    figure.suptitle(title)
    common: dict[str, Line2D] = {}
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        lines = _draw(axes, panel)
        if panel.own_legend:
            axes.legend(frameon=False)
        else:
            for line in lines:
                common.setdefault(str(line.get_label()), line)
    if common:
        figure.legend(common.values(), common.keys(), loc="outside lower center", ncols=4, frameon=False)
    _write(figure, path)


def _draw(axes: Axes, panel: Panel) -> list[Line2D]:
    if panel.baseline is not None:
        axes.axhline(panel.baseline, color="0.6", linewidth=1, linestyle="--")
    lines = []
    for curve in panel.curves:
        colour = "0.15" if curve.colour is None else f"C{curve.colour % 10}"
        points = curve.style == "points"
        lines += axes.plot(
            curve.x,
            curve.y,
            color=colour,
            label=curve.label,
            linestyle={"line": "-", "dashed": "--", "points": ""}[curve.style],
            marker={"line": "o", "dashed": "", "points": "D"}[curve.style],
            markersize=7 if points else 4,
            markeredgecolor="black" if points else colour,
        )
        if curve.band is not None:
            low, high = [b.low for b in curve.band], [b.high for b in curve.band]
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if panel.ticks is not None:
        axes.set_xticks(panel.ticks)
    else:
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    return lines


def save_speedups(path: Path, speedups: Sequence[float], *, title: str) -> None:
    """Write a picture of predicted speedup over draft length γ = 0, 1, …; the file's ending says which kind.

    Raises InvalidOptionError when matplotlib is missing, the ending unknown, or the file not writable.
    """
    figure = _new_figure(path)
    axes = figure.add_subplot()
    best = max(range(len(speedups)), key=lambda gamma: speedups[gamma])
    axes.axhline(1, color="0.6", linewidth=1, linestyle="--", label="plain decoding")
    axes.plot(range(len(speedups)), speedups, marker="o", markersize=4, label="predicted")
    axes.plot([best], [speedups[best]], marker="o", markersize=9, fillstyle="none", color="black")
    axes.annotate(f"{speedups[best]:.2f}×", (best, speedups[best]), (0, 9), textcoords="offset points", ha="center")
    axes.set(xlabel="drafted tokens per step (γ)", ylabel="speed relative to plain decoding", title=title)
    axes.set_ylim(0, max(1.0, *speedups) * 1.15)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    _write(figure, path)


def check_picture_path(path: Path) -> None:
    """Raise InvalidOptionError if no picture can be written to ``path``, before the work that it would show."""
    _new_figure(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidOptionError(f"cannot write {path}: it is no file in a folder that can be written")


def _new_figure(path: Path) -> Figure:
    """Return an empty figure, once it is certain that a file of this kind can be drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidOptionError(
            f"cannot draw {path}: matplotlib is not installed; add it with: pip install 'localspec[plot]'"
        ) from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        raise InvalidOptionError(
            f"cannot draw {path}: its ending {path.suffix!r} names no kind of picture; use .png, .svg or .pdf"
        )
    return figure


def _write(figure: Figure, path: Path) -> None:
    # Drawn in memory first, so that a failure leaves no half a picture behind.
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().lstrip("."), dpi=150)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise InvalidOptionError(f"cannot write {path}: {error.strerror}") from error
