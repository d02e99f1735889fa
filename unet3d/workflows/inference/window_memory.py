"""What a batch of windows takes: one is computed before any case, scratch memory and all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unet3d.errors import DoesNotFitError
from unet3d.inference.accumulate import Network
from unet3d.memory.peak import PeakMeter


def measure_window_memory(
    forwards: Sequence[Network],
    networks: Sequence[nn.Module],
    shape: Sequence[int],
    device: torch.device,
) -> tuple[int, int]:
    """The channels of the logits, and bytes: the most that a batch (B, C, D, H, W) takes.

    Where a process cannot learn its own peak, all that the networks' modules give is added up.
    """
    given = 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal given
        given += output.nbytes if isinstance(output, Tensor) else 0

    hooks = [m.register_forward_hook(count) for n in networks for m in n.modules()]
    try:
        channels, taken = _computed(forwards, shape, device)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise DoesNotFitError(
            f"{shape[0]} windows of {'x'.join(map(str, shape[2:]))} at a time do not fit the "
            f"{'GPU' if device.type == 'cuda' else 'RAM'}; what may help: batch_size=1, "
            "precision=bf16, device=cpu"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return channels, given if taken is None else taken


def _computed(
    forwards: Sequence[Network], shape: Sequence[int], device: torch.device
) -> tuple[int, int | None]:
    meter = PeakMeter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    meter.start(device)
    before = meter.read(device)
    channels = 0
    batch = torch.zeros(tuple(shape)).to(device)
    for forward in forwards:
        channels = forward(batch.flip([])).shape[1]
    after = meter.read(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return channels, (after.reserved or 0) - (before.reserved or 0)
    if after.resident is None or before.resident is None:
        return channels, None
    return channels, after.resident - before.resident
