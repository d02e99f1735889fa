"""Show a memory estimate: as tables, sentences, JSON, and figures of matplotlib."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.memory.estimate import KINDS, MemoryEstimate
from unet3d.memory.events import Block
from unet3d.peak_memory import MemoryRecord
from unet3d.report.figures import make_figure
from unet3d.step.config import StepConfig
from unet3d.text import MIB, format_bytes, format_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERMANENT = ("parameters", "gradients", "optimizer state", "averaged weights")
"""Kinds whose bytes depend on the number of parameters alone."""

MAX_LAYERS = 40
"""Rows of a layer plot."""

OPERATIONS = {
    **{"cuDNN": "workspace of cuDNN", "cuBLAS": "workspace of cuBLAS"},
    **{"convolution": "convolution", "norm": "norm", "fold_": "norm", "pool3d": "pooling"},
    **{"upsample": "upsampling", "interpolate": "upsampling", "cat": "concatenation"},
    **{"relu": "activation", "dice_ce": "loss"},
}
"""Parts of the names of torch's operations and ours, in words."""

PALETTE = """#4c566a #88a0c0 #b48ead #7b5a8f #d08770 #ebcb8b #a3be8c #c8d0dc #8fbcbb #bf616a
#5e81ac""".split()
COLORS = dict(zip(KINDS, PALETTE, strict=True))


# Tables and sentences.


def format_mib(nbytes: int | None) -> str:
    """Format bytes as MiB, and None as a dash."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"


def format_peaks(estimate: MemoryEstimate) -> str:
    """Format the peak by phase and by kind."""
    records = {"whole step": estimate.peak}
    records |= {f"  {phase}": record for phase, record in estimate.phases.items()}
    peaks = [("estimated peak of a step", "allocated MiB", "reserved MiB")]
    peaks += [
        (name, format_mib(r.allocated), format_mib(r.reserved)) for name, r in records.items()
    ]
    kinds, total = [("at the peak", "MiB", "share")], sum(estimate.kinds.values())
    kinds += [(k, format_mib(n), f"{100 * n / total:.0f}%") for k, n in estimate.kinds.items()]
    parts, without = [format_columns(peaks), format_columns(kinds)], estimate.without_workspaces
    if (at_most := estimate.peak.reserved_at_most) and at_most > (estimate.peak.reserved or 0):
        parts.append(
            "with the largest workspaces that cuDNN may take for gradients of weights: "
            f"{format_mib(at_most)} MiB reserved"
        )
    if without < estimate.allocated:
        parts.append(
            "without the workspaces of cuDNN and cuBLAS, which depend on the GPU: "
            f"{format_mib(without)} MiB allocated"
        )
    return "\n\n".join(parts)


def format_faster_peak(peak: MemoryRecord, *, has_graphs: bool) -> str:
    """Say what a step needs as a run computes it on a GPU that has room for it."""
    return (
        f"on a GPU with room for it, a run computes whole maps{', in CUDA graphs' * has_graphs}: "
        f"{format_mib(peak.allocated)} MiB allocated, {format_mib(peak.reserved)} MiB reserved"
    )


def format_layers(estimate: MemoryEstimate) -> str:
    """Format one row per call of a module."""
    rows = [("layer", "type", "phase", "allocated MiB", "change bytes", "reserved MiB")]
    for x in estimate.layers:
        sizes = format_mib(x.allocated), f"{x.change:+,}", format_mib(x.reserved)
        rows.append((x.name, x.type, x.phase, *sizes))
    return format_columns(rows, left=3)


def format_measured(estimate: MemoryEstimate, phases: Mapping[str, MemoryRecord]) -> str:
    """Format estimated and measured peaks by phase, with the error of the estimate."""
    rows = [("measured on this GPU", "estimated MiB", "measured MiB", "error")]
    for phase, record in phases.items():
        estimated, measured = estimate.phases[phase].allocated or 0, record.allocated or 0
        error = f"{100 * (estimated / measured - 1):+.2f}%" if measured else "-"
        rows.append((phase, format_mib(estimated), format_mib(measured), error))
    return format_columns(rows)


def format_variants(points: Sequence[tuple[str, MemoryEstimate, MemoryRecord | None]]) -> str:
    """Format one row per (value, estimate, measured peak) of a varied setting, split by kind."""
    has_measured = any(measured is not None for _, _, measured in points)
    rows = [("", "peak MiB", *(["measured MiB"] if has_measured else []), "reserved MiB", *KINDS)]
    for label, estimate, measured in points:
        sizes = [estimate.allocated, estimate.peak.reserved]
        if has_measured:
            sizes.insert(1, None if measured is None else measured.allocated)
        sizes += [estimate.kinds.get(kind, 0) for kind in KINDS]
        rows.append((label, *map(format_mib, sizes)))
    return format_columns(rows)


def summarize_estimate(estimate: MemoryEstimate, savings: Sequence[tuple[str, int]]) -> str:
    """Summarize what takes memory and what saves most; `savings` are (override, bytes) pairs."""
    parts = []
    levels = estimate.levels
    if levels:
        full = 100 * levels.get(0, 0) / sum(levels.values())
        parts.append(f"{full:.0f}% of the activations at the peak are at full resolution")
    fixed = sum(estimate.kinds.get(k, 0) for k in PERMANENT)
    share = 100 * fixed / max(sum(estimate.kinds.values()), 1)
    parts.append(f"weights, gradients and optimizer state take {share:.0f}% of the peak")
    if estimate.column_bytes:
        parts.append(
            "torch computes some convolutions without cuDNN and allocates up to "
            f"{format_bytes(estimate.column_bytes)} for each"
        )
    if savings:
        parts.append(", ".join(f"{name} saves {format_bytes(n)}" for name, n in savings[:2]))
    return "; ".join(parts) + "."


def summarize_compiled(estimate: MemoryEstimate) -> str:
    """Say what compile=true takes, given the estimate without it: on an H200 it was within 1%."""
    return (
        f"compile=true: a step allocates about {format_bytes(estimate.allocated)}, which is what "
        "plain modules take; fused blocks are off, and the first step takes minutes."
    )


def estimate_to_dict(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the estimate as JSON-compatible values; sizes are whole bytes."""
    return {
        "peak_allocated_bytes": estimate.peak.allocated,
        "peak_reserved_bytes": estimate.peak.reserved,
        "peak_reserved_at_most_bytes": estimate.peak.reserved_at_most,
        "parameters": estimate.parameters,
        "phases": {
            phase: {f"{k}_bytes": v for k, v in record.known().items()}
            for phase, record in estimate.phases.items()
        },
        "kinds": estimate.kinds,
        "layers": [
            {key if isinstance(x, str) else f"{key}_bytes": x for key, x in asdict(layer).items()}
            for layer in estimate.layers
        ],
        "without_workspaces_bytes": estimate.without_workspaces,
    }


