"""Pictures, drawn with matplotlib if it is installed (``pip install 'localspec[plot]'``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import InvalidOptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_speedups"]


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
