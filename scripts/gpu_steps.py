"""Rows of the GPU's report: what training steps take of memory and time, predicted and measured."""

import statistics
import time
from functools import partial
from itertools import product
from typing import Any

import torch
from bench_step import (
    AS_WRITTEN,
    RUNGS,
    Make,
    Silent,
    forum_nets,
    nets_beside_peers,
    predicted,
    step,
)
from gpu_rows import Row, Where

from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.machine.device import resolve_precision
from unet3d.memory.batch_search import CONTEXT, BatchExtrapolation, search_largest_batch
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.record import MemoryRecord
from unet3d.model.lean import tiling as lean_rows
from unet3d.units import MIB
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.measure import measure_phases
from unet3d.workflows.memory.training_step import TrainingStep, make_step_factory

GRID = {
    "precision": ("16", "32", "bf16", "16-true"),
    "checkpointing": ("fused", "leanest"),
    "model": ("unet_small", "unet_nnunet"),
    "optimizer": ("adamw", "sgd"),
}
PATCHES = ("[64,64,64]", "[160,144,32]")
"""32 configurations on each of two patches."""

CARD = 7000 * MIB
"""The card of the forum's user, as nvidia-smi counts."""


# Predicted against measured.


def predict(where: Where) -> dict[str, Row]:
    """The grid: what was predicted of each configuration, and what it took."""
    grid, patches = GRID, PATCHES
    if where.tiny:
        grid = {"precision": ("32",), "checkpointing": ("fused",), "model": ("unet_tiny",)}
        patches = ("[16,16,16]",)
    found: dict[str, Row] = {}
    for patch, *values in product(patches, *grid.values()):
        words = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        words.append(f"data.patch_size={patch}")
        found[" ".join(words)] = partial(compared, where, words)
    return found


def compared(where: Where, words: list[str]) -> dict[str, Any]:
    """One configuration; a CPU's memory is the process's and compares with nothing."""
    accelerator = "gpu" if where.cuda else "cpu"
    request = compose_config(
        [*words, "data.num_classes=5", f"trainer.accelerator={accelerator}"], "train"
    )
    made = estimate_memory(request)
    where.clean()
    before = torch.cuda.memory_allocated() if where.cuda else 0
    one = real(where, request)
    found = beside(made, seen(where, one))
    del one
    where.wait()
    left = torch.cuda.memory_allocated() - before if where.cuda else None
    return found | {"left_by_libraries_bytes": left}  # cuBLAS keeps its workspace among tensors


def real(where: Where, request: ComposedConfig) -> TrainingStep:
    """The configured step on the device."""
    used = resolve_precision(request.config.precision, where.device.type)
    return make_step_factory(request, used, cuda=where.cuda, device=where.device.type)()


def seen(where: Where, one: TrainingStep) -> dict[str, MemoryRecord]:
    """The peaks of a step; in a rehearsal the process's memory stands where a GPU's would."""
    found = measure_phases(one, where.device)
    if where.cuda:
        return found
    return {k: MemoryRecord(allocated=v.resident, reserved=v.resident) for k, v in found.items()}


def beside(made: MemoryEstimate, phases: dict[str, MemoryRecord]) -> dict[str, Any]:
    """Predicted and measured peaks of a step, whole and by phase, and the errors in percent."""
    whole = MemoryRecord()
    for record in phases.values():
        whole |= record
    found: dict[str, Any] = {
        "predicted": made.peak.known(),
        "predicted_most": made.interval[1],  # with a workspace of cuDNN
        "measured": whole.known(),
        "predicted_by_phase": {k: v.known() for k, v in made.phases.items()},
        "measured_by_phase": {k: v.known() for k, v in phases.items()},
    }
    for kind in ("allocated", "reserved"):
        expected, there = found["predicted"].get(kind), found["measured"].get(kind)
        if expected and there:
            found[f"{kind}_error_percent"] = round(100 * (expected / there - 1), 2)
    return found


# Steps, timed.


def clocked(where: Where, one: TrainingStep) -> dict[str, Any]:
    """Seconds of a step, and those after which the host had told the device all of it."""
    count = 1 if where.tiny else 8
    whole, told = [], []
    one.train(Silent())
    for _ in range(count):
        where.wait()
        begun = time.perf_counter()
        one.train(Silent())
        told.append(time.perf_counter() - begun)
        where.wait()
        whole.append(time.perf_counter() - begun)
    return {
        "step_seconds": statistics.median(whole),
        "told_seconds": statistics.median(told),
        "all_seconds": [round(s, 5) for s in whole],
    }


def measured(where: Where, make: Make, size: list[int], *, batch: int = 2) -> dict[str, Any]:
    """A network's step in mixed half precision, with AdamW: peaks, the prediction, the time."""
    used = "16" if where.cuda else "32"
    made = predicted(make, size, batch, used, cuda=where.cuda)
    where.clean()
    torch.manual_seed(0)
    one = step(make, size, batch, used, where.device.type)
    return beside(made, seen(where, one)) | clocked(where, one)