# Figures.


def make_figure_title(config: StepConfig) -> str:
    """Return the title of a figure of the estimated step: what memory depends on the most."""
    network = config.network
    options = {"model": network.name, "pool": network.pool_name, "checkpointing": config.strategy}
    chosen = [f"{group}={option}" for group, option in options.items() if option]
    return f"one training step, estimated: {', '.join(chosen)}, precision={config.precision}"


def compute_kinds_over_time(estimate: MemoryEstimate) -> dict[str, np.ndarray]:
    """Return, for every kind, the bytes in use after each event of the steady step."""
    start, stop = estimate.steady_step
    events = np.array(estimate.trace.events[:stop])
    blocks = np.abs(events) - 1
    changes = np.sign(events) * estimate.sizes[blocks]
    kinds = np.array([estimate.get_kind(block) for block in estimate.trace.blocks])[blocks]
    curves = {kind: np.cumsum(np.where(kinds == kind, changes, 0))[start:] for kind in KINDS}
    return {kind: values for kind, values in curves.items() if values.any()}


def describe_block(block: Block, level: int | None) -> str:
    """Say which operation of which part of the network has allocated a block; level 1 is finest.

    >>> make = lambda path, op: Block(0, 1, "backward", path, op, 0, None)
    >>> describe_block(make("decoder.1.up", "upsample_trilinear3d_backward"), 0)
    'gradient of upsampling, decoder level 1'
    """
    found = (word for part, word in OPERATIONS.items() if part in block.op)
    operation = next(found, block.op.rpartition(".")[2].strip("_"))
    if re.search("backward|gradient", block.op):
        operation = f"gradient of {operation}"
    place, part = block.path or block.phase, block.path.partition(".")[0]
    if level is not None and part in ("encoder", "decoder"):
        place = f"{part} level {level + 1}"
    return f"{operation}, {place}"


