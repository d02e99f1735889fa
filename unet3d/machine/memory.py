"""How much memory a device has for a run."""

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """A GPU's whole memory, or what a CPU's processes may still take; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not MEMINFO.exists():
        return None
    line = next(s for s in MEMINFO.read_text().splitlines() if s.startswith("MemAvailable:"))
    free = int(line.split()[1]) * 1024
    left = container_left()
    return free if left is None else min(free, left)


def container_left(group: Path = CGROUP) -> int | None:
    """What a container's limit leaves (cgroup 2), counting cached files as free; None: no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(counts.get("inactive_file", 0)))


def free_bytes(device: torch.device) -> int:
    """What a GPU has left for tensors, torch's own cache counted as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
