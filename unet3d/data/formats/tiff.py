"""Stacks of TIFF pages, by tifffile."""

import logging
import re
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from unet3d.data.formats.volume_format import (
    MM_PER_UNIT,
    NO_SPACING,
    StoredVoxels,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
    get_number_type,
)
from unet3d.files import read_json
from unet3d.text import join_first
from unet3d.types import FloatTriple


class Tiff(VolumeFormat):
    """Files that end in .tif or .tiff; arrays are (x, y, z), as those of NIfTI."""

    name = "TIFF"
    suffixes = (".ome.tif", ".ome.tiff", ".tif", ".tiff")
    packages = ("tifffile", "imagecodecs")
    names_axes = False
    cannot_hold = ("orientation", "position")

    def list_files(self, file: Path) -> list[Path]:
        """Return the file, and nnU-Net's JSON file with its spacing, if there is one."""
        return [file, *filter(Path.exists, [name_sidecar(file)])]

    def read_header(self, file: Path) -> VolumeHeader:
        with open_tiff(file) as (tif, stack, sizes):
            size = {"Z": 1, **sizes}
            spacing_mm, assumption = read_spacing(tif)
            if assumption is not None and (found := read_nnunet_spacing(file)):
                spacing_mm, assumption = found, None
            return VolumeHeader(
                shape=(size["X"], size["Y"], size["Z"], size.get("C", 1) * size.get("S", 1)),
                affine=np.diag([*spacing_mm, 1.0]),
                dtype=get_number_type(stack[0].dtype),
                assumption=assumption,
            )

    def read_voxels(self, file: Path, header: VolumeHeader) -> np.ndarray:
        """Map voxels that follow one another, decompress others."""
        import tifffile

        with open_tiff(file) as (tif, stack, sizes):
            series = stack[0]
            if len(stack) > 1:
                array = np.stack([page.asarray() for page in stack])
            elif series.dataoffset is None or series.dtype.kind == "b":
                array = series.asarray()
            else:
                dtype = series.dtype.newbyteorder(tif.byteorder)
                array = np.memmap(file, dtype, "c", series.dataoffset, series.shape)
        others = "".join(axis for axis in sizes if axis not in "CSXYZ")  # of one plane each
        array = tifffile.transpose_axes(array, "".join(sizes), f"{others}CSXYZ")
        return array.view(get_number_type(array.dtype)).reshape(-1, *header.shape[:3])

    def open_voxels(self, file: Path, header: VolumeHeader) -> StoredVoxels | None:
        """Map voxels that follow one another, or open the tiles of one series by zarr."""
        with open_tiff(file) as (tif, stack, sizes):
            if len(stack) > 1 or stack[0].dtype.kind == "b":
                return None
            number = tif.series.index(stack[0])
            is_mapped, axes = stack[0].dataoffset is not None, "".join(sizes).lower()
        if is_mapped:
            return StoredVoxels(self.read_voxels(file, header))
        if "s" in axes or find_spec("zarr") is None:
            return None
        import tifffile
        import zarr

        store: Any = tifffile.imread(file, aszarr=True, series=number, level=0)
        return StoredVoxels(zarr.open_array(store, mode="r"), axes)

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write a compressed OME-TIFF: other metadata would round the spacing."""
        import tifffile

        metadata: dict[str, Any] = {"axes": "ZYX"}
        if grid.assumption is None or grid.spacing_mm != (1, 1, 1):
            unit, values = "\u00b5m", [mm * 1e3 for mm in grid.spacing_mm]
            if tuple(value * 1e-3 for value in values) != grid.spacing_mm:
                unit, values = "mm", list(grid.spacing_mm)
            for axis, value in zip("XYZ", values, strict=True):
                metadata |= {f"PhysicalSize{axis}": value, f"PhysicalSize{axis}Unit": unit}
        tifffile.imwrite(path, labels.T, ome=True, compression="zlib", metadata=metadata)


@contextmanager
def open_tiff(file: Path) -> Generator[tuple[Any, list[Any], dict[str, int]]]:
    """Open a file whose image is complete; yield its series (`find_stack`) and its size by axis."""
    import tifffile

    def refuse(record: logging.LogRecord) -> bool:  # tifffile logs damage, and reads zeros
        if record.levelno >= logging.ERROR:
            raise UnreadableFileError(f"is damaged: {record.getMessage()}")
        return False

    log = tifffile.logger()
    log.addFilter(refuse)
    try:
        with tifffile.TiffFile(file) as tif:
            stack = find_stack(tif)
            pages = [page for series in stack for page in series]
            if any(page is not None and page.parent is not tif for page in pages):
                raise UnreadableFileError(
                    "is one of several files that hold its image: save the image as one file"
                )
            missing = sum(page is None for page in pages)
            if missing and stack[0].dataoffset is None:
                raise UnreadableFileError(
                    f"lacks {missing:,} of the {len(pages):,} planes that its metadata declares"
                )
            axes, shape = stack[0].axes, stack[0].shape
            if len(stack) > 1:
                axes, shape = f"Z{axes}", (len(stack), *shape)
            if axes == "CYX" and has_real_channels(tif):
                raise UnreadableFileError(
                    f"has {len(pages)} channels (C) of one slice, and 2D images are not supported: "
                    "stack the slices of each scan into one volume; if these are its slices, save "
                    "them with the axes ZYX"
                )
            yield tif, stack, dict(zip(name_axes(axes, shape), shape, strict=True))
    finally:
        log.removeFilter(refuse)


def find_stack(tif: Any) -> list[Any]:
    """Return the series of a file's image: one, or one for each slice; refuse several images."""
    stack = [series for series in tif.series if not series.keyframe.is_reduced] or tif.series[:1]
    kinds = Counter(series.shape for series in stack)
    if len(stack) > 1 and (len(kinds) > 1 or len(stack[0]) > 1):
        listed = [f"{n} of {' x '.join(map(str, shape))}" for shape, n in kinds.items()]
        raise UnreadableFileError(
            f"holds {len(stack)} series of images, {join_first(listed)}: save those that are one "
            "volume as one stack, and others as files of their own"
        )
    return stack


