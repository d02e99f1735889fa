"""A prediction as tables, as a sentence, and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from unet3d.memory.estimate import KINDS, Layer, MemoryEstimate
from unet3d.memory.record import MemoryRecord
from unet3d.units import MIB, format_bytes


def peak_table(prediction: MemoryEstimate) -> str:
    """The peak, by phase and by kind."""
    least, most = prediction.interval
    peak = prediction.peak
    rows = [("predicted peak of a step", "allocated MiB", "reserved MiB")]
    rows.append(("whole step", format_mib(peak.allocated), format_mib(peak.reserved)))
    for phase, record in prediction.phases.items():
        rows.append((f"  {phase}", format_mib(record.allocated), format_mib(record.reserved)))
    kinds = [("at the peak", "MiB", "share")]
    total = sum(prediction.kinds.values())
    kinds += [
        (kind, format_mib(n), f"{100 * n / total:.0f} %") for kind, n in prediction.kinds.items()
    ]
    parts = [format_columns(rows), format_columns(kinds)]
    if most > least:
        parts.append(
            f"allocated lies between {format_mib(least)} and {format_mib(most)} MiB: cuDNN's workspace, which "
            "depends on the GPU, cannot be seen from here"
        )
    return "\n\n".join(parts)


def layer_table(layers: Sequence[Layer]) -> str:
    """One row per call of a module."""
    rows = [("layer", "type", "phase", "allocated MiB", "change bytes", "reserved MiB")]
    for layer in layers:
        change = f"{layer.change:+,}"
        sizes = (format_mib(layer.allocated), change, format_mib(layer.reserved))
        rows.append((layer.name, layer.type, layer.phase, *sizes))
    return format_columns(rows, left=3)


def study_table(points: Sequence[tuple[str, MemoryEstimate, MemoryRecord | None]]) -> str:
    """One row per (value, prediction, measured peak), split by kind."""
    measured = any(real is not None for _, _, real in points)
    rows = [("", "peak MiB", *(["measured MiB"] if measured else []), "reserved MiB", *KINDS)]
    for label, found, real in points:
        beside = [format_mib(real.allocated) if real else "-"] if measured else []
        kinds = [format_mib(found.kinds.get(kind, 0)) for kind in KINDS]
        rows.append(
            (
                label,
                format_mib(found.peak.allocated),
                *beside,
                format_mib(found.peak.reserved),
                *kinds,
            )
        )
    return format_columns(rows)


def summarize_estimate(prediction: MemoryEstimate, savings: Sequence[tuple[str, int]]) -> str:
    """Where the memory is and what would help most; `savings` are (override, bytes), best first."""
    parts = []
    levels = prediction.levels
    total = sum(levels.values())
    if total:
        full = 100 * levels.get(0, 0) / total
        parts.append(f"{full:.0f} % of the activations at the peak belong to full resolution")
    fixed = sum(prediction.kinds.get(k, 0) for k in ("parameters", "gradients", "optimizer state"))
    share = 100 * fixed / max(sum(prediction.kinds.values()), 1)
    parts.append(f"weights, gradients and optimizer take {share:.0f} %")
    helping = [(override, saved) for override, saved in savings if saved > 0]
    if helping:
        parts.append(
            ", ".join(f"{override} saves {format_bytes(saved)}" for override, saved in helping[:2])
        )
    return "; ".join(parts) + "."


def estimate_to_dict(prediction: MemoryEstimate) -> dict[str, Any]:
    """Whole bytes, for other programs."""
    least, most = prediction.interval
    return {
        "peak_allocated_bytes": prediction.peak.allocated,
        "peak_reserved_bytes": prediction.peak.reserved,
        "parameters": prediction.parameters,
        "phases": {
            phase: {f"{k}_bytes": v for k, v in record.known().items()}
            for phase, record in prediction.phases.items()
        },
        "kinds": prediction.kinds,
        "layers": layer_rows(prediction.layers),
        "interval": {"least_allocated_bytes": least, "most_allocated_bytes": most},
    }


def layer_rows(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Layers as JSON."""
    return [
        {
            "name": layer.name,
            "type": layer.type,
            "phase": layer.phase,
            "allocated_bytes": layer.allocated,
            "change_bytes": layer.change,
            "reserved_bytes": layer.reserved,
        }
        for layer in layers
    ]


def measured_table(prediction: MemoryEstimate, phases: dict[str, MemoryRecord]) -> str:
    """Predicted and measured peaks side by side, with the prediction's error."""
    rows = [("measured on this GPU", "predicted MiB", "measured MiB", "error")]
    for phase, record in phases.items():
        predicted, found = prediction.phases[phase].allocated or 0, record.allocated or 0
        error = f"{100 * (predicted / found - 1):+.2f} %" if found else "-"
        rows.append((phase, format_mib(predicted), format_mib(found), error))
    return format_columns(rows)


def format_mib(nbytes: int | None) -> str:
    """Bytes as MiB; a dash where the device has no such figure."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"


def format_columns(rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Rows under each other: the first `left` columns to the left, numbers to the right."""
    table = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
