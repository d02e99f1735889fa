"""Run commands of unet3d on Linux with what Windows has and what it allows.

Each argument is one command line. The package gets no POSIX modules, functions, signals and
folders. As on Windows, a folder cannot be opened as a file, a file is synced only if it is open for
writing, and a file that is open or mapped can be neither moved nor removed.
"""

import builtins
import errno
import fcntl
import importlib
import os
import pkgutil
import re
import shlex
import shutil
import stat
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

MISSING_MODULES = ("fcntl", "grp", "posix", "pwd", "resource", "termios")
MISSING_NAMES = {
    "os": (
        *("O_DIRECTORY", "chown", "fork", "getuid", "killpg", "mkfifo", "nice", "posix_fallocate"),
        *("sched_getaffinity", "setsid", "statvfs", "sysconf", "uname"),
    ),
    "signal": ("SIGBUS", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2"),
}
MISSING_FOLDERS = ("/proc/", "/sys/", "/dev/shm/", "/dev/nvidia")
FORBIDDEN_CHARACTERS = re.compile(r'[<>:"|?*]')

PROCESS = os.open("/proc/self", os.O_RDONLY)
REAL = {name: getattr(os, name) for name in ("fsync", "open", "stat", "statvfs")}
REAL_IMPORT = builtins.__import__


class ModuleOnWindows(ModuleType):
    """A module of the standard library without some of its names."""

    def __init__(self, module: ModuleType):
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        if name in MISSING_NAMES[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.__dict__["_module"], name)


def import_module(name, globals=None, locals=None, fromlist=(), level=0):
    """Import for the package what Windows has, and everything for others."""
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] == "unet3d":
        if name in MISSING_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in MISSING_NAMES:
            REAL_IMPORT(name)
            return ModuleOnWindows(sys.modules[name])
    return REAL_IMPORT(name, globals, locals, fromlist, level)


def refuse(number: int, path: object) -> None:
    raise OSError(number, os.strerror(number), path)


def check_exists(path: object) -> None:
    if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(MISSING_FOLDERS):
        refuse(errno.ENOENT, path)


def audit(event: str, arguments: tuple) -> None:
    """Refuse to open files that do not exist on Windows, and names that it does not allow."""
    if event == "open":
        check_exists(arguments[0])
    if event == "os.mkdir" or (event == "open" and (arguments[2] or 0) & os.O_CREAT):
        name = str(arguments[0]).rpartition("/")[2]
        if FORBIDDEN_CHARACTERS.search(name):
            refuse(errno.EINVAL, arguments[0])


def query(name: str) -> Any:
    """Return os.stat or os.statvfs without the folders that do not exist on Windows."""

    def function(path, **options):
        check_exists(path)
        return REAL[name](path, **options)

    return function


def open_file(path, flags, mode=0o777, *, dir_fd=None):
    handle = REAL["open"](path, flags, mode, dir_fd=dir_fd)
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        os.close(handle)
        refuse(errno.EACCES, path)
    return handle


def sync(handle: int) -> None:
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        refuse(errno.EBADF, None)
    REAL["fsync"](handle)


def list_files_in_use() -> set[str]:
    """Return the paths that this process has open or mapped."""
    with os.fdopen(REAL["open"]("maps", os.O_RDONLY, dir_fd=PROCESS), encoding="utf-8") as maps:
        files = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    folder = REAL["open"]("fd", os.O_RDONLY, dir_fd=PROCESS)
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            files.add(os.readlink(entry.name, dir_fd=folder))
    os.close(folder)
    return files


def without_files_in_use(function: Any) -> Any:
    """Return a function that moves or removes a path, for paths that are not in use."""

    def checked(*paths, **options):
        used = list_files_in_use() if "dir_fd" not in options else set()
        for path in map(os.path.realpath, paths):
            if any(file == path or file.startswith(f"{path}/") for file in used):
                refuse(errno.EACCES, path)
        return function(*paths, **options)

    return checked


def become_windows() -> None:
    """Change this process for good."""
    builtins.__import__ = import_module
    for name in ("stat", "statvfs"):
        setattr(os, name, query(name))
    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        setattr(os, name, without_files_in_use(getattr(os, name)))
    os.open, os.fsync = open_file, sync
    shutil._use_fd_functions = False
    sys.addaudithook(audit)


def import_package() -> None:
    """Import every module of the package, except those in Triton's language."""
    import unet3d

    for module in pkgutil.walk_packages(unet3d.__path__, "unet3d."):
        if not module.name.endswith("triton"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    become_windows()
    import_package()
    from unet3d.cli.main import main

    for command in sys.argv[1:]:
        code = main(shlex.split(command))
        if code:
            sys.exit(code)
