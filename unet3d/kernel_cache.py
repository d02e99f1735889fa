"""Folders of compiled kernels."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from unet3d.files import find_existing_dir

CACHE_VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables of compilers and their folders in ours."""


def get_kernel_cache() -> Path:
    """Return the folder of this user's compiled kernels.

    Where several users share `$XDG_CACHE_HOME`, as in a container, each has a folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = hasattr(os, "geteuid") and find_existing_dir(base).stat().st_uid != os.geteuid()
    return base / (f"unet3d-{os.geteuid()}" if shared else "unet3d")


def create_kernel_folder(name: str) -> Path:
    """Create a folder of compiled kernels for this user alone, and return it."""
    folder = get_kernel_cache() / name
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def set_compiler_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let Triton and Inductor keep their code in our folder, unless variables name others."""
    for variable, name in CACHE_VARIABLES.items():
        if not environ.get(variable):
            environ[variable] = str(create_kernel_folder(name))