def forum(where: Where) -> dict[str, Row]:
    """The forum's job before and after: as it ran, as written in mixed precision, every rung."""
    rows: dict[str, Row] = {}
    for name in ("small", "large"):
        if not where.tiny:
            rows[f"{name}, as the forum ran it"] = partial(as_it_ran, where, name)
        for rung, make in forum_nets(name, 4 if where.tiny else 64).items():
            rows[f"{name}, {rung}"] = partial(measured, where, make, forum_size(where))
    return short(where, rows)


def forum_size(where: Where) -> list[int]:
    return [32, 16, 16] if where.tiny else [320, 150, 26]


def as_it_ran(where: Where, name: str) -> dict[str, Any]:
    """Everything in half precision, with SGD."""
    request = compose_config([f"experiment=forum_{name}"], "train")
    made = estimate_memory(request)
    where.clean()
    one = real(where, request)
    return beside(made, seen(where, one)) | clocked(where, one)


def peers(where: Where) -> dict[str, Row]:
    """The same channels in the networks that others give, those that are installed."""
    size = [32, 32, 16] if where.tiny else [320, 160, 32]
    nets = nets_beside_peers(4 if where.tiny else 64)
    return short(where, {name: partial(measured, where, make, size) for name, make in nets.items()})


def slabs(where: Where) -> dict[str, Row]:
    """What time and memory make of the size of a slab: the forum's job, a few sizes."""
    nets = forum_nets("small", 4 if where.tiny else 64)
    rows: dict[str, Row] = {}
    for rung, size in product(("none", "leanest"), (4, 16, 64, 256)):
        rows[f"{rung}, {size} MiB"] = partial(with_slabs, where, nets[rung], size * MIB)
    return short(where, rows)


def with_slabs(where: Where, make: Make, nbytes: int) -> dict[str, Any]:
    default = lean_rows.SLAB_BYTES
    vars(lean_rows)["SLAB_BYTES"] = nbytes
    try:
        return measured(where, make, forum_size(where))
    finally:
        vars(lean_rows)["SLAB_BYTES"] = default


def short(where: Where, rows: dict[str, Row]) -> dict[str, Row]:
    """Of a rehearsal the first alone."""
    return dict(list(rows.items())[:1]) if where.tiny else rows


# The largest batch.


def batch(where: Where) -> dict[str, Row]:
    """The largest batch of the forum's job that runs on a card of 7000 MiB, tried."""
    rows: dict[str, Row] = {}
    for name in ("small", "large"):
        for rung, make in forum_nets(name, 4 if where.tiny else 64).items():
            rows[f"{name}, {rung}"] = partial(largest, where, make)
    return short(where, rows)


def largest(where: Where, make: Make) -> dict[str, Any]:
    """From the predicted one up or down, until one fits and the next one does not."""
    used, size = "16" if where.cuda else "32", forum_size(where)
    both = BatchExtrapolation(*(predicted(make, size, n, used, cuda=True) for n in (2, 3)))
    foreseen = search_largest_batch(both, CARD) if both.affine and not where.tiny else 0
    tried: dict[int, bool] = {}

    def fits(count: int) -> bool:
        if count not in tried:
            tried[count] = runs(where, make, size, count)
        return tried[count]

    best = max(1, foreseen)
    while best > 0 and not fits(best):
        best -= 1
    while best == max(tried) and fits(best + 1):
        best += 1
    return {"largest": best, "predicted": foreseen, "tried": tried}


def runs(where: Where, make: Make, size: list[int], count: int) -> bool:
    """Whether two steps do, with what CUDA's context leaves of the card."""
    where.clean()
    if not where.cuda:
        return count < 2  # there is nothing to try
    total = torch.cuda.get_device_properties(where.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (CARD - CONTEXT) / total))
    try:
        one = step(make, size, count, "16", where.device.type)
        for _ in range(2):
            one.train(Silent())
        where.wait()
    except torch.OutOfMemoryError:
        return False
    finally:
        one = None
        torch.cuda.set_per_process_memory_fraction(1.0)
        where.clean()
    return True


# Where the time goes.


def profile(where: Where) -> dict[str, Row]:
    """The kernels of a step that take longest: the forum's small network."""
    nets = forum_nets("small", 4 if where.tiny else 64)
    names = (AS_WRITTEN, *RUNGS, "offload")
    return short(where, {name: partial(profiled, where, nets[name]) for name in names})


def profiled(where: Where, make: Make) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watching

    one = step(make, forum_size(where), 2, "16" if where.cuda else "32", where.device.type)
    for _ in range(2):
        one.train(Silent())
    where.wait()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.cuda else [])]
    with watching(activities=kinds) as recorded:
        one.train(Silent())
        where.wait()
    kind = "CUDA" if where.cuda else "CPU"  # operators tell their kernels' time once more
    spent = [
        (e.self_device_time_total if where.cuda else e.self_cpu_time_total, e.count, e.key)
        for e in recorded.key_averages()
        if e.device_type.name == kind
    ]
    return {
        "device_ms": sum(us for us, _, _ in spent) / 1e3,
        "launches": sum(count for _, count, _ in spent),
        "longest": [
            {"ms": round(us / 1e3, 3), "times": count, "kernel": key[:120]}
            for us, count, key in sorted(spent, reverse=True)[:20]
        ],
    }
