"""The memory that a device has for a run."""

from pathlib import Path

import torch

from unet3d.machine.cgroups import get_available_memory

MEMINFO = Path("/proc/meminfo")


def get_available_bytes(device: torch.device) -> int | None:
    """Return a GPU's total memory, or the RAM that is still available; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    known = [read_meminfo().get("MemAvailable"), get_available_memory()]
    return min((n for n in known if n is not None), default=None)


def read_meminfo(file: Path = MEMINFO) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where it does not exist."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {name.rstrip(":"): int(number) * 1024 for name, number, *unit in fields if unit}


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes that a GPU has left for tensors, counting torch's cache as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
