"""The timeline of a step as a stacked picture: what is alive when, by kind, with the peak named."""

from pathlib import Path

import numpy as np

from unet3d.meter.predict import KINDS, Prediction
from unet3d.meter.record import MIB
from unet3d.meter.show import size

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


def kinds_over_time(prediction: Prediction) -> dict[str, np.ndarray]:
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


def draw_timeline(prediction: Prediction, path: Path, title: str) -> None:
    """Write the picture; the suffix of `path` says its format."""
    from matplotlib.figure import Figure

    begun, ended = prediction.steady
    layers = kinds_over_time(prediction)
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        np.arange(ended - begun),
        [values / MIB for values in layers.values()],
        labels=list(layers),
        colors=[COLOURS[kind] for kind in layers],
        step="post",
        linewidth=0,
    )
    at = prediction.peak_at - begun
    top = prediction.curve[prediction.peak_at]
    event = prediction.trace.events[prediction.peak_at]
    block = prediction.trace.blocks[abs(event) - 1]
    axes.plot([at], [top / MIB], "o", color="black", markersize=5)
    axes.annotate(
        f"peak {size(int(top))}\n{block.path or block.phase}: {block.op}",
        (at, top / MIB),
        xytext=(8, 10),
        textcoords="offset points",
        ha="left" if at < 0.6 * (ended - begun) else "right",
    )
    for mark in prediction.trace.phases:
        if begun <= mark.begun < mark.ended <= ended:
            axes.axvline(mark.begun - begun, color="grey", linewidth=0.5)
            axes.text(mark.begun - begun, 0, f" {mark.phase}", va="bottom", rotation=90, fontsize=8)
    axes.set_xlim(0, ended - begun)
    axes.set_ylim(0, 1.2 * top / MIB)
    axes.set_xlabel("allocations and frees of one training step, in order")
    axes.set_ylabel("MiB allocated")
    axes.set_title(title)
    axes.legend(loc="upper right", fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
