"""Measure a training step on this machine with every checkpointing strategy, against estimates.

The result is one JSON file that can be attached to an issue. Rows are written as they are measured:
a crash costs the rest, not what is known.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch

from unet3d import __version__
from unet3d.errors import UsageError, summarize_error
from unet3d.files import write_text
from unet3d.machine import resolve_precision
from unet3d.memory.fit import estimate_resolved_step, list_strategies
from unet3d.peak_memory import MemoryRecord
from unet3d.step.config import StepConfig
from unet3d.step.training_step import build_configured_step, measure_phases, time_step
from unet3d.text import MIB

SCHEMA = "unet3d-benchmark-1"

COMPARED = ("fused", "lean")
"""Strategies whose gradients are compared first."""

ROUNDS = 5
MAX_ROW_SECONDS = 40.0
"""A row that takes longer has fewer rounds."""

MAX_ERROR_RATIO = 3.0
"""Error of gradients that is accepted, relative to that of plain modules in the same precision.

Both have errors of about 1e-3 in float32: rounding changes which side of a ReLU a value is on.
"""


def run_benchmark(
    config: StepConfig,
    machine: dict[str, Any],
    file: Path,
    *,
    overrides: Sequence[str],
    seconds: float,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all rows that fit into `seconds`; write the file after each."""
    deadline = time.monotonic() + seconds
    rows, skipped = list[dict[str, Any]](), list[str]()
    result = {
        "schema": SCHEMA,
        "unet3d": __version__,
        "machine": machine,
        "overrides": list(overrides),
        "rows": rows,
        "skipped": skipped,
    }
    strategies = [name for name in list_strategies(config) if name not in ("none", "blocks")]
    compared = [f"gradients, {name}" for name in strategies if name in COMPARED]
    for name in (*compared, "none", *strategies):
        if rows and time.monotonic() > deadline:
            skipped.append(name)
        else:
            rows.append(measure_row(name, config, torch.device(machine["device"])))
            log(format_row(rows[-1]))
        write_text(file, json.dumps(result, indent=1) + "\n")
    return result


def measure_row(name: str, config: StepConfig, device: torch.device) -> dict[str, Any]:
    """Measure a strategy, or compare its gradients; an error is a result, too."""
    started = time.monotonic()
    try:
        if name.startswith("gradients, "):
            row = compare_gradients(config, name.removeprefix("gradients, "), device)
        else:
            row = measure_strategy(config.with_strategy(name), device)
    except (RuntimeError, UsageError) as error:  # a kernel may not run here
        row = {"error": f"{type(error).__name__}: {summarize_error(error)}"}
    free_memory()
    return {"name": name, **row, "seconds": round(time.monotonic() - started, 1)}


def compare_gradients(config: StepConfig, strategy: str, device: torch.device) -> dict[str, Any]:
    """Compare errors of a strategy's gradients with those of plain modules, both in float32."""
    size = [min(n, 32) for n in config.data.patch_size]
    small = config.vary({"data.patch_size": size, "precision": "32"})
    variants = (("none", torch.float64), ("none", torch.float32), (strategy, torch.float32))
    exact, plain, own = (
        compute_gradients(small.with_strategy(name), dtype, device) for name, dtype in variants
    )
    plain_error, error = (float((g - exact).norm() / exact.norm()) for g in (plain, own))
    is_close = error <= MAX_ERROR_RATIO * plain_error
    return {"gradient_error": error, "plain_gradient_error": plain_error, "ok": is_close}


def compute_gradients(config: StepConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return all gradients of one step with a random batch, on the CPU in float64."""
    free_memory()
    torch.manual_seed(0)
    step = build_configured_step(config, device)
    model, generator = step.model.to(dtype), torch.Generator().manual_seed(1)
    shape = (2, *config.data.patch_size)
    image = torch.randn(2, step.batch_shape[1], *shape[1:], generator=generator).to(device, dtype)
    label = torch.randint(0, 2, shape, generator=generator).to(device, torch.uint8)
    step.loss(model(image), label).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).cpu().double()


def measure_strategy(config: StepConfig, device: torch.device) -> dict[str, Any]:
    """Return estimated and measured memory, and times of a step and of the host that queues it."""
    precision = resolve_precision(config.precision, device.type)
    estimated = estimate_resolved_step(config, precision, cuda=device.type == "cuda")
    free_memory()
    step = build_configured_step(config, device)
    phases = measure_phases(step, device)
    times, started = list[tuple[float, float]](), time.monotonic()
    while len(times) < ROUNDS and time.monotonic() - started < MAX_ROW_SECONDS:
        times.append(time_step(step, device))
    return {
        "precision": precision.used,
        "estimated": estimated.peak.known(),
        "estimated_without_workspaces": estimated.without_workspaces,
        "measured": reduce(or_, phases.values()).known(),
        "measured_phases": {name: r.known() for name, r in phases.items()},
        "step_seconds": statistics.median(whole for whole, _ in times),
        "host_seconds": statistics.median(host for _, host in times),
        "rounds": len(times),
    }


def format_row(row: dict[str, Any]) -> str:
    """Describe a row in a line."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    if "gradient_error" in row:
        verdict = "ok" if row["ok"] else "LESS ACCURATE than plain modules"
        return (
            f"{row['name']}: {verdict}, relative error {row['gradient_error']:.0e}, plain modules "
            f"{row['plain_gradient_error']:.0e}"
        )
    measured = MemoryRecord(**row["measured"]).headline
    memory = "peak not measured" if measured is None else f"peak {measured / MIB:,.0f} MiB"
    if "allocated" in row["measured"]:
        memory += f", estimated {row['estimated']['allocated'] / MIB:,.0f}"
    return (
        f"checkpointing={row['name']}: {row['step_seconds']:.3f} s per step, "
        f"{row['host_seconds']:.3f} s to queue it, {memory}"
    )


def free_memory() -> None:
    """Release what the last row has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def list_failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of rows that failed, except those that ran out of memory."""
    return [
        row["name"]
        for row in rows
        if row.get("ok") is False or ("error" in row and "out of memory" not in row["error"])
    ]
