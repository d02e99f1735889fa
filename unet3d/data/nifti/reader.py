"""Read NIfTI files into arrays, with errors that name the file."""

from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import UnreadableFileError
from unet3d.data.nifti.stream import SCALED, Header, read_header, read_stored
from unet3d.errors import UsageError


def open_image(file: Path) -> Any:
    """Open an image: its header is read, its voxels are not."""
    import nibabel

    _read_header(file)  # nibabel reads all that precedes the voxels
    try:
        return nibabel.load(file)
    except Exception as error:  # nibabel's errors do not name the file
        raise UsageError(f"{file} cannot be read as a volume: {error}") from error


def _read_header(file: Path) -> Header:
    """Return the header of a 3D volume, with channels or without."""
    if not file.is_file():
        raise UsageError(f"{file.absolute()} is missing")
    try:
        header = read_header(file)
    except UnreadableFileError as error:
        raise UsageError(f"{file} cannot be read as a volume: it {error}") from error
    if len(header.shape) not in (3, 4) or min(header.shape) < 1:
        raise UsageError(f"{file} must be a 3D volume, but has shape {list(header.shape)}")
    return header


def read_volume(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (channels (C, D, H, W), affine); integers that need no scaling stay integers."""
    header = _read_header(file)
    try:
        array = read_stored(file, header)
    except UnreadableFileError as error:
        raise UsageError(f"{file} cannot be read as a volume: it {error}") from error
    if (header.slope, header.inter) != (1, 0) and header.dtype.kind in "iuf":
        array = apply_scaling(array, header.slope, header.inter)
    channels = array[None] if array.ndim == 3 else np.moveaxis(array, -1, 0)
    return channels, header.affine


def apply_scaling(array: np.ndarray, slope: float, inter: float) -> np.ndarray:
    """Scale to SCALED, computed in float64 slice by slice to bound memory."""
    result = np.empty(array.shape, SCALED, order="F")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        for z in range(array.shape[-1]):
            result[..., z] = array[..., z].astype(np.float64) * slope + inter
    return result
