"""Files of labels: which there are in a folder, and the whole numbers in them."""

from pathlib import Path

import numpy as np

from unet3d.data.layouts.dataset_json import list_volumes
from unet3d.data.nifti.reader import read_volume
from unet3d.data.nifti.stream import split_nifti_suffix
from unet3d.errors import UsageError

LARGEST_LABEL = 2**16 - 1


def files_by_name(folder: Path) -> dict[str, list[Path]]:
    """The folder's NIfTI files by name without suffix; hidden ones are left out."""
    found: dict[str, list[Path]] = {}
    for file in list_volumes(folder):
        found.setdefault(split_nifti_suffix(file)[0], []).append(file)
    return found


def read_labels(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Labels (D, H, W), uint8 where they fit and else int32, and their affine (4, 4)."""
    channels, affine = read_volume(file)
    if len(channels) != 1 or channels.dtype.kind not in "iuf":
        raise UsageError(
            f"{file} must hold one real number per voxel, it holds {len(channels)} of "
            f"{channels.dtype}"
        )
    if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
        raise UsageError(f"{file}: its affine has no spacing above 0: {affine[:3].tolist()}")
    values = channels[0]
    if values.dtype.kind == "f":
        for slab in np.moveaxis(values, -1, 0):
            strange = slab[slab != np.rint(slab)]  # NaN is unequal to itself
            if len(strange):
                raise UsageError(f"{file}: labels must be whole numbers, it holds {strange[0]:g}")
    low, high = values.min(), values.max()
    if low < -LARGEST_LABEL or high > LARGEST_LABEL:
        worst = low if low < -LARGEST_LABEL else high
        raise UsageError(f"{file}: labels must be at most {LARGEST_LABEL}, it holds {worst:g}")
    return values.astype(np.uint8 if low >= 0 and high < 256 else np.int32, copy=False), affine
