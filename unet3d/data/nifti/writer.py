"""What was predicted -> NIfTI files in the grid of their image, whole or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.atomic_write import atomic_write
from unet3d.data.nifti.reader import open_image, volume_shape


def write_labels(path: Path, labels: np.ndarray, like: Path) -> None:
    """(D, H, W) uint8, with the affines, units and whatever else the image's header says."""
    import nibabel

    header = _header(like, labels.shape, np.uint8)
    with atomic_write(path) as draft:
        nibabel.save(_type(like)(labels, None, header), draft)


@contextmanager
def open_probability_file(path: Path, classes: int, like: Path) -> Generator[np.ndarray]:
    """An array (K, D, H, W) float32 that lies in the file and not in memory.

    The file is not compressed, and its room on the disk is taken at once: a disk that is full says
    so here.
    """
    space = volume_shape(open_image(like))[:3]
    header = _header(like, (*space, classes), np.float32)
    with atomic_write(path) as draft:
        with draft.open("wb") as file:
            header.write_to(file)
            offset = header.get_data_offset()
            length = offset + probability_bytes(space, classes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, length)
            else:
                file.truncate(length)
        values = np.memmap(
            draft,
            header.get_data_dtype(),
            mode="r+",
            offset=offset,
            shape=(*space, classes),
            order="F",
        )
        yield np.moveaxis(values, -1, 0)
        values.flush()
        del values


def probability_bytes(space: tuple[int, ...], classes: int) -> int:
    """The size of a file of probabilities."""
    return 4 * classes * int(np.prod(space))


def _type(like: Path) -> Any:
    """NIfTI-1 or NIfTI-2, as the image is."""
    return type(open_image(like))


def _header(like: Path, shape: tuple[int, ...], dtype: Any) -> Any:
    """The image's, for other voxels: both affines keep their codes, scaling and display go."""
    header = open_image(like).header.copy()
    header.set_data_shape(shape)
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    header.set_intent("none")
    header["cal_min"] = header["cal_max"] = 0
    header.set_data_offset(0)
    header.extensions.clear()
    return header
