"""The memory that a device has for a run."""

from pathlib import Path

import torch

from unet3d import nvml
from unet3d.machine.cgroups import get_available_memory
from unet3d.units import CUDA_CONTEXT_BYTES

MEMINFO = Path("/proc/meminfo")


def get_available_bytes(device: torch.device) -> int | None:
    """Return what this process may take of a GPU, or the RAM that is still available.

    Of a GPU that is what it already holds, its CUDA context included, and what is free: other
    processes and a screen hold the rest. None: unknown.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES
        return min(total, free + (nvml.get_process_bytes(device) or held))
    known = [read_meminfo().get("MemAvailable"), get_available_memory()]
    return min((n for n in known if n is not None), default=None)


def read_meminfo(file: Path = MEMINFO) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where it does not exist."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {name.rstrip(":"): int(number) * 1024 for name, number, *unit in fields if unit}


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes that a GPU has left for tensors, counting torch's cache as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
