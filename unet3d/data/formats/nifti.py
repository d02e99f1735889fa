"""NIfTI, by nibabel."""

import gzip
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import StoredVoxels, VolumeFormat, VolumeHeader
from unet3d.data.preprocessing.channels import convert_to_mm
from unet3d.errors import UsageError
from unet3d.files import atomic_write

logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)  # how it corrects a header


class Nifti(VolumeFormat):
    """Files that end in .nii or .nii.gz."""

    name = "NIfTI"
    suffixes = (".nii.gz", ".nii")

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header, as nibabel corrects it."""
        image = open_image(file)
        dtype, header = image.get_data_dtype(), image.header
        return VolumeHeader(
            shape=tuple(map(int, image.shape)),
            affine=convert_to_mm(image.affine, header.get("xyzt_units", 0)),
            dtype=np.dtype(np.float32) if is_scaled(image) and dtype.kind in "iuf" else dtype,
            has_orientation=bool(header.get("qform_code", 1) or header.get("sform_code", 1)),
        )

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Map an uncompressed file; read and scale another by planes, without a second copy."""
        image, is_compressed = open_image(file), file.suffix == ".gz"
        if not is_compressed and not is_scaled(image):
            array = image.dataobj.get_unscaled().reshape(header.shape, order="F")
        else:
            with gzip.open(file) if is_compressed else file.open("rb") as stream:
                voxels = type(image).from_stream(stream).dataobj.reshape(header.shape)
                array = np.empty(header.shape, header.dtype, order="F")
                with np.errstate(over="ignore"):  # values beyond float32 become infinite
                    for index in range(header.shape[-1]):
                        array[..., index] = voxels[..., index]
                while stream.read(2**16):  # to the end, where a compressed file has its checksum
                    pass
        return np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]

    def open_voxels(self, file: Path, header: VolumeHeader) -> StoredVoxels | None:
        if file.suffix == ".gz" or is_scaled(open_image(file)):
            return None
        return StoredVoxels(self.read_voxels(file, header))

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write labels with the affines and units of a NIfTI image, or the affine of another."""
        import nibabel

        template = open_template(like, grid)
        header = make_header(template, labels.shape, labels.dtype)
        nibabel.save(type(template)(labels, None, header), path)  # Nifti1Image or Nifti2Image


def write_part(
    path: Path, voxels: StoredVoxels, header: VolumeHeader, box: Sequence[slice]
) -> None:
    """Write a box of a volume at its place in space."""
    import nibabel

    part: Any = voxels.read(box)
    part = part[0] if len(part) == 1 else np.moveaxis(part, 0, -1)
    if part.dtype.kind == "b":
        part = part.astype(np.uint8)
    elif part.dtype.itemsize == 8 or part.dtype == np.float16:  # which few readers know
        is_float = part.dtype.kind == "f"
        known = part[np.isfinite(part)] if is_float else part
        limit = float(np.finfo(np.float32).max) if is_float else 2**31 - 1
        low, high = (known.min().item(), known.max().item()) if known.size else (0, 0)
        if not -limit - 1 <= low <= high <= limit:
            raise UsageError(f"{path}: the values {low} to {high} need 64 bits")
        part = part.astype(np.float32 if is_float else np.int32)
    affine = header.affine.copy()
    affine[:3, 3] += affine[:3, :3] @ [side.start for side in box]
    image = nibabel.Nifti1Image(part, affine)
    image.header.set_xyzt_units("mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        nibabel.save(image, draft)


def open_image(file: Path) -> Any:
    """Open an image: its header is read, its voxels are not."""
    import nibabel
    from nibabel.filebasedimages import ImageFileError

    try:
        return nibabel.load(file)
    except ImageFileError:
        if file.suffix == ".gz":
            with gzip.open(file) as stream:
                stream.read(1024)  # says why the header cannot be decompressed
        raise


def is_scaled(image: Any) -> bool:
    """Return whether stored values are to be multiplied or shifted."""
    return (image.dataobj.slope, image.dataobj.inter) != (1, 0)


def open_template(like: Path, grid: VolumeHeader) -> Any:
    """Return the image whose header is copied: `like`, or one on its grid if it is no NIfTI."""
    import nibabel

    if like.name.endswith(Nifti.suffixes):
        return open_image(like)
    image = nibabel.Nifti1Image(np.broadcast_to(np.uint8(0), grid.shape), grid.affine)
    image.header.set_xyzt_units("mm")
    return image


def make_header(template: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Copy a header for other voxels: both affines stay, scaling and display go."""
    header = template.header.copy()
    header.set_data_shape(shape)
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    header.set_intent("none")
    header["cal_min"] = header["cal_max"] = 0
    header.set_data_offset(0)
    header.extensions.clear()
    return header


@contextmanager
def open_probability_file(
    path: Path, classes: int, like: Path, grid: VolumeHeader
) -> Generator[np.ndarray]:
    """Yield an array (K, D, H, W), float32, that is mapped to an uncompressed file."""
    shape = (*grid.shape[:3], classes)
    header = make_header(open_template(like, grid), shape, np.float32)
    with atomic_write(path) as draft:
        with draft.open("wb") as file:
            header.write_to(file)
            offset = header.get_data_offset()
            length = offset + get_probability_bytes(grid.shape[:3], classes)
            if hasattr(os, "posix_fallocate"):  # a full disk fails here, not while writing
                os.posix_fallocate(file.fileno(), 0, length)
            else:
                file.truncate(length)
        values = np.memmap(draft, header.get_data_dtype(), "r+", offset, shape, order="F")
        yield np.moveaxis(values, -1, 0)
        values.flush()
        del values


def get_probability_bytes(space: tuple[int, ...], classes: int) -> int:
    """Return the bytes of the voxels of a file of probabilities."""
    return 4 * classes * prod(space)
