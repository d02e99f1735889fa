"""The memory that a device has for a run."""

from pathlib import Path

import torch

from unet3d.units import CUDA_CONTEXT_BYTES

MEMINFO = Path("/proc/meminfo")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

NO_LIMIT = 2**60
"""Version 1 of control groups reports a huge number where no limit is set."""


def get_available_bytes(device: torch.device) -> int | None:
    """Return what this process may take of a GPU, or the RAM that is still available.

    Of a GPU that is what it already holds, its CUDA context included, and what is free: other
    processes and a screen hold the rest. None: unknown.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES)
    known = [max(0, limit - used) for limit, used in read_cgroups()]
    if "MemAvailable" in (memory := read_meminfo()):
        known.append(memory["MemAvailable"])
    return min(known, default=None)


def get_memory_limit() -> int | None:
    """Return the memory limit of the container or batch job; None if there is none."""
    return min((limit for limit, _ in read_cgroups()), default=None)


def read_meminfo(file: Path = MEMINFO) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where it does not exist."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {name.rstrip(":"): int(number) * 1024 for name, number, *unit in fields if unit}


def read_cgroups(mount: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[tuple[int, int]]:
    """Return (limit, used bytes) of each control group around this process that has a limit.

    Cached files count as free. Both versions of control groups are read.
    """
    limits = []
    for group in list_memory_groups(mount, own):
        for limit_file, used_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                limit = int((group / limit_file).read_text("utf-8"))
                used = int((group / used_file).read_text("utf-8"))
                lines = (group / "memory.stat").read_text("utf-8").splitlines()
            except (OSError, ValueError):  # "max": no limit
                continue
            if limit < NO_LIMIT:
                limits.append((limit, used - int(dict(map(str.split, lines)).get(cached, 0))))
    return limits


def list_memory_groups(mount: Path, own: Path) -> list[Path]:
    """Return this process's control group for memory, and the groups around it."""
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:  # 0::/slurm/job_17, or in version 1 4:memory:/slurm/job_17
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = mount / "memory" if controllers else mount
            group = root / path.lstrip("/")
            groups += [g for g in (group, *group.parents) if g.is_relative_to(root)]
    return groups


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes that a GPU has left for tensors, counting torch's cache as free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
