"""Read NIfTI headers as written, and voxels as a stream."""

import gzip
import logging
import stat
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from unet3d.data.formats.volume_format import MAX_DEFLATE_RATIO, UnreadableFileError, VolumeHeader

CHUNK = 2**20
"""Voxels (or bytes) read at a time."""

MAX_OFFSET = 2**26
"""Largest position of the first voxel: what precedes it is decompressed to be skipped."""

SCALED = np.dtype(np.float32)
"""Type of voxels that the header scales."""

MAX_EXTENSIONS = 100
"""Extensions of a header that are read, one after the other."""

SILENT = logging.Logger("nibabel's header checks", logging.CRITICAL + 1)
"""Keeps nibabel from logging its header corrections to standard error."""

ORDERS: dict[str, Literal["little", "big"]] = {"<": "little", ">": "big"}

NIFTI_SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True, kw_only=True)
class Header(VolumeHeader):
    """The parts of a NIfTI header that describe its voxels."""

    offset: int  # of the first voxel, in bytes
    slope: float
    inter: float


def read_header(file: Path) -> Header:
    """Read the header without decoding any voxel."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header
    from nibabel.spatialimages import HeaderDataError

    if not file.name.endswith(NIFTI_SUFFIXES):
        raise UnreadableFileError("is not named .nii or .nii.gz")
    with open_stream(file) as stream:
        block = stream.read(544)
    for kind in (Nifti1Header, Nifti2Header):
        if not kind.may_contain_header(block):
            continue
        try:
            fields = kind(block[: kind.template_dtype.itemsize], check=False)
            pixdim = tuple(fields["pixdim"][1:4].tolist())
            fields.check_fix(SILENT)
            slope, inter = fields.get_slope_inter()
            header = Header(
                shape=drop_trailing_axes(fields.get_data_shape()),
                affine=np.asarray(fields.get_best_affine(), np.float64),
                pixdim=pixdim,
                dtype=fields.get_data_dtype(),
                offset=fields.get_data_offset(),
                slope=1.0 if slope is None else slope,
                inter=inter or 0.0,
            )
        except (HeaderDataError, ValueError, OverflowError) as error:
            raise UnreadableFileError(f"has an invalid header: {error}") from error
        if (header.slope, header.inter) != (1, 0):  # the stored voxels are held besides the scaled
            header = replace(header, buffer_bytes=SCALED.itemsize * prod(header.shape))
        if min(header.shape, default=-1) < 0 or header.offset < 0:
            raise UnreadableFileError(f"has an invalid header: shape {list(header.shape)}")
        if header.offset > MAX_OFFSET:
            raise UnreadableFileError(
                f"has an invalid header: its voxels begin at byte {header.offset:,}, beyond "
                f"{MAX_OFFSET:,}"
            )
        if block[fields.sizeof_hdr : fields.sizeof_hdr + 1] > b"\0":
            check_extensions(file, fields.sizeof_hdr + 4, header.offset, fields.endianness)
        size = file.stat().st_size
        if file.suffix == ".gz" and get_data_bytes(header) > MAX_DEFLATE_RATIO * size:
            raise UnreadableFileError(f"is too short for {prod(header.shape):,} voxels")
        if file.suffix != ".gz":
            voxels = (size - header.offset) // max(header.dtype.itemsize, 1)
            if voxels < prod(header.shape):
                raise make_truncated_error(voxels, header)
            if size > header.offset + get_data_bytes(header):
                raise make_trailing_data_error(header)
        return header
    raise UnreadableFileError("is not a NIfTI file" if block else "is empty")


def drop_trailing_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without axes of size 1 after the third."""
    sizes = tuple(map(int, shape))
    while len(sizes) > 3 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def check_extensions(file: Path, position: int, offset: int, endianness: str) -> None:
    """Refuse many extensions of the header, or some that do not end before the first voxel.

    nibabel would read as much as they declare.
    """
    count = 0
    with open_stream(file) as stream:
        while position + 16 <= offset:
            count += 1
            if count > MAX_EXTENSIONS:
                raise UnreadableFileError(
                    f"has an invalid header: more than {MAX_EXTENSIONS} extensions"
                )
            stream.seek(position)
            size = int.from_bytes(stream.read(4), ORDERS[endianness], signed=True)
            position += size
            if size < 16 or position > offset:
                raise UnreadableFileError(
                    f"has an invalid header: an extension of {size:,} bytes before its voxels"
                )


def iter_voxels(file: Path, header: Header) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (channel, scaled float32 values) in the file's order, to the end of the file.

    Channels follow one another, each in pieces of at most CHUNK voxels.
    """
    size = prod(header.shape[:3])
    with open_stream(file) as stream:
        stream.seek(header.offset)
        for channel in range(header.num_channels):
            for start in range(0, size, CHUNK):
                count = min(CHUNK, size - start)
                block = stream.read(count * header.dtype.itemsize)
                received = len(block) // header.dtype.itemsize
                if received < count:
                    raise make_truncated_error(channel * size + start + received, header)
                values = np.frombuffer(block, header.dtype)
                with np.errstate(over="ignore"):  # values beyond float32 become infinite
                    if (header.slope, header.inter) != (1, 0):
                        values = values * header.slope + header.inter
                    yield channel, values.astype(np.float32)
        if stream.read(1):  # reading on also verifies the checksum of a compressed file
            raise make_trailing_data_error(header)


def read_stored(file: Path, header: Header) -> np.ndarray:
    """Return the voxels as stored, without scaling; an uncompressed file is memory-mapped."""
    if file.suffix != ".gz":
        return np.memmap(file, header.dtype, "c", header.offset, header.shape, order="F")
    size, done = get_data_bytes(header), 0  # the header was refused if the file is too short
    content = np.empty(size, np.uint8)
    with open_stream(file) as stream:
        stream.seek(header.offset)
        while done < size:  # in chunks: GzipFile.readinto first reads all that it is asked for
            received = stream.readinto(content.data[done : done + CHUNK])
            if not received:
                raise make_truncated_error(done // header.dtype.itemsize, header)
            done += received
        if stream.read(1):
            raise make_trailing_data_error(header)
    return content.view(header.dtype).reshape(header.shape, order="F")


def get_data_bytes(header: Header) -> int:
    """Return the size of all voxels."""
    return prod(header.shape) * header.dtype.itemsize


def make_trailing_data_error(header: Header) -> UnreadableFileError:
    """Build the error for a file with more data than its header declares."""
    return UnreadableFileError(
        f"contains data beyond the {prod(header.shape):,} voxels its header declares"
    )


def make_truncated_error(voxels: int, header: Header) -> UnreadableFileError:
    """Build the error for a file with fewer voxels than its header declares."""
    return UnreadableFileError(f"ends after {max(voxels, 0):,} of {prod(header.shape):,} voxels")


@contextmanager
def open_stream(file: Path) -> Generator[gzip.GzipFile | BufferedReader]:
    """Open a file, decompressed; turn errors of opening and reading into UnreadableFileError."""
    try:
        if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():
            raise UnreadableFileError("is not a regular file")  # reading a pipe may never end
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise UnreadableFileError("is missing") from None
    except OSError as error:
        raise UnreadableFileError(f"cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UnreadableFileError(f"cannot be decompressed completely: {error}") from error
