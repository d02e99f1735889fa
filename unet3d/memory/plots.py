"""Pictures of a prediction: what is alive when, by kind, and what each layer allocates.

Each function returns a matplotlib Figure, for whoever wants it in a file or on a dashboard.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from unet3d.memory.estimate import KINDS, MemoryEstimate
from unet3d.units import MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS = 40
"""Rows that a picture has room for."""

COLOURS = dict(
    zip(
        KINDS,
        (
            "#4c566a",
            "#88a0c0",
            "#b48ead",
            "#d08770",
            "#ebcb8b",
            "#a3be8c",
            "#c8d0dc",
            "#bf616a",
            "#5e81ac",
        ),
        strict=True,
    )
)


def kinds_over_time(prediction: MemoryEstimate) -> dict[str, np.ndarray]:
    """For every kind, the bytes alive after each event of the steady step."""
    begun, ended = prediction.steady
    found = {}
    for kind in KINDS:
        change = np.zeros(ended + 1, np.int64)
        for block in prediction.trace.blocks:
            if prediction.kind(block) == kind and block.born < ended:
                change[block.born] += prediction.sizes[block.id]
                if block.died is not None and block.died < ended:
                    change[block.died] -= prediction.sizes[block.id]
        found[kind] = np.cumsum(change)[begun:ended]
    return {kind: values for kind, values in found.items() if values.any()}


def large_events(prediction: MemoryEstimate) -> np.ndarray:
    """The events of the steady step that change over a thousandth of the peak, and the peak."""
    begun, ended = prediction.steady
    events = np.abs(np.array(prediction.trace.events[begun:ended])) - 1
    large = prediction.sizes[events] > prediction.curve[prediction.peak_at] / 1000
    large[prediction.peak_at - begun] = True
    return np.flatnonzero(large)


def timeline(prediction: MemoryEstimate, title: str) -> "Figure":
    """The steady step from its first allocation to its last, by kind, with the peak named."""
    from matplotlib.figure import Figure

    begun, ended = prediction.steady
    shown = large_events(prediction)
    layers = {kind: values[shown] for kind, values in kinds_over_time(prediction).items()}
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        np.arange(len(shown)),
        [values / MIB for values in layers.values()],
        labels=list(layers),
        colors=[COLOURS[kind] for kind in layers],
        step="post",
        linewidth=0,
        antialiased=False,
    )
    at = int(np.searchsorted(shown, prediction.peak_at - begun))
    top = prediction.curve[prediction.peak_at]
    event = prediction.trace.events[prediction.peak_at]
    block = prediction.trace.blocks[abs(event) - 1]
    axes.plot([at], [top / MIB], "o", color="black", markersize=5)
    axes.annotate(
        f"peak {format_bytes(int(top))}\n{block.path or block.phase}: {block.op}",
        (at, top / MIB),
        xytext=(8, 10),
        textcoords="offset points",
        ha="left" if at < 0.6 * len(shown) else "right",
    )
    for mark in prediction.trace.phases:
        if begun <= mark.begun < mark.ended <= ended:
            start = int(np.searchsorted(shown, mark.begun - begun))
            axes.axvline(start, color="grey", linewidth=0.5)
            axes.text(start, 0, f" {mark.phase}", va="bottom", rotation=90, fontsize=8)
    axes.set_xlim(0, len(shown) - 1)
    axes.set_ylim(0, 1.2 * top / MIB)
    axes.set_xlabel("large allocations and frees of one training step, in order")
    axes.set_ylabel("MiB allocated")
    axes.set_title(title)
    axes.legend(loc="upper right", fontsize=8, ncols=2)
    return figure


def layer_bars(prediction: MemoryEstimate, title: str) -> "Figure":
    """A row per call of a layer, in order: what is allocated after it, and what it changed."""
    from matplotlib.figure import Figure

    layers = prediction.layers
    least = sorted((abs(layer.change) for layer in layers), reverse=True)[:MOST_LAYERS][-1]
    shown = [layer for layer in layers if abs(layer.change) >= least][:MOST_LAYERS]
    figure = Figure(figsize=(10, 1.8 + 0.24 * len(shown)), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(shown))
    allocated = np.array([layer.allocated for layer in shown]) / MIB
    change = np.array([layer.change for layer in shown]) / MIB
    axes.barh(rows, allocated, color="#c8d0dc", label="allocated after it")
    grown = change > 0
    for which, colour, label in (
        (grown, "#bf616a", "of which it allocated"),
        (~grown, "#a3be8c", "and what it freed"),
    ):
        start = np.where(grown, allocated - change, allocated)
        axes.barh(
            rows[which],
            abs(change[which]),
            left=start[which],
            color=colour,
            label=label,
            height=0.5,
        )
    for row, layer in enumerate(shown):
        said = f" {layer.allocated / MIB:,.1f} MiB  ({layer.change / MIB:+,.1f})"
        end = max(allocated[row], allocated[row] - change[row])
        axes.text(end, row, said, va="center", fontsize=8)
    names = [f"{layer.name}  {layer.type}  {layer.phase}" for layer in shown]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max(allocated.max(), (allocated - change).max()))
    left_out = f", the {len(shown)} of {len(layers)} calls that change most"
    axes.set_xlabel(f"MiB allocated{left_out if len(shown) < len(layers) else ''}")
    figure.suptitle(title, wrap=True)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    return figure


def study_bars(drawn: Sequence[tuple[str, MemoryEstimate]], title: str) -> "Figure":
    """A bar per value that was tried, split by what is alive at its peak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.4 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(drawn))
    labels = [label for label, _ in drawn]
    for kind in KINDS:
        width = np.array([p.kinds.get(kind, 0) for _, p in drawn]) / MIB
        if width.any():
            axes.barh(labels, width, left=left, color=COLOURS[kind], label=kind)
        left += width
    axes.invert_yaxis()
    axes.set_xlabel("MiB allocated at the peak of a training step, predicted")
    axes.set_title(title)
    axes.legend(fontsize=8, ncols=2)
    return figure
