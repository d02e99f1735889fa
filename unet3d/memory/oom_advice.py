"""Say what to change when memory does not suffice: before the run, and when it runs out."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

import torch
from torch import nn

from unet3d.config.compose import Composition, format_overrides
from unet3d.errors import DoesNotFitError, EstimatedOutOfMemoryError
from unet3d.machine import get_available_bytes
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes, get_device_bytes
from unet3d.memory.fit import Changes, list_concessions, list_validation_concessions, search
from unet3d.step.config import StepConfig
from unet3d.text import format_bytes

Fix = tuple[Changes, int]
"""Changed values, and what a run is estimated to reserve with them."""

MAX_FIXES = 3


def check_memory(
    estimate: MemoryEstimate,
    config: StepConfig,
    device: torch.device,
    *,
    if_too_large: str,
    sweeping: bool,
    volume_size: Sequence[int] | None = None,
) -> list[str]:
    """Return lines that warn of a run estimated to run out of memory, or raise to stop it."""
    available = get_available_bytes(device)
    if if_too_large == "ignore" or available is None:
        return []
    needed = add_context_bytes(estimate.run_peak)
    if sweeping and if_too_large == "warn" and needed > available:
        raise EstimatedOutOfMemoryError(
            f"estimated to need {format_bytes(needed)}, only {format_bytes(available)} available"
        )
    lines = format_oom_warning(estimate, config, available, volume_size)
    if lines and if_too_large == "error":
        raise DoesNotFitError("\n".join(lines))
    return lines


def format_oom_warning(
    estimate: MemoryEstimate,
    config: StepConfig,
    available: int,
    volume_size: Sequence[int] | None = None,
) -> list[str]:
    """Return lines that warn if a run is estimated not to fit in `available` bytes."""
    needed = add_context_bytes(estimate.run_peak)
    if needed <= available:
        return []
    validates = estimate.run_peak != estimate.peak
    part = "validation" if validates else "a step"
    return [
        f"estimated to run out of memory: {part} needs {format_bytes(needed)}, "
        f"{format_bytes(available)} are available",
        *format_fixes(find_fixes(config, available, volume_size if validates else None)),
    ]


def find_fixes(
    config: StepConfig, available: int, volume_size: Sequence[int] | None = None
) -> list[Fix]:
    """Return the first changes that are estimated to fit `available` bytes.

    With a `volume_size`, its validation has to fit, which takes longer to estimate.
    """
    candidates = list_concessions(config)
    if volume_size is not None:
        smaller, bf16 = list_validation_concessions(config)
        candidates = [smaller, smaller | bf16]
    found = islice(search(config, candidates, available, volume_size), MAX_FIXES)
    return [(changes, get_device_bytes(estimate)) for changes, estimate in found]


def format_fixes(fixes: list[Fix]) -> list[str]:
    """Return the fixes as lines to paste."""
    if not fixes:
        return ["no change of batch, precision, checkpointing or patch is estimated to fit"]
    lines = [f"  {format_overrides(c)}   ({format_bytes(n)} reserved)" for c, n in fixes]
    return ["estimated to fit:", *lines]


def format_oom_report(
    error: torch.OutOfMemoryError,
    *,
    config: StepConfig,
    composition: Composition,
    model: nn.Module,
    phase: str,
    device: torch.device,
    estimate: MemoryEstimate | None,
    volume_size: Sequence[int] | None,
    folder: Path,
) -> str:
    """Say where memory ran out, what holds it, and what to change."""
    module = find_failing_module(error.__traceback__, model)
    lines = [f"out of GPU memory in the {phase}" + (f", in module {module}" if module else "")]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        lines.append(
            f"peak: {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved of "
            f"{format_bytes(total)}; {format_bytes(reserved - allocated)} reserved but unused "
            "(fragmentation)"
        )
    if estimate is not None:
        holders = list(estimate.modules.items())[:5]
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in holders)
        lines.append(f"estimated to hold the most at the peak: {largest}")
    fixes = find_fixes(config, get_available_bytes(device) or 0, volume_size)
    lines += format_fixes(fixes)
    resumable = [changes for changes, _ in fixes if [*changes] == ["checkpointing"]]
    changes_step = config.strategy in ("none", "blocks")  # other blocks would round differently
    if resumable and not changes_step and (folder / "checkpoints" / "last.ckpt").exists():
        overrides = " ".join([*composition.overrides, format_overrides(resumable[0])])
        command = f"unet3d train {overrides} output='{folder}' resume=auto"
        lines.append(f"to resume from the last checkpoint: {command}")
    return "\n".join(lines)


def find_failing_module(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost module of the model whose code was running when an error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(trace))
    running = [names[id(owner)] for owner in owners if names.get(id(owner))]
    return running[-1] if running else ""
