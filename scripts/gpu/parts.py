"""The parts of the GPU report: where their rows are measured, time limits, and summaries."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unet3d.units import MIB

Rows = dict[str, dict[str, Any]]


# Summaries of rows.


def summarize_checks(rows: Rows) -> dict[str, Any]:
    """Count the rows that passed, and name those that failed."""
    bad = [name for name, row in rows.items() if not row.get("good")]
    return {"good": len(rows) - len(bad), "bad": bad}


def summarize_errors(rows: Rows) -> dict[str, Any]:
    """Return percentiles of the estimation errors, and the largest in each direction."""
    summary: dict[str, Any] = {"configurations": len(rows)}
    for kind in ("allocated", "reserved"):
        key = f"{kind}_error_percent"
        signed = sorted(row[key] for row in rows.values() if key in row)
        sizes = sorted(map(abs, signed))
        if sizes:
            summary[kind] = {
                "median_percent": statistics.median(sizes),
                "p95_percent": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
                "worst_too_low_percent": min(0.0, signed[0]),
                "worst_too_high_percent": max(0.0, signed[-1]),
            }
    return summary


def select(*path: str) -> Callable[[Rows], dict[str, Any]]:
    """Return a function that takes the value at a path of keys from each row."""

    def summarize(rows: Rows) -> dict[str, Any]:
        values = {}
        for name, row in rows.items():
            value: Any = row
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            values[name] = value
        return values

    return summarize


def merge_rows(rows: Rows) -> dict[str, Any]:
    """Return the values of all rows in one dict."""
    return {k: v for row in rows.values() for k, v in row.items() if k != "seconds"}


def summarize_steps(rows: Rows) -> dict[str, Any]:
    """Return peak in MiB, estimation error and time of each network's step."""
    return {
        name: {
            "mib": round(row["measured"]["allocated"] / MIB),
            "error_percent": row.get("allocated_error_percent"),
            "seconds": round(row["step_seconds"], 4),
        }
        for name, row in rows.items()
        if "allocated" in row.get("measured", {})
    }


def summarize_libraries(rows: Rows) -> dict[str, Any]:
    """Return the memory outside the allocator, and the number of recorded convolutions."""
    libraries = rows.get("libraries", {})
    used = [row["outside_allocator"] for row in libraries.values() if isinstance(row, dict)]
    count = sum(len(row.get("operations", {})) for row in rows.values())
    known = [round(n / MIB) for n in used if n is not None]
    return {"outside_allocator_mib": known, "convolutions": count}


def summarize_ratios(rows: Rows) -> dict[str, Any]:
    """Return the time of each pooling divided by that of nn.MaxPool3d."""
    return {
        title: {name: round(pool["both_ratio"], 2) for name, pool in row["rows"].items()}
        for title, row in rows.items()
    }


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that are measured together, by the function of `module` with the part's name."""

    module: str
    about: str
    limit_seconds: int = 500
    min_seconds: int = 20  # no row starts with less time left
    summary: Callable[[Rows], dict[str, Any]]


PARTS = {
    "environment": Part(
        module="scripts.gpu.kernels",
        about="device, versions, copy bandwidth",
        limit_seconds=90,
        summary=merge_rows,
    ),
    "tests": Part(
        module="scripts.gpu.runs",
        about="tests marked gpu, and the tests of memory and checkpointing",
        limit_seconds=300,
        min_seconds=100,
        summary=summarize_checks,
    ),
    "correct": Part(
        module="scripts.gpu.kernels",
        about="all kernels against their references, at the size of experiment=forum_small",
        limit_seconds=240,
        summary=summarize_checks,
    ),
    "pool": Part(
        module="scripts.gpu.kernels",
        about="poolings against nn.MaxPool3d and a copy",
        limit_seconds=240,
        min_seconds=30,
        summary=summarize_ratios,
    ),
    "forum": Part(
        module="scripts.gpu.steps",
        about="experiment=forum_small and forum_large: peak, estimate and seconds per step",
        limit_seconds=240,
        summary=summarize_steps,
    ),
    "predict": Part(
        module="scripts.gpu.steps",
        about="estimated against measured peaks of 64 configurations",
        limit_seconds=400,
        summary=summarize_errors,
    ),
    "workspaces": Part(
        module="scripts.gpu.workspaces",
        about="memory that cuDNN, cuBLAS and CUDA take",
        limit_seconds=240,
        summary=summarize_libraries,
    ),
    "peers": Part(
        module="scripts.gpu.steps",
        about="networks of other projects with the same channels",
        limit_seconds=240,
        summary=summarize_steps,
    ),
    "tuned": Part(
        module="scripts.gpu.steps",
        about="plain modules compiled, channels-last and with cudnn.benchmark",
        limit_seconds=480,
        min_seconds=60,
        summary=summarize_steps,
    ),
    "residual": Part(
        module="scripts.gpu.steps",
        about="residual encoders of nnU-Net and ours",
        limit_seconds=240,
        summary=summarize_steps,
    ),
    "batch": Part(
        module="scripts.gpu.steps",
        about="largest batch of the forum networks that runs in 7000 MiB",
        limit_seconds=300,
        summary=select("largest"),
    ),
    "tile_size": Part(
        module="scripts.gpu.steps",
        about="time and peak by the size of a tile",
        limit_seconds=150,
        summary=summarize_steps,
    ),
    "profile": Part(
        module="scripts.gpu.steps",
        about="the slowest kernels of a step",
        limit_seconds=150,
        summary=select("device_ms"),
    ),
    "callbacks": Part(
        module="scripts.gpu.runs",
        about="overhead of callbacks, and the effect of prefetching and offload on a step",
        limit_seconds=300,
        min_seconds=40,
        summary=select("median_step_seconds"),
    ),
    "nccl": Part(
        module="scripts.gpu.runs",
        about="two processes with NCCL, if there are two GPUs",
        limit_seconds=300,
        min_seconds=120,
        summary=summarize_checks,
    ),
    "hippocampus": Part(
        module="scripts.gpu.runs",
        about="Dice over time, five minutes (needs data/Task04_Hippocampus)",
        limit_seconds=520,
        min_seconds=400,
        summary=select("seconds_to_goal"),
    ),
    "pools": Part(
        module="scripts.gpu.runs",
        about="max, median and approx_median, 1500 steps each (needs data/Task04_Hippocampus)",
        limit_seconds=540,
        min_seconds=150,
        summary=select("dice", "mean"),
    ),
}
