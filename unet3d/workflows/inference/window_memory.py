"""Measure what a batch of windows takes, by running one before any case."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from unet3d.errors import DoesNotFitError, UsageError, lacks_memory, summarize_error
from unet3d.inference.accumulate import Network
from unet3d.memory.peak import PeakMeter


def measure_window_memory(
    forwards: Sequence[Network],
    networks: Sequence[nn.Module],
    shape: Sequence[int],
    device: torch.device,
) -> tuple[int, int]:
    """Return the number of outputs, and the peak bytes of a batch of windows (B, C, D, H, W).

    Where a process cannot read its own peak, the outputs of all modules are added up instead.
    """
    output_bytes = 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal output_bytes
        output_bytes += output.nbytes if isinstance(output, Tensor) else 0

    hook = register_module_forward_hook(count)  # of all modules: those of one disable fused blocks
    try:
        num_outputs, peak = _run(forwards, shape, device)
        if peak is None and not output_bytes:  # another backend has run
            with torch.inference_mode():
                _run(networks, shape, device)
    except (UsageError, DoesNotFitError):
        raise
    except Exception as error:
        size = "x".join(map(str, shape[2:]))
        if lacks_memory(error):
            memory = "GPU" if device.type == "cuda" else "RAM"
            raise DoesNotFitError(
                f"{shape[0]} windows of {size} do not fit in the {memory}: try batch_size=1, "
                "precision=bf16 or device=cpu"
            ) from error
        if device.type == "cuda" and isinstance(error, RuntimeError):  # may be the device's
            raise
        names = " or ".join(sorted({type(network).__name__ for network in networks}))
        raise UsageError(
            f"{names} cannot take patches of {size}: {summarize_error(error)}"
        ) from error
    finally:
        hook.remove()
    return num_outputs, output_bytes if peak is None else peak


def _run(
    forwards: Sequence[Network], shape: Sequence[int], device: torch.device
) -> tuple[int, int | None]:
    meter = PeakMeter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    meter.start(device)
    before = meter.read(device)
    num_outputs = 0
    batch = torch.zeros(tuple(shape)).to(device)
    for forward in forwards:
        num_outputs = forward(batch.flip([])).shape[1]
    after = meter.read(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return num_outputs, (after.reserved or 0) - (before.reserved or 0)
    if after.resident is None or before.resident is None:
        return num_outputs, None
    return num_outputs, after.resident - before.resident
