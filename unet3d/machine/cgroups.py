"""What a container or a batch job may take of the machine: control groups of both versions."""

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

NO_LIMIT = 2**60
"""Version 1 writes a number as large as can be where there is none."""


def memory_limit(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """The least limit that holds for this process; None where there is none, or none is known."""
    return min((limit for limit, _ in _memory(mount, own)), default=None)


def get_available_memory(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """What the limits leave to take, cached files counted as free; None: no limit."""
    return min((max(0, limit - used) for limit, used in _memory(mount, own)), default=None)


def get_cpu_quota(mount: Path = MOUNT, own: Path = OWN) -> float | None:
    """How many cores' worth of time processes get, whatever number of cores they see."""
    shares = []
    for folder in _groups("cpu", mount, own):
        words = _words(folder / "cpu.max")
        words = words or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit():  # else max, or -1
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def _memory(mount: Path, own: Path) -> list[tuple[int, int]]:
    """Limits, and what of each is used."""
    found = []
    for folder in _groups("memory", mount, own):
        counts = dict(zip(*[iter(_words(folder / "memory.stat"))] * 2, strict=False))
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _words(folder / limit), _words(folder / used)
            if most and now and most[0].isdigit() and int(most[0]) < NO_LIMIT:
                found.append((int(most[0]), int(now[0]) - int(counts.get(cached, 0))))
    return found


def _groups(controller: str, mount: Path, own: Path) -> list[Path]:
    """This process's group and those that it lies in, as far as they can be seen from here."""
    paths = {mount: "/"}
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:
            paths[mount] = path
        elif controller in names.split(","):
            paths[mount / controller] = path
    folders = [top.joinpath(*Path(path).parts[1:]) for top, path in paths.items()]
    found = [
        above
        for top, folder in zip(paths, folders, strict=True)
        for above in (folder, *folder.parents)
        if above == top or top in above.parents
    ]
    return [folder for folder in found if ".." not in folder.parts and folder.is_dir()]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
