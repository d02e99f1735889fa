"""Plot a memory estimate as a matplotlib Figure: over time by kind, by layer, by setting."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from unet3d.memory.estimate import KINDS, MemoryEstimate
from unet3d.text import MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LAYERS = 40
"""Rows of a layer plot."""

PALETTE = """#4c566a #88a0c0 #b48ead #7b5a8f #d08770 #ebcb8b #a3be8c #c8d0dc #8fbcbb #bf616a
#5e81ac""".split()
COLORS = dict(zip(KINDS, PALETTE, strict=True))


def compute_kinds_over_time(estimate: MemoryEstimate) -> dict[str, np.ndarray]:
    """Return, for every kind, the bytes in use after each event of the steady step."""
    start, stop = estimate.steady_step
    changes = {kind: np.zeros(stop, np.int64) for kind in KINDS}
    for block in estimate.trace.blocks:
        if block.allocated_at < stop:
            change = changes[estimate.get_kind(block)]
            change[block.allocated_at] += estimate.sizes[block.id]
            if block.freed_at is not None and block.freed_at < stop:
                change[block.freed_at] -= estimate.sizes[block.id]
    curves = {kind: np.cumsum(change)[start:] for kind, change in changes.items()}
    return {kind: values for kind, values in curves.items() if values.any()}


def _make_figure(height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, figure.subplots()


def plot_timeline(
    estimate: MemoryEstimate, title: str, *, measured: Mapping[str, int] | None = None
) -> "Figure":
    """Plot memory over the steady step by kind, with the peak annotated.

    `measured` holds the measured peaks by phase, which are drawn as dashed lines.
    """
    figure, axes = _make_figure(5)
    start, stop = estimate.steady_step
    blocks = np.abs(np.array(estimate.trace.events[start:stop])) - 1
    top = estimate.curve[estimate.peak_event]
    is_large = estimate.sizes[blocks] > top / 1000
    is_large[estimate.peak_event - start] = True
    shown = np.flatnonzero(is_large)
    layers = {kind: values[shown] for kind, values in compute_kinds_over_time(estimate).items()}
    axes.stackplot(
        np.arange(len(shown)),
        [values / MIB for values in layers.values()],
        labels=list(layers),
        colors=[COLORS[kind] for kind in layers],
        step="post",
        linewidth=0,
        antialiased=False,
    )
    at = int(np.searchsorted(shown, estimate.peak_event - start))
    block = estimate.trace.blocks[blocks[estimate.peak_event - start]]
    axes.plot([at], [top / MIB], "o", color="black", markersize=5)
    axes.annotate(
        f"peak {format_bytes(int(top))}\n{block.path or block.phase}: {block.op}",
        (at, top / MIB),
        xytext=(8, 10),
        textcoords="offset points",
        ha="left" if at < 0.6 * len(shown) else "right",
    )
    for span in estimate.trace.phases:
        if start <= span.start < span.stop <= stop:
            at, end = np.searchsorted(shown, [span.start - start, span.stop - start])
            level = (measured or {}).get(span.phase)
            if level is not None:
                axes.plot([at, end], [level / MIB] * 2, color="black", linestyle="dashed")
            axes.axvline(at, color="grey", linewidth=0.5)
            axes.text(at, 0, f" {span.phase}", va="bottom", rotation=90, fontsize=8)
    axes.set_xlim(0, len(shown) - 1)
    axes.set_ylim(0, 1.2 * max([top, *(measured or {}).values()]) / MIB)
    dashed = "; dashed: measured peaks" if measured else ""
    axes.set_xlabel(f"large allocations and frees of a training step, in order{dashed}")
    axes.set_ylabel("MiB allocated")
    axes.set_title(title, wrap=True)
    figure.legend(loc="outside lower center", fontsize=8, ncols=5, frameon=False)
    return figure


def plot_layers(estimate: MemoryEstimate, title: str) -> "Figure":
    """Plot a row per call of a layer, in order: bytes allocated after it, and their change."""
    layers = estimate.layers
    smallest = sorted((abs(layer.change) for layer in layers), reverse=True)[:MAX_LAYERS][-1]
    shown = [layer for layer in layers if abs(layer.change) >= smallest][:MAX_LAYERS]
    figure, axes = _make_figure(1.8 + 0.24 * len(shown))
    rows = np.arange(len(shown))
    allocated = np.array([layer.allocated for layer in shown]) / MIB
    change = np.array([layer.change for layer in shown]) / MIB
    axes.barh(rows, allocated, color="#c8d0dc", label="allocated after the layer")
    low, high = np.sort([allocated - change, allocated], axis=0)
    for drawn, color, label in (
        (change > 0, "#bf616a", "allocated by the layer"),
        (change <= 0, "#a3be8c", "freed by the layer"),
    ):
        width = (high - low)[drawn]
        axes.barh(rows[drawn], width, 0.5, low[drawn], color=color, label=label)
    for row in rows:
        text = f" {allocated[row]:,.1f} MiB  ({change[row]:+,.1f})"
        axes.text(high[row], row, text, va="center", fontsize=8)
    names = [f"{layer.name}  {layer.type}  {layer.phase}" for layer in shown]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * high.max())
    limit = f", the {len(shown)} of {len(layers)} calls with the largest change"
    axes.set_xlabel(f"MiB allocated{limit if len(shown) < len(layers) else ''}")
    figure.suptitle(title, wrap=True)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    return figure


def plot_variants(points: Sequence[tuple[str, MemoryEstimate]], title: str) -> "Figure":
    """Plot a bar per (value, estimate) of a varied setting, split by kind at the peak."""
    figure, axes = _make_figure(1.5 + 0.4 * len(points))
    left = np.zeros(len(points))
    labels = [label for label, _ in points]
    for kind in KINDS:
        width = np.array([p.kinds.get(kind, 0) for _, p in points]) / MIB
        if width.any():
            axes.barh(labels, width, left=left, color=COLORS[kind], label=kind)
        left += width
    axes.invert_yaxis()
    axes.set_xlabel("estimated MiB allocated at the peak of a training step")
    axes.set_title(title)
    axes.legend(fontsize=8, ncols=2)
    return figure
