"""NumPy arrays (D, H, W) or (C, D, H, W) in .npy files, which have no spacing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    NO_SPACING,
    StoredVoxels,
    VolumeFormat,
    VolumeHeader,
    get_number_type,
)


class NumPy(VolumeFormat):
    """Files that end in .npy: their axes are taken as they are, with 1 mm between voxels."""

    name = "NumPy"
    suffixes = (".npy",)
    names_axes = False
    writes_parts = True

    def read_header(self, file: Path) -> VolumeHeader:
        array = np.load(file, mmap_mode="c", allow_pickle=False)
        return VolumeHeader(
            shape=array.shape if array.ndim < 4 else (*array.shape[1:], len(array)),
            affine=np.eye(4),
            dtype=get_number_type(array.dtype),
            assumption=NO_SPACING,
        )

    def open_voxels(self, file: Path, header: VolumeHeader) -> StoredVoxels:
        array = np.load(file, mmap_mode="c", allow_pickle=False).view(header.dtype)
        return StoredVoxels(array, "cxyz"[-array.ndim :])

    def create_labels(
        self, path: Path, dtype: Any, like: Path, grid: VolumeHeader, channels: int | None = None
    ) -> Any:
        leading = () if channels is None else (channels,)
        array = np.lib.format.open_memmap(path, "w+", dtype, (*leading, *grid.shape[:3]))
        if hasattr(os, "posix_fallocate"):  # a full disk would kill what writes to a map
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array

    def open_labels(self, path: Path) -> Any:
        return np.lib.format.open_memmap(path, "r+")

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        np.save(path, labels)  # a full disk is an error, which would kill what writes to a map
