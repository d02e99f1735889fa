"""Format a memory estimate as tables, as a sentence and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unet3d.memory.estimate import KINDS, LayerCall, MemoryEstimate
from unet3d.peak_memory import MemoryRecord
from unet3d.text import MIB, format_bytes, format_columns

PERMANENT = ("parameters", "gradients", "optimizer state", "averaged weights")
"""Kinds whose bytes depend on the number of parameters alone."""

MIN_COMPILED_FRACTION = 0.4
"""The smallest part of the plain step's activations that is assumed to be left. Compiled steps of
unet_tiny (instance and batch norm), naive_small and dynunet kept 0.5 to 0.9 on a CPU."""


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
    if without < estimate.allocated:
        parts.append(
            "without the workspaces of cuDNN and cuBLAS, which depend on the GPU: "
            f"{format_mib(without)} MiB allocated"
        )
    return "\n\n".join(parts)


def format_short(estimate: MemoryEstimate) -> str:
    """Format the peak of a step, of its phases and of the largest kinds in three lines."""
    reserved = estimate.peak.reserved
    rest = "on a CPU" if reserved is None else f"on a GPU, {format_bytes(reserved)} reserved"
    phases = [f"{name} {format_bytes(r.allocated or 0)}" for name, r in estimate.phases.items()]
    largest = sorted(estimate.kinds.items(), key=lambda item: -item[1])[:3]
    kinds = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in largest]
    return (
        f"estimated peak of a training step: {format_bytes(estimate.allocated)} {rest}\n"
        f"by phase: {', '.join(phases)}\nmost of it: {', '.join(kinds)}"
    )


def format_layers(layers: Sequence[LayerCall]) -> str:
    """Format one row per call of a module."""
    rows = [("layer", "type", "phase", "allocated MiB", "change bytes", "reserved MiB")]
    for x in layers:
        sizes = format_mib(x.allocated), f"{x.change:+,}", format_mib(x.reserved)
        rows.append((x.name, x.type, x.phase, *sizes))
    return format_columns(rows, left=3)


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


def get_compiled_range(estimate: MemoryEstimate) -> tuple[int, int]:
    """Return the least and the most bytes that a compiled step is assumed to allocate.

    Compiled code keeps fewer activations, because it recomputes those that are cheap. How many is
    decided by TorchInductor when it compiles, which takes minutes and needs the GPU.
    """
    most = estimate.allocated
    fixed = sum(estimate.kinds.get(kind, 0) for kind in (*PERMANENT, "input", "workspaces"))
    return fixed + int(MIN_COMPILED_FRACTION * (most - fixed)), most


def summarize_compiled(estimate: MemoryEstimate) -> str:
    """Say what compile=true takes, where the estimate is that of the step without it."""
    least, most = map(format_bytes, get_compiled_range(estimate))
    return (
        f"compile=true: a step allocates {least} to {most}, which is what plain modules take; "
        "fused blocks are off, and the first step takes minutes."
    )


def estimate_to_dict(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the estimate as JSON-compatible values; sizes are whole bytes."""
    return {
        "peak_allocated_bytes": estimate.peak.allocated,
        "peak_reserved_bytes": estimate.peak.reserved,
        "parameters": estimate.parameters,
        "phases": {
            phase: {f"{k}_bytes": v for k, v in record.known().items()}
            for phase, record in estimate.phases.items()
        },
        "kinds": estimate.kinds,
        "layers": layers_to_dicts(estimate.layers),
        "without_workspaces_bytes": estimate.without_workspaces,
    }


def layers_to_dicts(layers: Sequence[LayerCall]) -> list[dict[str, Any]]:
    """Return layers as JSON-compatible rows."""
    return [
        {key if isinstance(x, str) else f"{key}_bytes": x for key, x in asdict(layer).items()}
        for layer in layers
    ]


def format_measured(estimate: MemoryEstimate, phases: dict[str, MemoryRecord]) -> str:
    """Format estimated and measured peaks by phase, with the error of the estimate."""
    rows = [("measured on this GPU", "estimated MiB", "measured MiB", "error")]
    for phase, record in phases.items():
        estimated, measured = estimate.phases[phase].allocated or 0, record.allocated or 0
        error = f"{100 * (estimated / measured - 1):+.2f}%" if measured else "-"
        rows.append((phase, format_mib(estimated), format_mib(measured), error))
    return format_columns(rows)


def format_mib(nbytes: int | None) -> str:
    """Format bytes as MiB, and None as a dash."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"
