"""Read the limits of this process: memory and processor time of control groups, and cores.

Importing it does not import torch.
"""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

NO_LIMIT = 2**60
"""Version 1 of control groups reports a huge number where no limit is set."""


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file of Linux; none where it does not exist."""
    return file.read_text("utf-8").splitlines() if file.exists() else []


def read_cgroups(mount: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[tuple[int, int]]:
    """Return (limit, used bytes) of each control group around this process that has a limit.

    Cached files count as free. Both versions of control groups are read.
    """
    limits = []
    for group in list_groups("memory", mount, own):
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


def list_groups(controller: str, mount: Path, own: Path) -> list[Path]:
    """Return this process's control group for memory or cpu, and the groups around it."""
    groups = []
    for line in read_lines(own):  # 0::/slurm/job_17, or in version 1 4:memory:/slurm/job_17
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = mount / controller if controllers else mount
            group = root / path.lstrip("/")
            groups += [g for g in (group, *group.parents) if g.is_relative_to(root)]
    return groups


def count_usable_cores(mount: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the number of cores that this process may run on, or whose time it may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Windows and macOS do not
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for group in list_groups("cpu", mount, own):
        with suppress(OSError, ValueError):  # "max", and in version 1 -1: no limit
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text("utf-8").split())
            else:
                names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                quota, period = (int((group / name).read_text("utf-8")) for name in names)
            cores = min(cores, ceil(quota / period)) if quota > 0 else cores
    return cores
