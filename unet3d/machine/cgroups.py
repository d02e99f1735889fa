"""Memory and CPU limits of a container or batch job, from control groups of both versions."""

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

NO_LIMIT = 2**60
"""Version 1 reports a huge number where no limit is set."""


def get_memory_limit(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the lowest memory limit of this process; None if there is none or it is unknown."""
    return min((limit for limit, _ in _read_memory(mount, own)), default=None)


def get_available_memory(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return the bytes left below the limits, counting cached files as free; None: no limit."""
    return min((max(0, limit - used) for limit, used in _read_memory(mount, own)), default=None)


def get_cpu_quota(mount: Path = MOUNT, own: Path = OWN) -> float | None:
    """Return the CPU time limit in cores, whatever number of cores is visible; None: no limit."""
    quotas = []
    for folder in _groups("cpu", mount, own):
        fields = _read_fields(folder / "cpu.max") or [
            *_read_fields(folder / "cpu.cfs_quota_us"),
            *_read_fields(folder / "cpu.cfs_period_us"),
        ]
        if len(fields) == 2 and fields[0].isdigit():  # "max" or -1: no limit
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def _read_memory(mount: Path, own: Path) -> list[tuple[int, int]]:
    """Return (limit, used bytes) of each group that has a limit."""
    limits = []
    for folder in _groups("memory", mount, own):
        stats = dict(zip(*[iter(_read_fields(folder / "memory.stat"))] * 2, strict=False))
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit_words, used_words = _read_fields(folder / limit), _read_fields(folder / used)
            if not limit_words or not used_words or not limit_words[0].isdigit():
                continue
            if int(limit_words[0]) < NO_LIMIT:
                used_bytes = int(used_words[0]) - int(stats.get(cached, 0))
                limits.append((int(limit_words[0]), used_bytes))
    return limits


def _groups(controller: str, mount: Path, own: Path) -> list[Path]:
    """Return this process's group and the groups around it, as far as they are visible."""
    paths = {mount: "/"}
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:
            paths[mount] = path
        elif controller in names.split(","):
            paths[mount / controller] = path
    own_folders = [root.joinpath(*Path(path).parts[1:]) for root, path in paths.items()]
    folders = [
        folder
        for root, own_folder in zip(paths, own_folders, strict=True)
        for folder in (own_folder, *own_folder.parents)
        if folder == root or root in folder.parents
    ]
    return [folder for folder in folders if ".." not in folder.parts and folder.is_dir()]


def _read_fields(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").split()
    except OSError:
        return []
