"""Images in every format, written by the libraries that users write them with."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr

from tests.contract import test_formats as contract


def turn(*spacing_mm: float) -> np.ndarray:
    """Return an oblique affine."""
    return contract.OBLIQUE @ np.diag([*np.divide(spacing_mm, (0.75, 0.5, 2.0)), 1.0])


def return_path(write: Callable[..., None]) -> Callable[..., Path]:
    """Let a writer of the contract make the parent of a path, and return the path."""

    def write_and_return(path: Path, array: np.ndarray, affine: np.ndarray) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, array, affine)
        return path

    return write_and_return


write_nifti = return_path(contract.write_nifti)
write_itk = return_path(contract.write_itk)
write_numpy = return_path(contract.write_numpy)
write_series = return_path(contract.write_series)
write_tiff = return_path(contract.write_tiff)
write_hdf5 = return_path(contract.write_hdf5)


def write_zarr(
    path: Path, array: np.ndarray, affine: np.ndarray, *, version=3, chunks=(4, 8, 8)
) -> Path:
    """Write OME-Zarr 0.4 (zarr 2) or 0.5 (zarr 3) in micrometers."""
    x, y, z = np.diag(affine)[:3] * 1000
    axes = [{"name": n, "type": "space", "unit": "micrometer"} for n in "zyx"]
    scale = [z, y, x]
    if array.ndim == 4:
        axes, scale, chunks = [{"name": "c", "type": "channel"}, *axes], [1.0, *scale], (1, *chunks)
    transforms = [{"type": "scale", "scale": scale}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": transforms}]}
    group = zarr.open_group(path, mode="w", zarr_format=version)
    if version == 3:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    else:
        group.attrs["multiscales"] = [{"version": "0.4", **image}]
    stored = np.swapaxes(array, -1, -3)
    group.create_array("0", shape=stored.shape, chunks=chunks, dtype=array.dtype)[:] = stored
    return path
