"""Stacks of TIFF pages, by tifffile."""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from unet3d.data.formats.volume_format import (
    UnreadableFileError,
    VolumeHeader,
    check_straight,
    describe_read_errors,
    get_number_type,
    make_scaled_affine,
)
from unet3d.errors import UsageError, need_packages
from unet3d.files import atomic_write

MM_PER_UNIT = {
    **dict.fromkeys(("nm", "nanometer", "nanometers"), 1e-6),
    **dict.fromkeys(("um", "\u00b5m", "\u03bcm", "\\u00B5m", "micron", "microns"), 1e-3),
    **dict.fromkeys(("micrometer", "micrometers"), 1e-3),
    **dict.fromkeys(("mm", "millimeter", "millimeters"), 1.0),
    **dict.fromkeys(("cm", "centimeter", "centimeters"), 10.0),
    **dict.fromkeys(("inch", "in"), 25.4),
    "m": 1000.0,
}
"""Units of ImageJ and OME."""

RESOLUTIONS = ("XResolution", "YResolution")
"""Tags of pixels per unit, as two integers."""

NO_SPACING = "no voxel spacing: 1 mm is assumed"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The first image of an open file, in its full resolution."""

    file: Path
    tif: Any
    axes: str  # Z, Y, X, and C or S for channels; others have size 1

    @property
    def series(self) -> Any:
        """Return tifffile's name for an image."""
        return self.tif.series[0]

    @property
    def size(self) -> dict[str, int]:
        """Return the size of each axis; C is there."""
        sizes = dict(zip(self.axes, self.series.shape, strict=True))
        return {"C": sizes.get("S", 1), "Z": 1, **sizes}

    @property
    def dtype(self) -> np.dtype:
        """Return the type of a voxel as it is stored."""
        return get_number_type(self.series.dtype)

    def check_complete(self) -> None:
        """Refuse a file that does not hold all of the voxels that it declares."""
        if any(page is not None and page.parent is not self.tif for page in self.series):
            raise UnreadableFileError(
                "is one of several files that hold its image: save the image as one file"
            )
        if self.map() is None and (missing := sum(page is None for page in self.series)):
            raise UnreadableFileError(
                f"lacks {missing:,} of the {len(self.series):,} planes that its metadata declares"
            )

    def map(self) -> np.ndarray | None:
        """Map (C, Z, Y, X) if the voxels follow one another in the file."""
        if self.series.dataoffset is None or self.series.dtype.kind == "b":
            return None
        dtype = self.series.dtype.newbyteorder(self.tif.byteorder)
        missing = self.series.dataoffset + prod(self.series.shape) * dtype.itemsize
        missing -= self.file.stat().st_size
        if missing > 0:
            raise UnreadableFileError(f"ends {missing:,} bytes before its last voxel")
        array = np.memmap(self.file, dtype, "c", self.series.dataoffset, self.series.shape)
        return self._order(array)

    def iter_planes(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (channel, z, plane (Y, X)), channel after channel."""
        size, pages = self.size, self.series.pages
        mapped = self.map()
        if mapped is None and not self._has_plane_per_page():
            mapped = self._order(self.series.asarray())
        outer = self.series.shape[: -len(pages[0].shape)]
        for channel in range(size["C"]):
            for z in range(size["Z"]):
                if mapped is not None:
                    yield channel, z, mapped[channel, z]
                    continue
                index = {"C": channel, "S": channel, "Z": z}
                position = [index.get(axis, 0) for axis in self.axes[: len(outer)]]
                page = pages[int(np.ravel_multi_index(position, outer)) if outer else 0]
                plane = page.asarray()
                inner = self.axes[len(outer) :]
                yield channel, z, plane[tuple(index.get(a, slice(None)) for a in inner)]

    def _has_plane_per_page(self) -> bool:
        pages, shape = self.series.pages, self.series.shape
        depth = len(pages[0].shape)
        inner = self.axes[-depth:]
        return (
            tuple(pages[0].shape) == tuple(shape[-depth:])
            and len(pages) == prod(shape[:-depth])
            and inner.replace("S", "").replace("C", "") == "YX"
        )

    def _order(self, array: np.ndarray) -> np.ndarray:
        """Return (C, Z, Y, X)."""
        kept = [n for n, axis in enumerate(self.axes) if axis in "CSZYX"]
        array = array.reshape([array.shape[n] for n in kept])
        axes = "".join(self.axes[n] for n in kept).replace("S", "C")
        for axis in "CZ":
            if axis not in axes:
                axes, array = axis + axes, array[None]
        return array.transpose([axes.index(axis) for axis in "CZYX"])


class Tiff:
    """Files that end in .tif or .tiff; arrays are (x, y, z), as those of NIfTI."""

    name = "TIFF"
    suffixes = (".ome.tif", ".ome.tiff", ".tif", ".tiff")

    def __init__(self, open_header: Callable[[Path], VolumeHeader]):
        self.open_header = open_header  # of any format

    def list_files(self, file: Path) -> list[Path]:
        """Return the file."""
        return [file]

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the tags of the pages."""
        with open_stack(file) as stack:
            stack.check_complete()
            size = stack.size
            (x, y, z), assumption = read_spacing(stack.tif)
            shape = size["X"], size["Y"], size["Z"]
            return VolumeHeader(
                shape=shape if size["C"] == 1 else (*shape, size["C"]),
                affine=make_scaled_affine((x, y, z)),
                pixdim=(x, y, z),
                dtype=stack.dtype,
                assumption=assumption,
                buffer_bytes=size["X"] * size["Y"] * size["C"] * stack.dtype.itemsize,
            )

    def iter_voxels(self, file: Path, header: VolumeHeader) -> Iterator[tuple[int, np.ndarray]]:
        """Yield planes."""
        with open_stack(file) as stack:
            stack.check_complete()
            for channel, _, plane in stack.iter_planes():
                with np.errstate(over="ignore"):  # values beyond float32 become infinite
                    yield channel, plane.astype(np.float32).ravel()

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Map voxels that follow one another, read others page by page."""
        header = self.read_header(file)
        with open_stack(file) as stack:
            channels = stack.map()
            if channels is None:
                size = [stack.size[axis] for axis in "CZYX"]
                channels = np.empty(size, stack.dtype)
                for channel, z, plane in stack.iter_planes():
                    channels[channel, z] = plane
        return channels.transpose(0, 3, 2, 1), header.affine

    def check_target(self, path: Path, like: Path) -> None:
        """Refuse a grid that is not along the axes, or has a position."""
        with need_packages(path, "tifffile", "imagecodecs"):
            import tifffile  # noqa: F401
        header = self.open_header(like)
        check_straight(path, header, like)
        if header.affine[:3, 3].any():
            raise UsageError(
                f"{path} cannot hold the position of {like}: write another format, such as "
                "output_format=nii.gz"
            )

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, classes: Sequence[str]
    ) -> None:
        """Write a compressed OME-TIFF: other metadata would round the spacing."""
        self.check_target(path, like)
        import tifffile

        header = self.open_header(like)
        spacing_mm = header.spacing_mm
        metadata: dict[str, Any] = {"axes": "ZYX"}
        if header.assumption is None or spacing_mm != (1, 1, 1):
            unit, values = "\u00b5m", [mm * 1e3 for mm in spacing_mm]
            if tuple(value * 1e-3 for value in values) != spacing_mm:
                unit, values = "mm", list(spacing_mm)
            for axis, value in zip("XYZ", values, strict=True):
                metadata |= {f"PhysicalSize{axis}": value, f"PhysicalSize{axis}Unit": unit}
        with atomic_write(path) as draft:
            tifffile.imwrite(draft, labels.T, ome=True, compression="zlib", metadata=metadata)


@contextmanager
def open_stack(file: Path) -> Generator[Stack]:
    """Open a file; tifffile logs damage and reads on, which is an error here."""
    with need_packages(file, "tifffile", "imagecodecs"):
        import tifffile
    if not file.is_file():
        raise UnreadableFileError("is missing")
    errors: list[str] = []
    thread = threading.get_ident()

    def collect(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        if record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return False

    log = tifffile.logger()
    log.addFilter(collect)
    try:
        with describe_read_errors(), tifffile.TiffFile(file) as tif:
            len(tif.pages)  # finds a chain of pages that leads back to one, and cuts it
            axes = name_axes(tif.series[0].axes, tif.series[0].shape)
            yield Stack(file=file, tif=tif, axes=axes)
            if errors:
                raise UnreadableFileError(f"is damaged: {errors[0]}")
    finally:
        log.removeFilter(collect)


def name_axes(axes: str, shape: Sequence[int]) -> str:
    """Return the axes with Z for the slices, which plain files do not name.

    Channels of a single slice are slices too: libraries name the first axis of a stack so.

    >>> name_axes("IYX", (5, 64, 64))
    'ZYX'
    """
    sizes = dict(zip(axes, shape, strict=True))
    long = {axis for axis, n in sizes.items() if n > 1 and axis not in "YXS"}
    if len(long) == 1 and long <= {*"CQI"}:
        axes = axes.replace("Z", "Q").replace(long.pop(), "Z")
        sizes = dict(zip(axes, shape, strict=True))
    if long - {*"ZC"} or min(sizes.get("C", 1), sizes.get("S", 1)) > 1:
        described = " x ".join(f"{n} ({axis})" for axis, n in sizes.items())
        raise UnreadableFileError(f"has the axes {described}: save one stack of slices (Z) each")
    return axes


def read_spacing(tif: Any) -> tuple[tuple[float, float, float], str | None]:
    """Return the spacing along x, y and z in mm, and what is assumed."""
    if tif.is_ome:
        pixels = ElementTree.fromstring(tif.ome_metadata).find(".//{*}Pixels")
        attributes = {} if pixels is None else pixels.attrib
        sizes = [attributes.get(f"PhysicalSize{axis}") for axis in "XYZ"]
        units = [attributes.get(f"PhysicalSize{axis}Unit", "um") for axis in "XYZ"]
    elif tif.is_imagej:
        metadata, tags = tif.imagej_metadata or {}, tif.pages[0].tags
        ratios = [tags[name].value if name in tags else (0, 1) for name in RESOLUTIONS]
        sizes = [den / num if num else None for num, den in ratios]
        sizes.append(metadata.get("spacing"))
        units = [metadata.get("unit", "pixel")] * 3
    else:
        return (1.0, 1.0, 1.0), NO_SPACING
    x, y, z = (
        float(size) * MM_PER_UNIT[unit] if size and unit in MM_PER_UNIT else None
        for size, unit in zip(sizes, units, strict=True)
    )
    if x is None or y is None:
        return (1.0, 1.0, 1.0), NO_SPACING
    if z is None:
        return (x, y, x), "no spacing of its slices: that of its columns is assumed"
    return (x, y, z), None
