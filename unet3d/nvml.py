"""Query NVIDIA's driver through its bindings, if they are installed: pip install nvidia-ml-py."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import pynvml  # ty: ignore[import-not-found]
except ModuleNotFoundError:
    pynvml: Any = None


def get_utilization(device: torch.device) -> int | None:
    """Return the percentage of the last sample (up to 1 s) in which a kernel was running."""
    return _query(device, lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def get_process_bytes(device: torch.device) -> int | None:
    """Return the bytes of this process on a GPU with its context; containers may hide its id."""

    def find_process(handle: Any) -> int | None:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)

    return _query(device, find_process)


def _query(device: torch.device, function: Callable[[Any], int | None]) -> int | None:
    """Call a function with the driver's handle of a GPU; None if the driver does not know."""
    if pynvml is None or device.type != "cuda":
        return None
    try:
        return function(_get_handle(device))
    except pynvml.NVMLError:
        return None


@cache
def _get_handle(device: torch.device) -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
