"""When memory does not suffice: told before the run, and when it happens, with what to change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from unet3d.build.forecast import changed, forecast
from unet3d.build.request import Request
from unet3d.build.rungs import higher, taken
from unet3d.machine.memory import available_bytes
from unet3d.meter.fit import CONTEXT
from unet3d.meter.predict import Prediction
from unet3d.types import Misfit, Misuse, Unfit, size


@dataclass(frozen=True)
class Remedy:
    """Overrides, and what a step is predicted to take with them."""

    overrides: tuple[str, ...]
    reserved: int


def check_fit(prediction: Prediction, request: Request, device: torch.device) -> list[str]:
    """Lines that warn of a run predicted not to fit; Misfit if it is to be stopped."""
    choice = request.config.meter.on_misfit
    if choice not in ("warn", "stop", "ignore"):
        raise Misuse(f"meter.on_misfit must be warn, stop or ignore, got {choice!r}")
    total = available_bytes(device)
    if choice == "ignore" or total is None:
        return []
    needed = taken(prediction) + CONTEXT
    if request.sweeping and choice == "warn" and needed > total:
        raise Unfit(f"a step is predicted to take {size(needed)}, {size(total)} are there")
    return misfit_lines(prediction, request, total, stop=choice == "stop")


def misfit_lines(prediction: Prediction, request: Request, total: int, *, stop: bool) -> list[str]:
    """The same for a device that has `total` bytes."""
    needed = taken(prediction) + CONTEXT
    if needed <= total:
        return []
    lines = [
        f"predicted not to fit: a step takes {size(needed)}, {size(total)} are there",
        *advice(remedies(request, total)),
    ]
    if stop:
        raise Misfit("\n".join(lines))
    return lines


def changes(request: Request) -> list[tuple[str, ...]]:
    """What may help, in the order to try it: what changes the training least comes first."""
    less = [(f"checkpointing={rung}",) for rung in higher(request)]
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


def remedies(request: Request, total: int | None, count: int = 3) -> list[Remedy]:
    """The first few changes that are predicted to fit `total` bytes (or to take less than now)."""
    limit = total if total is not None else taken(forecast(request)) + CONTEXT
    found = []
    for overrides in changes(request):
        words = tuple(halved(word, request) for word in overrides)
        if any(word in request.overrides for word in words):
            continue
        try:
            reserved = taken(forecast(changed(request, *words)))
        except Misuse:
            continue  # not for this network or this patch
        if reserved + CONTEXT < limit:
            found.append(Remedy(words, reserved))
        if len(found) == count:
            break
    return found


def halved(word: str, request: Request) -> str:
    """`key=HALF` with half of what the config has; sizes stay multiples of 8."""
    key, _, value = word.partition("=")
    data = request.config.data
    if value != "HALF":
        return word
    if key == "data.batch_size":
        return f"{key}={max(1, data.batch_size // 2)}"
    return f"{key}=[{','.join(str(max(8, n // 16 * 8)) for n in data.patch_size)}]"


def advice(found: Sequence[Remedy]) -> list[str]:
    """Lines to paste."""
    if not found:
        return ["no change of batch, precision, checkpointing or patch is predicted to fit"]
    return [
        "predicted to fit:",
        *(f"  {' '.join(r.overrides)}   ({size(r.reserved)} reserved)" for r in found),
    ]


def out_of_memory(
    error: torch.OutOfMemoryError,
    *,
    request: Request,
    model: nn.Module,
    phase: str,
    device: torch.device,
    prediction: Prediction | None,
    folder: Path,
) -> str:
    """What ran out where, what holds the memory, and what to change."""
    where = culprit(error.__traceback__, model)
    lines = [f"out of GPU memory in the {phase}" + (f", at module {where}" if where else "")]
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
        lines.append(
            f"at the peak {size(allocated)} allocated, {size(reserved)} reserved of {size(total)}; "
            f"{size(reserved - allocated)} reserved but not used (fragmentation)"
        )
    if prediction is not None:
        largest = list(prediction.holders(prediction.peak_at).items())[:5]
        holders = ", ".join(f"{name} {size(held)}" for name, held in largest)
        lines.append(f"predicted largest holders at the peak: {holders}")
    found = remedies(request, total)
    lines += advice(found)
    if found and (folder / "checkpoints" / "last.ckpt").exists():
        words = " ".join([*request.overrides, *found[0].overrides])
        lines.append(f"to go on from the last checkpoint: unet3d train {words}")
        lines.append(f"  hydra.run.dir='{folder}' resume=auto")
    return "\n".join(lines)


def culprit(trace: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of the model whose code was running when an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = paths.get(id(owner), found) or found
        trace = trace.tb_next
    return found
