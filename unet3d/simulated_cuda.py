"""Let tensors on the CPU stand for tensors on a GPU, to count what a step would need there."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

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


def get_device_type(x: Tensor) -> str:
    """Return the type of the device that a tensor is on, or stands for."""
    return "cuda" if _is_simulating else x.device.type
