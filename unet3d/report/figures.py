"""Plot curves, and put figures of matplotlib into files and pages."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.files import atomic_write
from unet3d.report.curves import Points
from unet3d.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_png(figure: "Figure", path: Path, *, dpi: int = 110) -> None:
    """Write a figure as a PNG."""
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=dpi, format="png")


def to_svg(figure: "Figure") -> str:
    """Return a figure as markup for a page, whose style decides the color and font of its text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}), StringIO() as file:
        figure.savefig(file, format="svg", dpi=150, transparent=True)
        text = file.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("#000000", "currentColor")


def plot_curves(curves: Sequence[tuple[str, Points, Any]], y_label: str) -> "Figure":
    """Plot points over steps; a curve is its name, points and color."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, points, color in curves:
        marker = "o" if len(points) < 12 else ""
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=color, marker=marker, markersize=4, label=escape_mathtext(name))
    axes.set(xlabel="step", ylabel=y_label)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        columns = max(1, 90 // (5 + max(len(name) for name, *_ in curves)))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    return figure
