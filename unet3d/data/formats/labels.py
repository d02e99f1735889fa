"""Find and read files of labels."""

from pathlib import Path

import numpy as np

from unet3d.data.formats.volume_format import Grid
from unet3d.data.formats.volumes import list_volumes, open_header, read_volume, split_suffix
from unet3d.errors import UsageError

MAX_LABEL = 2**16 - 1


def list_files_by_name(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's volumes by name without suffix; hidden files are ignored."""
    files: dict[str, list[Path]] = {}
    for file in list_volumes(folder):
        files.setdefault(split_suffix(file)[0], []).append(file)
    return files


def read_labels(file: Path, grid: Grid | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (D, H, W), uint8 if they fit and else int32, and their affine (4, 4).

    Labels that may hold a part of their image's grid are put on `grid`, if they are a part of it.
    """
    channels, affine = read_volume(file, grid)
    if len(channels) != 1 or channels.dtype.kind not in "iuf":
        raise UsageError(
            f"{file} must hold one real number per voxel, but holds {len(channels)} of type "
            f"{channels.dtype}"
        )
    if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
        raise UsageError(f"{file}: its affine is singular or not finite: {affine[:3].tolist()}")
    values = channels[0]
    if values.dtype.kind == "f":
        for plane in np.moveaxis(values, -1, 0):
            fractional = plane[plane != np.rint(plane)]  # includes NaN, which is unequal to itself
            if len(fractional):
                raise UsageError(f"{file}: labels must be integers, found {fractional[0]:g}")
    low, high = values.min(), values.max()
    if low < -MAX_LABEL or high > MAX_LABEL:
        label = low if low < -MAX_LABEL else high
        raise UsageError(
            f"{file}: labels must be within -{MAX_LABEL}..{MAX_LABEL}, found {label:g}"
        )
    return values.astype(np.uint8 if low >= 0 and high < 256 else np.int32, copy=False), affine


def read_label_pair(
    first: Path, second: Path
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the labels and affine of two files; a SEG may hold a part of the other's grid."""
    return read_labels(first, open_header(second)), read_labels(second, open_header(first))
