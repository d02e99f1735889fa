"""Format a memory estimate as tables, as a sentence and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unet3d.memory.estimate import KINDS, Layer, MemoryEstimate
from unet3d.peak_memory import MemoryRecord
from unet3d.text import MIB, format_bytes, format_columns

PERMANENT = ("parameters", "gradients", "optimizer state", "averaged weights")
"""Kinds whose bytes depend on the number of parameters alone."""

LEAST_COMPILED_SHARE = 0.4
"""The smallest part of the plain step's activations that is assumed to be left. Compiled steps of
unet_tiny (instance and batch norm), naive_small and dynunet kept 0.5 to 0.9 on a CPU."""


def format_peaks(estimate: MemoryEstimate) -> str:
    """Format the peak by phase and by kind."""
    peak, without = estimate.peak, estimate.without_workspaces
    rows = [("estimated peak of a step", "allocated MiB", "reserved MiB")]
    rows.append(("whole step", format_mib(peak.allocated), format_mib(peak.reserved)))
    for phase, record in estimate.phases.items():
        rows.append((f"  {phase}", format_mib(record.allocated), format_mib(record.reserved)))
    kinds = [("at the peak", "MiB", "share")]
    total = sum(estimate.kinds.values())
    kinds += [
        (kind, format_mib(n), f"{100 * n / total:.0f}%") for kind, n in estimate.kinds.items()
    ]
    parts = [format_columns(rows), format_columns(kinds)]
    if without < (peak.allocated or 0):
        parts.append(
            "without the workspaces of cuDNN and cuBLAS, which depend on the GPU: "
            f"{format_mib(without)} MiB allocated"
        )
    return "\n\n".join(parts)


def format_short(estimate: MemoryEstimate) -> str:
    """Format the peak of a step, of its phases and of the largest kinds in three lines."""
    reserved, allocated = estimate.peak.reserved, estimate.peak.allocated or 0
    rest = "on a CPU" if reserved is None else f"on a GPU, {format_bytes(reserved)} reserved"
    phases = [f"{name} {format_bytes(r.allocated or 0)}" for name, r in estimate.phases.items()]
    largest = sorted(estimate.kinds.items(), key=lambda item: -item[1])[:3]
    kinds = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in largest]
    return (
        f"estimated peak of a training step: {format_bytes(allocated)} {rest}\n"
        f"by phase: {', '.join(phases)}\nmost of it: {', '.join(kinds)}"
    )


def format_layers(layers: Sequence[Layer]) -> str:
    """Format one row per call of a module."""
    rows = [("layer", "type", "phase", "allocated MiB", "change bytes", "reserved MiB")]
    for layer in layers:
        change = f"{layer.change:+,}"
        sizes = (format_mib(layer.allocated), change, format_mib(layer.reserved))
        rows.append((layer.name, layer.type, layer.phase, *sizes))
    return format_columns(rows, left=3)


def format_variants(points: Sequence[tuple[str, MemoryEstimate, MemoryRecord | None]]) -> str:
    """Format one row per (value, estimate, measured peak) of a varied setting, split by kind."""
    has_measured = any(measured is not None for _, _, measured in points)
    rows = [("", "peak MiB", *(["measured MiB"] if has_measured else []), "reserved MiB", *KINDS)]
    for label, estimate, measured in points:
        column = [format_mib(measured.allocated) if measured else "-"] if has_measured else []
        kinds = [format_mib(estimate.kinds.get(kind, 0)) for kind in KINDS]
        peak = estimate.peak
        sizes = (format_mib(peak.allocated), *column, format_mib(peak.reserved))
        rows.append((label, *sizes, *kinds))
    return format_columns(rows)


def summarize_estimate(estimate: MemoryEstimate, savings: Sequence[tuple[str, int]]) -> str:
    """Summarize what takes memory and what saves most; `savings` are (override, bytes) pairs."""
    parts = []
    levels = estimate.levels
    total = sum(levels.values())
    if total:
        full = 100 * levels.get(0, 0) / total
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
    most = estimate.peak.allocated or 0
    fixed = sum(estimate.kinds.get(kind, 0) for kind in (*PERMANENT, "input", "workspaces"))
    return fixed + int(LEAST_COMPILED_SHARE * (most - fixed)), most


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


def layers_to_dicts(layers: Sequence[Layer]) -> list[dict[str, Any]]:
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
