"""Make figures of matplotlib, and put them into pages."""

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure  # which few commands need

    return Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: "Figure") -> str:
    """Return a figure as markup for a page, whose style decides the color and font of its text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}), StringIO() as file:
        figure.savefig(file, format="svg", dpi=150, transparent=True)
        text = file.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("#000000", "currentColor")
