"""Arrays in HDF5 files, by h5py: the only one of a file, or one named after it: scan.h5/raw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    CHUNK,
    NO_SPACING,
    StoredVoxels,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
    get_number_type,
)
from unet3d.text import join_first

SUFFIXES = (".h5", ".hdf5")

SPACING = "element_size_um"
"""The attribute (z, y, x) of an array that Fiji's plugin and PlantSeg write."""


class Hdf5(VolumeFormat):
    """Files that end in .h5 or .hdf5; their arrays (z, y, x) or (c, z, y, x) are (x, y, z)."""

    name = "HDF5"
    suffixes = SUFFIXES
    packages = ("h5py",)
    names_axes = False
    cannot_hold = ("orientation", "position")

    def list_files(self, file: Path) -> list[Path]:
        path, array = split_array(file)[0], open_array(file)
        return list(dict.fromkeys((path, Path(array.file.filename), *list_sources(array))))

    def read_header(self, file: Path) -> VolumeHeader:
        array, affine = open_array(file), np.eye(4)
        spacing = array.attrs.get(SPACING)
        if spacing is not None:
            affine[:3, :3] = np.diag(np.asarray(spacing, float)[::-1] / 1000)
        return VolumeHeader(
            shape=(*array.shape[:-4:-1], *array.shape[:-3]),
            affine=affine,
            dtype=get_number_type(array.dtype),
            assumption=NO_SPACING if spacing is None else None,
        )

    def open_voxels(self, file: Path, header: VolumeHeader) -> StoredVoxels:
        array = open_array(file)
        return StoredVoxels(array, "czyx"[-array.ndim :])

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        import h5py

        chunks = tuple(min(CHUNK, size) for size in labels.T.shape)
        with h5py.File(path, "w") as file:
            array = file.create_dataset("label", data=labels.T, chunks=chunks, compression="gzip")
            if not grid.assumption:
                array.attrs[SPACING] = np.multiply(grid.spacing_mm[::-1], 1000)


def split_array(path: Path) -> tuple[Path, str]:
    """Return the file that holds a volume, and the name of its array within an HDF5 file.

    >>> split_array(Path("scans/a.h5/volumes/raw"))
    (PosixPath('scans/a.h5'), 'volumes/raw')
    """
    for file in (path, *path.parents):
        if file.name.endswith(SUFFIXES):
            return file, path.relative_to(file).as_posix().removeprefix(".")
    return path, ""


def list_sources(array: Any) -> list[Path]:
    """Return the files that hold the values of a virtual or an external array."""
    if array.is_virtual:
        names = [source.file_name for source in array.virtual_sources()]
    else:
        names = [name for name, *_ in array.external or ()]
    folder = Path(array.file.filename).parent
    return [folder / name for name in dict.fromkeys(names) if name != "."]


def open_array(path: Path) -> Any:
    """Open an array; its file is closed with it. Links are followed where the path names them."""
    import h5py

    path, name = split_array(path)
    arrays: dict[str, Any] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim in (3, 4) and item.dtype.kind in "biuf":
            arrays[name] = item

    file = h5py.File(path, "r", locking=False)
    file.visititems(add)
    if name:
        add(name, file.get(name))
    if not name and len(arrays) == 1:
        name = next(iter(arrays))
    if not arrays:
        raise UnreadableFileError("has no array of three or four axes")
    if name not in arrays:
        what = f"has no volume {name}" if name else "has several volumes"
        example = f"{path.name}/{next(iter(arrays))}"
        raise UnreadableFileError(
            f"{what}: {join_first(sorted(arrays))}: name one, as in {example}"
        )
    if missing := [source for source in list_sources(arrays[name]) if not source.exists()]:
        raise UnreadableFileError(f"has values in {missing[0]}, which is missing")  # zeros to HDF5
    return arrays[name]
