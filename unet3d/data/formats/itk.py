"""NRRD and MetaImage, by SimpleITK."""

import os
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    LPS_TO_RAS,
    MM_PER_UNIT,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
)

HEADER_BYTES = 2**20  # bytes at a file's start that hold its text

DATA_FILE = re.compile(rb"^(?:data[ _]?file:|ElementDataFile *[=:]) *(.+?)\r?$", re.M | re.I)
"""Where the voxels are, in a file of their own or in this one (LOCAL)."""

UNITS = re.compile(rb"^space units: *(.+?)\r?$", re.M | re.I)
"""Units of a NRRD file, which SimpleITK does not read."""


class Itk(VolumeFormat):
    """Files whose header is text that SimpleITK reads."""

    packages = ("SimpleITK",)
    cannot_hold = ("skewed axes",)

    def __init__(self, name: str, *suffixes: str):
        self.name, self.suffixes = name, suffixes

    def list_files(self, file: Path) -> list[Path]:
        """Return the file, and the file of its voxels if that is another."""
        name = DATA_FILE.search(read_text(file))
        if name is None or name[1].upper() in (b"LOCAL", b"LIST"):
            return [file]
        return [file, file.parent / os.fsdecode(name[1])]

    def read_header(self, file: Path) -> VolumeHeader:
        import SimpleITK

        reader = open_reader(file)
        size, channels = tuple(reader.GetSize()), reader.GetNumberOfComponents()
        voxel = SimpleITK.Image([1, 1, 1], reader.GetPixelID(), channels)
        dtype = SimpleITK.GetArrayViewFromImage(voxel).dtype
        *_, data_file = self.list_files(file)
        if not data_file.is_file():
            raise UnreadableFileError(f"names {data_file.name} for its voxels, which is missing")
        spacing, direction, origin = get_geometry(reader)
        affine = np.eye(4)
        affine[: len(spacing), : len(spacing)] = direction * spacing
        affine[: len(origin), 3] = origin
        return VolumeHeader(
            shape=size if channels == 1 else (*size, channels),
            affine=LPS_TO_RAS @ affine,
            dtype=dtype,
            has_orientation=self.name != "NRRD" or reader.HasMetaDataKey("NRRD_space"),
            buffer_bytes=prod(size) * channels * dtype.itemsize,  # SimpleITK's own image
            label_names=tuple(find_label_names(reader)),
            assumption=self._find_assumption(file),
        )

    def _find_assumption(self, file: Path) -> str | None:
        found = UNITS.search(read_text(file)) if self.name == "NRRD" else None
        units = {*re.findall('"(.*?)"', found[1].decode("utf-8", "replace"))} if found else set()
        if all(MM_PER_UNIT.get(unit, 1) == 1 for unit in units):
            return None
        return f"the space units {' '.join(sorted(units))}, which are not read: mm is assumed"

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Read the volume; the numbers of a voxel, or a fourth axis, are channels."""
        import SimpleITK

        try:
            image = SimpleITK.ReadImage(str(file))
        except RuntimeError as error:  # its reasons mislead: a truncated file is "not found"
            raise UnreadableFileError(
                "cannot be decoded by SimpleITK: it is truncated or damaged"
            ) from error
        array = SimpleITK.GetArrayFromImage(image)
        if image.GetNumberOfComponentsPerPixel() > 1:
            array = np.moveaxis(array, -1, 0)
        channels = array[None] if array.ndim == 3 else array
        return channels.transpose(0, 3, 2, 1)

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        import SimpleITK

        image: Any = SimpleITK.GetImageFromArray(labels.T)
        if like.name.endswith(self.suffixes):  # as they are: computed ones could be rounded
            spacing, direction, origin = get_geometry(open_reader(like))
        else:
            matrix = LPS_TO_RAS @ grid.affine
            spacing, origin = np.linalg.norm(matrix[:3, :3], axis=0), matrix[:3, 3]
            direction = matrix[:3, :3] / spacing
        image.SetSpacing(spacing.tolist())
        image.SetDirection(direction.ravel().tolist())
        image.SetOrigin(origin.tolist())
        SimpleITK.WriteImage(image, str(path), True)


def read_text(file: Path) -> bytes:
    """Return a file's start, which holds its text."""
    with file.open("rb") as stream:
        return stream.read(HEADER_BYTES)


def find_label_names(reader: Any) -> Iterator[tuple[int, str]]:
    """Yield the labels of a .seg.nrrd of 3D Slicer, and their names."""
    for key in reader.GetMetaDataKeys():
        if match := re.fullmatch(r"(Segment\d+_)LabelValue", key):
            name = f"{match[1]}Name"
            if reader.HasMetaDataKey(name):
                yield int(reader.GetMetaData(key)), reader.GetMetaData(name)


def open_reader(file: Path) -> Any:
    """Return SimpleITK's reader of a file, which has read the header."""
    import SimpleITK

    reader: Any = SimpleITK.ImageFileReader()
    reader.SetFileName(str(file))
    reader.ReadImageInformation()
    return reader


def get_geometry(reader: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spacing, the direction (a matrix) and the origin of the first three axes."""
    spacing, origin = np.array(reader.GetSpacing()), np.array(reader.GetOrigin())
    direction = np.array(reader.GetDirection()).reshape(len(spacing), len(spacing))
    return spacing[:3], direction[:3, :3], origin[:3]
