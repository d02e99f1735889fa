"""NRRD and MetaImage, by SimpleITK."""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.itk_text import TextHeader, split_text
from unet3d.data.formats.volume_format import (
    LPS_TO_RAS,
    UnreadableFileError,
    VolumeHeader,
    describe_read_errors,
    iter_slabs,
)
from unet3d.errors import UsageError, need_packages
from unet3d.files import atomic_write
from unet3d.text import is_utf8

ORTHOGONAL = 1e-4
"""Tolerated cosine of the angle between two axes; SimpleITK holds no others."""

DTYPES = (
    *("UInt8", "Int8", "UInt16", "Int16", "UInt32", "Int32", "UInt64", "Int64"),
    *("Float32", "Float64"),
)
"""Names of SimpleITK; in small letters those of NumPy."""

SKIPPED = re.compile("^(line[ _]?skip|byte[ _]?skip|HeaderSize)\\b", re.IGNORECASE | re.MULTILINE)
"""Fields that let the voxels begin later in their file."""

BLOCK = 2**18
"""Bytes that are decompressed at a time."""


class Itk:
    """Files whose header is text that SimpleITK reads."""

    def __init__(
        self,
        name: str,
        suffixes: tuple[str, ...],
        text: TextHeader,
        open_header: Callable[[Path], VolumeHeader],
    ):
        self.name, self.suffixes, self.text = name, suffixes, text
        self.open_header = open_header  # of any format

    def list_files(self, file: Path) -> list[Path]:
        """Return the file, and the file of its voxels if that is another."""
        if not file.is_file():
            raise UnreadableFileError("is missing")
        other = self.text.find_data_file(split_text(file, self.text.end)[0])
        return [file] if other is None else [file, file.parent / other]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the header alone."""
        reader = self._open(file)
        import SimpleITK

        dtypes = {
            getattr(SimpleITK, f"sitk{vector}{name}"): np.dtype(name.lower())
            for vector in ("", "Vector")
            for name in DTYPES
        }
        dtype = dtypes.get(reader.GetPixelID(), np.dtype(np.void))
        size, channels = tuple(reader.GetSize()), reader.GetNumberOfComponents()
        data_bytes = prod(size) * channels * dtype.itemsize
        text, length = split_text(file, self.text.end)
        needed = self.text.count_data_bytes(text, data_bytes, dtype.itemsize)
        *_, data_file = self.list_files(file)
        if not data_file.is_file():
            raise UnreadableFileError(f"names {data_file.name} for its voxels, which is missing")
        found = data_file.stat().st_size - (length if data_file == file else 0)
        if found < needed:
            raise UnreadableFileError(f"ends after {found:,} of {needed:,} bytes of voxels")
        if 0 < data_bytes == needed < found and not SKIPPED.search(text):
            raise UnreadableFileError(
                f"has {found - needed:,} bytes after the voxels that its header declares"
            )
        with describe_read_errors():
            affine = self.text.parse_affine(text)
        return VolumeHeader(
            shape=size if channels == 1 else (*size, channels),
            affine=_get_affine(reader) if affine is None else affine,
            pixdim=tuple(reader.GetSpacing()[:3]),
            dtype=dtype,
            buffer_bytes=data_bytes,
        )

    def iter_voxels(self, file: Path, header: VolumeHeader) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slabs of the volume, which SimpleITK decompresses as a whole."""
        return iter_slabs(self.read_volume(file)[0])

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read the volume; the numbers of a voxel, or a fourth axis, are channels."""
        header = self.read_header(file)
        import SimpleITK

        with describe_read_errors():
            self._check_stream(file, header)
            image = SimpleITK.ReadImage(str(file))
            array = SimpleITK.GetArrayFromImage(image)
        if array.ndim not in (3, 4):
            raise UnreadableFileError(f"has shape {list(header.shape)}: it must be 3D or 4D")
        if image.GetNumberOfComponentsPerPixel() > 1:
            array = np.moveaxis(array, -1, 0)
        channels = array[None] if array.ndim == 3 else array
        return channels.transpose(0, 3, 2, 1), header.affine

    def check_target(self, path: Path, like: Path) -> None:
        """Refuse axes that are not orthogonal."""
        with need_packages(path, "SimpleITK"):
            import SimpleITK  # noqa: F401
        if not is_utf8(str(path.absolute())):
            raise UsageError(
                f"{path} is not named in UTF-8, which SimpleITK needs: write another format, such "
                "as output_format=nii.gz"
            )
        affine = self.open_header(like).affine
        direction = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
        if np.abs(direction.T @ direction - np.eye(3)).max() > ORTHOGONAL:
            raise UsageError(
                f"{path} cannot hold the skewed axes of {like}: write another format, such as "
                "output_format=nii.gz"
            )

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, classes: Sequence[str]
    ) -> None:
        """Write compressed labels."""
        self.check_target(path, like)
        import SimpleITK

        affine = self.open_header(like).affine
        image: Any = SimpleITK.GetImageFromArray(labels.T)
        if like.name.endswith(self.suffixes):  # as they are: computed ones could be rounded
            reader = self._open(like)
            geometry = reader.GetSpacing(), reader.GetDirection(), reader.GetOrigin()
            spacing, direction, origin = (np.array(values) for values in geometry)
            count = round(len(direction) ** 0.5)
            direction = direction.reshape(count, count)[:3, :3]
        else:
            matrix = LPS_TO_RAS @ affine
            spacing, origin = np.linalg.norm(matrix[:3, :3], axis=0), matrix[:3, 3]
            direction = matrix[:3, :3] / spacing
        image.SetSpacing(spacing[:3].tolist())
        image.SetDirection(direction.ravel().tolist())
        image.SetOrigin(origin[:3].tolist())
        with atomic_write(path) as draft:
            SimpleITK.WriteImage(image, str(draft), True)
            text, length = split_text(draft, self.text.end)
            voxels = draft.read_bytes()[length:]
            draft.write_bytes(self.text.write_affine(text, affine).encode("latin-1") + voxels)

    def _check_stream(self, file: Path, header: VolumeHeader) -> None:
        """Refuse compressed voxels that are damaged, where the library would return them."""
        text, length = split_text(file, self.text.end)
        stream = self.text.find_unchecked_stream(text, length)
        if stream is not None:
            *_, data_file = self.list_files(file)
            check_compressed(data_file, *stream, prod(header.shape) * header.dtype.itemsize)

    def _open(self, file: Path) -> Any:
        with need_packages(file, "SimpleITK"):
            import SimpleITK
        if not file.is_file():
            raise UnreadableFileError("is missing")
        if not is_utf8(str(file.absolute())):
            raise UnreadableFileError("is not named in UTF-8, which SimpleITK needs: rename it")
        problem = self.text.find_problem(split_text(file, self.text.end)[0])
        if problem is not None:
            raise UnreadableFileError(f"has an invalid header: {problem}")
        reader: Any = SimpleITK.ImageFileReader()
        reader.SetFileName(str(file))
        with describe_read_errors():
            reader.ReadImageInformation()
        return reader


def check_compressed(file: Path, start: int, count: int, size: int) -> None:
    """Refuse `count` bytes of zlib or gzip that are damaged, or not `size` bytes decompressed."""
    inflate, done = zlib.decompressobj(zlib.MAX_WBITS | 32), 0
    with file.open("rb") as stream:
        stream.seek(start)
        while not inflate.eof and done <= size:
            block = inflate.unconsumed_tail
            if not block:
                block = stream.read(min(BLOCK, count))
                count -= len(block)
            piece = inflate.decompress(block, BLOCK)
            done += len(piece)
            if not block and not piece:
                break
    if done != size or not inflate.eof:
        raise UnreadableFileError(f"has damaged voxels: not {size:,} bytes when decompressed")


def _get_affine(image: Any) -> np.ndarray:
    """Return the affine of the first three axes."""
    spacing, origin = np.array(image.GetSpacing()), np.array(image.GetOrigin())
    count = len(spacing)
    affine = np.eye(4)
    if count >= 3:
        direction = np.array(image.GetDirection()).reshape(count, count)
        affine[:3, :3] = (direction * spacing)[:3, :3]
        affine[:3, 3] = origin[:3]
    return LPS_TO_RAS @ affine