def plot_timeline(
    estimate: MemoryEstimate, title: str, *, measured: Mapping[str, int] | None = None
) -> "Figure":
    """Plot memory over the steady step by kind, its peak, and `measured` peaks by phase."""
    figure = make_figure(10, 5)
    axes = figure.subplots()
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
        f"peak {format_bytes(int(top))}\n{describe_block(block, estimate.get_level(block.path))}",
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
            axes.text(
                *(at, 0.98, f" {span.phase} "),
                transform=axes.get_xaxis_transform(),
                va="top",
                ha="left" if at < 0.9 * len(shown) else "right",
                fontsize=8,
            )
    dashed = "; dashed: measured peaks" if measured else ""
    axes.set(
        xlim=(0, len(shown) - 1),
        ylim=(0, 1.2 * max([top, *(measured or {}).values()]) / MIB),
        xlabel=f"large allocations and frees of a training step, in order{dashed}",
        ylabel="MiB allocated",
    )
    axes.set_title(title, wrap=True)
    figure.legend(loc="outside lower center", fontsize=8, ncols=5, frameon=False)
    return figure


def plot_layers(estimate: MemoryEstimate, title: str) -> "Figure":
    """Plot a row per call of a layer, in order: bytes allocated after it, and their change."""
    layers = estimate.layers
    smallest = sorted((abs(layer.change) for layer in layers), reverse=True)[:MAX_LAYERS][-1]
    shown = [layer for layer in layers if abs(layer.change) >= smallest][:MAX_LAYERS]
    figure = make_figure(10, 1.8 + 0.24 * len(shown))
    axes = figure.subplots()
    names = [f"{layer.name}  {layer.type}  {layer.phase}" for layer in shown]
    rows = np.arange(len(shown))
    allocated = np.array([layer.allocated for layer in shown]) / MIB
    change = np.array([layer.change for layer in shown]) / MIB
    axes.barh(rows, allocated, color="#c8d0dc", label="allocated after the layer")
    for drawn, color, label in (
        (change > 0, "#bf616a", "allocated by the layer"),
        (change <= 0, "#a3be8c", "freed by the layer"),
    ):
        axes.barh(rows[drawn], -change[drawn], 0.5, allocated[drawn], color=color, label=label)
    ends = np.maximum(allocated, allocated - change)
    for row in rows:
        text = f" {allocated[row]:,.1f} MiB  ({change[row]:+,.1f})"
        axes.text(ends[row], row, text, va="center", fontsize=8)
    axes.set_yticks(rows, names, fontsize=8)
    axes.set(xlim=(0, 1.3 * ends.max()), ylim=(len(shown) - 0.4, -0.6))
    limit = f", the {len(shown)} of {len(layers)} calls with the largest change"
    axes.set_xlabel(f"MiB allocated{limit if len(shown) < len(layers) else ''}")
    figure.suptitle(title, wrap=True)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    return figure


def plot_variants(points: Sequence[tuple[str, MemoryEstimate]], title: str) -> "Figure":
    """Plot a bar per (value, estimate) of a varied setting, split by kind at the peak."""
    figure = make_figure(10, 1.5 + 0.4 * len(points))
    axes = figure.subplots()
    left = np.zeros(len(points))
    labels = [label for label, _ in points]
    for kind in KINDS:
        width = np.array([p.kinds.get(kind, 0) for _, p in points]) / MIB
        if width.any():
            axes.barh(labels, width, left=left, color=COLORS[kind], label=kind)
        left += width
    axes.invert_yaxis()
    axes.set(xlabel="estimated MiB allocated at the peak of a training step", title=title)
    axes.legend(fontsize=8, ncols=2)
    return figure
