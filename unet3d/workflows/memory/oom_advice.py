"""When memory does not suffice: told before the run, and when it happens, with what to change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from unet3d.config.compose import ComposedConfig
from unet3d.errors import DoesNotFitError, PredictedOutOfMemoryError, UsageError
from unet3d.machine.memory import get_available_bytes
from unet3d.memory.batch_search import CONTEXT
from unet3d.memory.estimate import MemoryEstimate
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import estimate_memory, with_overrides
from unet3d.workflows.memory.strategies import get_device_bytes, list_leaner_strategies


@dataclass(frozen=True)
class Remedy:
    """Overrides, and what a step is predicted to take with them."""

    overrides: tuple[str, ...]
    reserved: int


def check_memory(
    prediction: MemoryEstimate, request: ComposedConfig, device: torch.device
) -> list[str]:
    """Lines that warn of a run predicted not to fit; Misfit if it is to be stopped."""
    choice = request.config.memory.if_too_large
    if choice not in ("warn", "stop", "ignore"):
        raise UsageError(f"memory.if_too_large must be warn, stop or ignore, got {choice!r}")
    total = get_available_bytes(device)
    if choice == "ignore" or total is None:
        return []
    needed = get_device_bytes(prediction) + CONTEXT
    if request.sweeping and choice == "warn" and needed > total:
        raise PredictedOutOfMemoryError(
            f"a step is predicted to take {format_bytes(needed)}, {format_bytes(total)} are there"
        )
    return format_oom_warning(prediction, request, total, stop=choice == "stop")


def format_oom_warning(
    prediction: MemoryEstimate, request: ComposedConfig, total: int, *, stop: bool
) -> list[str]:
    """The same for a device that has `total` bytes."""
    needed = get_device_bytes(prediction) + CONTEXT
    if needed <= total:
        return []
    lines = [
        f"predicted not to fit: a step takes {format_bytes(needed)}, {format_bytes(total)} are there",
        *format_remedies(find_remedies(request, total)),
    ]
    if stop:
        raise DoesNotFitError("\n".join(lines))
    return lines


def list_candidate_overrides(request: ComposedConfig) -> list[tuple[str, ...]]:
    """What may help, in the order to try it: what changes the training least comes first."""
    less = [(f"checkpointing={rung}",) for rung in list_leaner_strategies(request)]
    least = less[-1] if less else ()
    half, one, bf16 = "data.batch_size=HALF", "data.batch_size=1", "precision=bf16"
    return [
        *less,
        (bf16,),
        (half,),
        (*least, bf16),
        (*least, half),
        (*least, bf16, half),
        (*least, bf16, one),
        (*least, bf16, one, "data.patch_size=HALF"),
    ]


def find_remedies(request: ComposedConfig, total: int | None, count: int = 3) -> list[Remedy]:
    """The first few changes that are predicted to fit `total` bytes (or to take less than now)."""
    limit = total if total is not None else get_device_bytes(estimate_memory(request)) + CONTEXT
    found = []
    for overrides in list_candidate_overrides(request):
        words = tuple(resolve_half(word, request) for word in overrides)
        if any(word in request.overrides for word in words):
            continue
        try:
            reserved = get_device_bytes(estimate_memory(with_overrides(request, *words)))
        except UsageError:
            continue  # not for this network or this patch
        if reserved + CONTEXT < limit:
            found.append(Remedy(words, reserved))
        if len(found) == count:
            break
    return found


def resolve_half(word: str, request: ComposedConfig) -> str:
    """`key=HALF` with half of what the config has; sizes stay multiples of 8."""
    key, _, value = word.partition("=")
    data = request.config.data
    if value != "HALF":
        return word
    if key == "data.batch_size":
        return f"{key}={max(1, data.batch_size // 2)}"
    return f"{key}=[{','.join(str(max(8, n // 16 * 8)) for n in data.patch_size)}]"


def format_remedies(found: Sequence[Remedy]) -> list[str]:
    """Lines to paste."""
    if not found:
        return ["no change of batch, precision, checkpointing or patch is predicted to fit"]
    return [
        "predicted to fit:",
        *(f"  {' '.join(r.overrides)}   ({format_bytes(r.reserved)} reserved)" for r in found),
    ]


def format_oom_report(
    error: torch.OutOfMemoryError,
    *,
    request: ComposedConfig,
    model: nn.Module,
    phase: str,
    device: torch.device,
    prediction: MemoryEstimate | None,
    folder: Path,
) -> str:
    """What ran out where, what holds the memory, and what to change."""
    where = find_failing_module(error.__traceback__, model)
    lines = [f"out of GPU memory in the {phase}" + (f", at module {where}" if where else "")]
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
        lines.append(
            f"at the peak {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved of {format_bytes(total)}; "
            f"{format_bytes(reserved - allocated)} reserved but not used (fragmentation)"
        )
    if prediction is not None:
        largest = list(prediction.holders(prediction.peak_at).items())[:5]
        holders = ", ".join(f"{name} {format_bytes(held)}" for name, held in largest)
        lines.append(f"predicted largest holders at the peak: {holders}")
    found = find_remedies(request, total)
    lines += format_remedies(found)
    if found and (folder / "checkpoints" / "last.ckpt").exists():
        words = " ".join([*request.overrides, *found[0].overrides])
        lines.append(f"to go on from the last checkpoint: unet3d train {words}")
        lines.append(f"  hydra.run.dir='{folder}' resume=auto")
    return "\n".join(lines)


def find_failing_module(trace: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of the model whose code was running when an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = paths.get(id(owner), found) or found
        trace = trace.tb_next
    return found
