"""Folders of compiled kernels, which are code: no other user may have written to them."""

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from unet3d.atomic_write import find_existing_dir

CACHE_VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables of compilers and their folders in ours. The default of Inductor lies in /tmp, where
other users can create it first; that of Triton in $HOME, which users of a container may share."""


log = logging.getLogger(__name__)


def get_kernel_cache() -> Path:
    """Return the folder of this user's compiled kernels.

    Where several users share `$XDG_CACHE_HOME`, as in a container, each has a folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = hasattr(os, "geteuid") and find_existing_dir(base).stat().st_uid != os.geteuid()
    return base / (f"unet3d-{os.geteuid()}" if shared else "unet3d")


def get_cpp_cache() -> Path:
    """Return the folder of the libraries of C++ kernels."""
    return get_kernel_cache() / "cpp"


def get_triton_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of Triton's cache: ours, unless a variable names another."""
    if environ.get("TRITON_CACHE_DIR"):
        return Path(environ["TRITON_CACHE_DIR"])
    home = environ.get("TRITON_HOME")
    return Path(home) / ".triton" / "cache" if home else get_kernel_cache() / "triton"


def create_private_folder(folder: Path) -> None:
    """Create a folder for this user alone; PermissionError if others could write to it.

    Others must not be able to exchange it once it was checked, either: the folder above it is
    closed to them, and a shared one above that, such as $XDG_CACHE_HOME, must be sticky.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):  # Windows
        return
    for own in (folder.parent, folder):
        if own.stat().st_uid != os.geteuid():
            raise PermissionError(f"{own} belongs to another user: set XDG_CACHE_HOME")
    if stat.S_IMODE(folder.stat().st_mode) & 0o022:
        raise PermissionError(
            f"other users can write to {folder}: remove it, or set XDG_CACHE_HOME to another folder"
        )
    if (mode := stat.S_IMODE(folder.parent.stat().st_mode)) & 0o022:  # of a umask of 002
        folder.parent.chmod(mode & ~0o022)
    for shared in {*folder.parent.resolve().parents, *folder.resolve().parents}:
        mode = shared.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"other users can rename folders in {shared}: set XDG_CACHE_HOME to another folder"
            )


def set_compiler_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let Triton and Inductor keep their code in private folders, unless variables name others."""
    for variable, name in CACHE_VARIABLES.items():
        folder = get_kernel_cache() / name
        if environ.get(variable) or (name == "triton" and get_triton_cache(environ) != folder):
            continue
        try:
            create_private_folder(folder)
        except OSError as error:
            log.warning("kernels are compiled again in each run: %s", error)
            folder = Path(tempfile.mkdtemp(prefix=f"unet3d-{name}-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        environ[variable] = str(folder)
