"""NumPy arrays (D, H, W) or (C, D, H, W) in .npy files, which have no spacing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unet3d.data.formats.volume_format import (
    NOT_2D,
    UnreadableFileError,
    VolumeHeader,
    describe_read_errors,
    get_number_type,
)
from unet3d.files import atomic_write, name_file


class NumPy:
    """Files that end in .npy: their axes are taken as they are, with 1 mm between voxels."""

    name = "NumPy"
    suffixes = (".npy",)

    def list_files(self, file: Path) -> list[Path]:
        """Return the file."""
        return [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Map the file."""
        channels, affine = self.read_volume(file)
        spatial = channels.shape[1:]
        return VolumeHeader(
            shape=spatial if len(channels) == 1 else (*spatial, len(channels)),
            affine=affine,
            dtype=channels.dtype,
            assumption="no voxel spacing: 1 mm is assumed",
        )

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Map the file."""
        with describe_read_errors():
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        if array.ndim not in (3, 4) or not array.size:
            expected = NOT_2D if array.ndim == 2 else "it must be (D, H, W) or (C, D, H, W)"
            raise UnreadableFileError(f"has shape {list(array.shape)}: {expected}")
        array = array.view(get_number_type(array.dtype))
        return array[None] if array.ndim == 3 else array, np.eye(4)

    def check_target(self, path: Path, like: Path, grid: VolumeHeader) -> None:
        """Accept every grid: none is written."""

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write the array alone."""
        with atomic_write(path) as draft:
            save_array(draft, labels)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as np.save does, which cannot say why a file cannot be written."""
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    with name_file(path), path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)
