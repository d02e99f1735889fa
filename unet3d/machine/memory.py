"""How much memory a device has for a run."""

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """A GPU's whole memory, or what a CPU's processes may still take; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not MEMINFO.exists():
        return None
    line = next(s for s in MEMINFO.read_text().splitlines() if s.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
