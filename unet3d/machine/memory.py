"""How much memory a device has for a run."""

from pathlib import Path

import torch

from unet3d.machine.cgroups import get_available_memory

MEMINFO = Path("/proc/meminfo")


def get_available_bytes(device: torch.device) -> int | None:
    """A GPU's whole memory, or what a CPU's processes may still take; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    known = [meminfo().get("MemAvailable"), get_available_memory()]
    return min((n for n in known if n is not None), default=None)


def meminfo(file: Path = MEMINFO) -> dict[str, int]:
    """Linux's account of this machine's memory, in bytes; empty elsewhere."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {name.rstrip(":"): int(number) * 1024 for name, number, *unit in parts if unit}


def get_free_bytes(device: torch.device) -> int:
    """What a GPU has left for tensors, torch's own cache counted as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
