"""Write predictions as NIfTI files in the grid of their image, atomically."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.nifti.reader import open_image
from unet3d.files import atomic_write


def make_template(shape: tuple[int, ...], affine: np.ndarray) -> Any:
    """Return an image without voxels, for a header on the grid of a file of another format."""
    import nibabel

    image = nibabel.Nifti1Image(np.broadcast_to(np.uint8(0), shape), affine)
    image.header.set_xyzt_units("mm")
    return image


def write_labels(path: Path, labels: np.ndarray, like: Any) -> None:
    """Write labels (D, H, W), uint8, with the affines and units of `like`, a file or an image."""
    import nibabel

    image = open_image(like) if isinstance(like, Path) else like
    header = _make_header(image, labels.shape, np.uint8)
    with atomic_write(path) as draft:
        nibabel.save(type(image)(labels, None, header), draft)  # Nifti1Image or Nifti2Image


@contextmanager
def open_probability_file(path: Path, classes: int, like: Any) -> Generator[np.ndarray]:
    """Yield an array (K, D, H, W), float32, that is mapped to an uncompressed file.

    The disk space is allocated first, so that a full disk fails here and not while writing.
    """
    image = open_image(like) if isinstance(like, Path) else like
    space = image.shape[:3]
    header = _make_header(image, (*space, classes), np.float32)
    with atomic_write(path) as draft:
        with draft.open("wb") as file:
            header.write_to(file)
            offset = header.get_data_offset()
            length = offset + get_probability_bytes(space, classes)
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


def get_probability_bytes(space: tuple[int, ...], classes: int) -> int:
    """Return the bytes of a file of probabilities."""
    return 4 * classes * int(np.prod(space))


def _make_header(image: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Copy an image's header for other voxels: both affines stay, scaling and display go."""
    header = image.header.copy()
    header.set_data_shape(shape)
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    header.set_intent("none")
    header["cal_min"] = header["cal_max"] = 0
    header.set_data_offset(0)
    header.extensions.clear()
    return header
