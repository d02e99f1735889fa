"""The parts of the GPU's report: where rows are measured, how long that may take, what they say."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = dict[str, dict[str, Any]]


# Sums over rows.


def good_rows(rows: Rows) -> dict[str, Any]:
    """How many are right, and which are not."""
    bad = [name for name, row in rows.items() if not row.get("good")]
    return {"good": len(rows) - len(bad), "bad": bad}


def errors(rows: Rows) -> dict[str, Any]:
    """Of predictions, in percent: the median, the 95th percentile, the worst that was too low."""
    found: dict[str, Any] = {"configurations": len(rows)}
    for kind in ("allocated", "reserved"):
        key = f"{kind}_error_percent"
        signed = sorted(row[key] for row in rows.values() if key in row)
        sizes = sorted(map(abs, signed))
        if sizes:
            found[kind] = {
                "median_percent": statistics.median(sizes),
                "p95_percent": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
                "worst_too_low_percent": min(0.0, signed[0]),
                "worst_too_high_percent": max(0.0, signed[-1]),
            }
    return found


def key_of(*path: str) -> Callable[[Rows], dict[str, Any]]:
    """One figure of each row."""

    def of(rows: Rows) -> dict[str, Any]:
        found = {}
        for name, row in rows.items():
            value: Any = row
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            found[name] = value
        return found

    return of


def flat(rows: Rows) -> dict[str, Any]:
    """All figures of all rows."""
    return {k: v for row in rows.values() for k, v in row.items() if k != "seconds"}


def steps(rows: Rows) -> dict[str, Any]:
    """Of each network: MiB at the peak, the prediction's error, seconds of a step."""
    return {
        name: {
            "mib": round(row["measured"]["allocated"] / 2**20),
            "error_percent": row.get("allocated_error_percent"),
            "seconds": round(row["step_seconds"], 4),
        }
        for name, row in rows.items()
        if "allocated" in row.get("measured", {})
    }


def ratios(rows: Rows) -> dict[str, Any]:
    """Forward and backward of each pooling, nn.MaxPool3d being 1."""
    return {
        title: {name: round(of["both_ratio"], 2) for name, of in row["rows"].items()}
        for title, row in rows.items()
    }


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is measured together: by a function of its name, in a module of this folder."""

    module: str
    about: str
    limit: int = 500  # seconds
    least: int = 20  # a row is not begun with fewer left
    summary: Callable[[Rows], dict[str, Any]]


PARTS = {
    "environment": Part(
        module="gpu_kernels",
        about="device, versions, bandwidth of copies",
        limit=90,
        summary=flat,
    ),
    "tests": Part(
        module="gpu_runs",
        about="the tests that are marked gpu, and those of the meter",
        limit=300,
        least=100,
        summary=good_rows,
    ),
    "correct": Part(
        module="gpu_kernels",
        about="every kernel against its definition, at the size of the forum's job",
        limit=240,
        summary=good_rows,
    ),
    "pool": Part(
        module="gpu_kernels",
        about="the poolings against nn.MaxPool3d and against a copy",
        limit=240,
        least=30,
        summary=ratios,
    ),
    "forum": Part(
        module="gpu_steps",
        about="the forum's job before and after: peak, prediction, seconds per step",
        limit=240,
        summary=steps,
    ),
    "predict": Part(
        module="gpu_steps",
        about="predicted against measured peaks, 64 configurations",
        limit=400,
        summary=errors,
    ),
    "peers": Part(
        module="gpu_steps",
        about="the same channels in the networks that others give",
        limit=240,
        summary=steps,
    ),
    "batch": Part(
        module="gpu_steps",
        about="the largest batch of the forum's job in 7000 MiB, tried",
        limit=300,
        summary=key_of("largest"),
    ),
    "slabs": Part(
        module="gpu_steps",
        about="time and peak by the size of a slab",
        limit=150,
        summary=steps,
    ),
    "profile": Part(
        module="gpu_steps",
        about="the kernels of a step that take longest",
        limit=150,
        summary=key_of("device_ms"),
    ),
    "callbacks": Part(
        module="gpu_runs",
        about="what the meter, surviving, fetching ahead and offload cost or save of a step",
        limit=300,
        least=40,
        summary=key_of("median_step_seconds"),
    ),
    "hippocampus": Part(
        module="gpu_runs",
        about="Dice against time, five minutes (data/Task04_Hippocampus)",
        limit=520,
        least=400,
        summary=key_of("seconds_to_goal"),
    ),
    "pools": Part(
        module="gpu_runs",
        about="max, median and approximate median, 1500 steps each (data/Task04_Hippocampus)",
        limit=540,
        least=150,
        summary=key_of("dice", "mean"),
    ),
}
