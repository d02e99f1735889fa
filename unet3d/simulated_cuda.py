"""Let tensors on the CPU stand for tensors on a GPU, to count what a step would need there."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

_is_simulating = False


@contextmanager
def simulate_cuda() -> Generator[None]:
    """Make CPU tensors stand for CUDA tensors within the body, which runs on fake tensors."""
    global _is_simulating
    previous, _is_simulating = _is_simulating, True
    try:
        yield
    finally:
        _is_simulating = previous


def choose_foreach(optimizer: Optimizer) -> None:
    """Let an optimizer of CPU tensors update them together, torch's own choice on CUDA."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def get_device_type(x: Tensor) -> str:
    """Return the type of the device that a tensor is on, or stands for."""
    return "cuda" if _is_simulating else x.device.type
