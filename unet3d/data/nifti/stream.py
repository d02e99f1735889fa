"""NIfTI files as they lie on disk: the header as it is written, and the voxels in a stream."""

import gzip
import logging
import stat
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import numpy as np

CHUNK = 2**20
"""So many voxels are in memory at a time."""

MOST_TO_ONE = 1032
"""Bytes that deflate can make of one."""

QUIET = logging.Logger("nibabel's header checks", logging.CRITICAL + 1)
"""nibabel would tell on standard error what it mends in a header."""


ENDINGS = (".nii.gz", ".nii")


class UnreadableFileError(ValueError):
    """Why a file cannot be read as a volume."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of its voxels."""

    shape: tuple[int, ...]
    affine: np.ndarray  # (4, 4), voxels -> mm
    pixdim: tuple[float, float, float]  # as it is written; the affine may say otherwise
    dtype: np.dtype
    offset: int  # of the first voxel
    slope: float
    inter: float

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Sizes of a voxel, from the affine."""
        x, y, z = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)).tolist()
        return x, y, z

    @property
    def num_channels(self) -> int:
        """How many volumes of three axes the file holds."""
        return prod(self.shape[3:])


def is_volume(file: Path) -> bool:
    """Whether a name is a NIfTI file's; hidden files are not volumes."""
    return file.name.endswith(ENDINGS) and not file.name.startswith(".")


def split_nifti_suffix(file: Path) -> tuple[str, str]:
    """The name and the ending of an image, which is empty if the file is none.

    >>> split_nifti_suffix(Path("scans/case.1.nii.gz"))
    ('case.1', '.nii.gz')
    """
    ending = next((e for e in ENDINGS if file.name.endswith(e)), "")
    return file.name.removesuffix(ending), ending


def read_header(file: Path) -> Header:
    """The header, without decoding any voxel."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header
    from nibabel.spatialimages import HeaderDataError

    if not is_volume(file):
        raise UnreadableFileError("is not named .nii or .nii.gz")
    with open_stream(file) as stream:
        block = stream.read(540)
    for kind in (Nifti1Header, Nifti2Header):
        if not kind.may_contain_header(block):
            continue
        try:
            header = kind(block[: kind.template_dtype.itemsize], check=False)
            pixdim = tuple(header["pixdim"][1:4].tolist())
            header.check_fix(QUIET)
            slope, inter = header.get_slope_inter()
            found = Header(
                shape=tuple(map(int, header.get_data_shape())),
                affine=np.asarray(header.get_best_affine(), np.float64),
                pixdim=pixdim,
                dtype=header.get_data_dtype(),
                offset=header.get_data_offset(),
                slope=1.0 if slope is None else slope,
                inter=inter or 0.0,
            )
        except (HeaderDataError, ValueError, OverflowError) as error:
            raise UnreadableFileError(f"has a header that cannot be: {error}") from error
        if min(found.shape) < 0 or found.offset < 0:
            raise UnreadableFileError(f"has a header that cannot be: shape {list(found.shape)}")
        if file.suffix != ".gz":
            there = (file.stat().st_size - found.offset) // max(found.dtype.itemsize, 1)
            if there < prod(found.shape):
                raise make_truncated_error(there, found)
            if file.stat().st_size > found.offset + get_data_bytes(found):
                raise make_trailing_data_error(found)
        return found
    raise UnreadableFileError("is not a NIfTI file" if block else "is empty")


def iter_voxels(file: Path, header: Header) -> Iterator[tuple[int, np.ndarray]]:
    """(channel, values) in the file's order, scaled, as float32; read to the very end.

    Channels come one after another, each in pieces of at most CHUNK voxels.
    """
    size = prod(header.shape[:3])
    with open_stream(file) as stream:
        stream.seek(header.offset)
        for channel in range(header.num_channels):
            for start in range(0, size, CHUNK):
                wanted = min(CHUNK, size - start)
                block = stream.read(wanted * header.dtype.itemsize)
                got = len(block) // header.dtype.itemsize
                if got < wanted:
                    raise make_truncated_error(channel * size + start + got, header)
                values = np.frombuffer(block, header.dtype)
                with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
                    if (header.slope, header.inter) != (1, 0):
                        values = values * header.slope + header.inter
                    yield channel, values.astype(np.float32)
        if stream.read(1):  # a compressed file's checksum comes last, and is looked at here
            raise make_trailing_data_error(header)


def read_stored(file: Path, header: Header) -> np.ndarray:
    """The voxels as they are written, not scaled; mapped where the file is not compressed."""
    if file.suffix != ".gz":
        return np.memmap(file, header.dtype, "c", header.offset, header.shape, order="F")
    size, done = get_data_bytes(header), 0
    if size > MOST_TO_ONE * file.stat().st_size:  # before memory is asked for
        raise UnreadableFileError(f"is too short for {prod(header.shape):,} voxels")
    content = np.empty(size, np.uint8)
    with open_stream(file) as stream:
        stream.seek(header.offset)
        while done < size:
            got = stream.readinto(content.data[done : done + CHUNK])
            if not got:
                raise make_truncated_error(done // header.dtype.itemsize, header)
            done += got
        if stream.read(1):
            raise make_trailing_data_error(header)
    return content.view(header.dtype).reshape(header.shape, order="F")


def get_data_bytes(header: Header) -> int:
    """Of all voxels."""
    return prod(header.shape) * header.dtype.itemsize


def make_trailing_data_error(header: Header) -> UnreadableFileError:
    """What to say of a file with more bytes than its header tells: one of the two is wrong."""
    return UnreadableFileError(
        f"goes on after the {prod(header.shape):,} voxels that its header tells of"
    )


def make_truncated_error(there: int, header: Header) -> UnreadableFileError:
    """What to say of a file with fewer voxels than its header tells."""
    return UnreadableFileError(f"ends after {max(there, 0):,} of {prod(header.shape):,} voxels")


@contextmanager
def open_stream(file: Path) -> Generator[gzip.GzipFile | BufferedReader]:
    """The bytes of a file, decompressed; whatever is wrong with them is Unreadable."""
    try:
        if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():
            raise UnreadableFileError("is no file with an end")  # a pipe, a device
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise UnreadableFileError("is missing") from None
    except OSError as error:
        raise UnreadableFileError(f"cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UnreadableFileError(f"cannot be decompressed to its end: {error}") from error