def has_real_channels(tif: Any) -> bool:
    """Return whether an axis C was meant: tifffile calls the first axis so by default."""
    if not tif.is_ome:
        return (tif.imagej_metadata or {}).get("mode") == "composite"
    root = ElementTree.fromstring(tif.ome_metadata)
    is_default = root.get("Creator", "").startswith("tifffile")
    return not is_default or root.find(".//{*}Channel[@Name]") is not None


def name_axes(axes: str, shape: Sequence[int]) -> str:
    """Return the axes with Z for the slices, which plain files do not name.

    Channels of a single slice are slices too: libraries name the first axis of a stack so.

    >>> name_axes("IYX", (5, 64, 64))
    'ZYX'
    """
    if len(set(axes)) < len(axes):
        described = " x ".join(map(str, shape))
        raise UnreadableFileError(
            f"has {len(axes)} axes without names, {described}: write its axes, such as ZCYX"
        )
    sizes = dict(zip(axes, shape, strict=True))
    long = {axis for axis, n in sizes.items() if n > 1 and axis not in "YXS"}
    if len(long) == 1 and long <= {*"CQI"}:
        axes = axes.replace("Z", "Q").replace(long.pop(), "Z")
        sizes = dict(zip(axes, shape, strict=True))
    if long - {*"ZC"} or min(sizes.get("C", 1), sizes.get("S", 1)) > 1:
        described = " x ".join(f"{n} ({axis})" for axis, n in sizes.items())
        raise UnreadableFileError(f"has the axes {described}: save one stack of slices (Z) each")
    return axes


def name_sidecar(file: Path) -> Path:
    """Return nnU-Net's JSON file beside a TIFF, named as the case, without a channel's number."""
    return file.with_name(re.sub(r"(_\d{4})?\.tiff?$", ".json", file.name))


def read_nnunet_spacing(file: Path) -> FloatTriple | None:
    """Return the spacing that nnU-Net's JSON file lists as z, y and x, if there is one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        z, y, x = map(float, read_json(name_sidecar(file))["spacing"])
        return x, y, z
    return None


def read_spacing(tif: Any) -> tuple[FloatTriple, str | None]:
    """Return the spacing along x, y and z in mm, and what is assumed."""
    if tif.is_ome:
        pixels = ElementTree.fromstring(tif.ome_metadata).find(".//{*}Pixels")
        attributes = {} if pixels is None else pixels.attrib
        sizes = [attributes.get(f"PhysicalSize{axis}") for axis in "XYZ"]
        units = [attributes.get(f"PhysicalSize{axis}Unit", "um") for axis in "XYZ"]
    elif tif.is_imagej:
        metadata, tags = tif.imagej_metadata or {}, tif.pages[0].tags
        names = "XResolution", "YResolution"  # pixels per unit, as two integers
        ratios = [tags[name].value if name in tags else (0, 1) for name in names]
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
        return (x, y, x), "no spacing along z: that along x is assumed"
    return (x, y, z), None
