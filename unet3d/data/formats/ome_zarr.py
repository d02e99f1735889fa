"""OME-Zarr 0.4 and 0.5, by zarr."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    UnreadableFileError,
    VolumeHeader,
    describe_read_errors,
    get_number_type,
    require_target,
)
from unet3d.errors import need_packages
from unet3d.files import create_folder

MM_PER_UNIT = {
    "angstrom": 1e-7,
    "nanometer": 1e-6,
    "micrometer": 1e-3,
    "millimeter": 1.0,
    "centimeter": 10.0,
    "meter": 1000.0,
}

TRANSFORMS = "coordinateTransformations"

CHUNK = 64
"""Voxels along each axis of the chunks of labels."""

PARALLEL_CHUNKS = 10
"""Chunks that zarr decompresses at a time, by default."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """The full resolution of an image; its axes are some of t, c, z, y and x."""

    array: Any
    axes: str
    scale: tuple[float, ...]  # of z, y and x, in their units
    translation: tuple[float, ...]
    units: tuple[str | None, ...]
    assumption: str | None

    @property
    def affine(self) -> np.ndarray:
        """Return the affine of (x, y, z)."""
        factors = np.array([MM_PER_UNIT[unit or "millimeter"] for unit in self.units])
        affine = np.diag([*(self.scale * factors)[::-1], 1.0])
        affine[:3, 3] = (self.translation * factors)[::-1]
        return affine


class OmeZarr:
    """Folders that end in .zarr; arrays are (x, y, z), as those of NIfTI."""

    name = "OME-Zarr"
    suffixes = (".ome.zarr", ".zarr")

    def list_files(self, file: Path) -> list[Path]:
        """Return all files of the folder, and of folders that it links to."""
        folders = os.walk(file, followlinks=True)
        return sorted(Path(folder, name) for folder, _, names in folders for name in names)

    def read_header(self, file: Path) -> VolumeHeader:
        """Read the attributes of the full resolution."""
        level = open_level(file)
        size = dict(zip(level.axes, level.array.shape, strict=True))
        shape, channels = (size["x"], size["y"], size["z"]), size.get("c", 1)
        chunk = prod(level.array.shards or level.array.chunks)
        return VolumeHeader(
            shape=shape if channels == 1 else (*shape, channels),
            affine=level.affine,
            dtype=get_number_type(level.array.dtype),
            assumption=level.assumption,
            buffer_bytes=level.array.dtype.itemsize
            * min(PARALLEL_CHUNKS * chunk, max(chunk, prod(level.array.shape))),
        )

    def read_volume(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Decompress all chunks."""
        level = open_level(file)
        with describe_read_errors():
            array = level.array[tuple(0 if a == "t" else slice(None) for a in level.axes)]
        axes = level.axes.replace("t", "")
        if "c" not in axes:
            axes, array = "c" + axes, array[None]
        channels = array.transpose([axes.index(axis) for axis in "cxyz"])
        return channels.view(get_number_type(channels.dtype)), level.affine

    def check_target(self, path: Path, like: Path, grid: VolumeHeader) -> None:
        """Refuse a grid that is not along the axes."""
        with need_packages(path, "zarr", "numcodecs"):
            import zarr  # noqa: F401
        require_target(grid.is_straight, path, "orientation", like)

    def write_labels(
        self, path: Path, labels: np.ndarray, like: Path, grid: VolumeHeader, classes: Sequence[str]
    ) -> None:
        """Write labels in the version of the image, or 0.5."""
        import zarr

        if like.name.endswith(self.suffixes):  # as it is: viewers compare the numbers
            level = open_level(like)
            scale, translation, units = level.scale, level.translation, level.units
            version = zarr.open_group(like, mode="r").metadata.zarr_format
        else:
            scale = grid.spacing_mm[::-1]
            translation = tuple(grid.affine[2::-1, 3].tolist())
            units, version = (None if grid.assumption else "millimeter",) * 3, 3
        axes: list[dict[str, str]] = [
            {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
            for name, unit in zip("zyx", units, strict=True)
        ]
        transforms: list[dict[str, Any]] = [{"type": "scale", "scale": list(scale)}]
        if any(translation):
            transforms.append({"type": "translation", "translation": list(translation)})
        datasets = [{"path": "0", TRANSFORMS: transforms}]
        image = {"axes": axes, "datasets": datasets}
        with create_folder(path) as draft:
            group = zarr.open_group(draft, mode="w", zarr_format=version)
            if version == 3:
                group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
            else:
                group.attrs["multiscales"] = [{"version": "0.4", **image}]
            shape = labels.T.shape
            chunks = tuple(min(CHUNK, n) for n in shape)
            array = group.create_array("0", shape=shape, chunks=chunks, dtype=labels.dtype)
            array[:] = labels.T
            if path.exists():  # a folder cannot be replaced
                shutil.rmtree(path)


def open_level(file: Path) -> Level:
    """Open the full resolution of an image."""
    with need_packages(file, "zarr", "numcodecs"):
        import zarr
    with describe_read_errors():
        group = zarr.open_group(file, mode="r")
        attributes: dict[str, Any] = dict(group.attrs)
        images = (attributes.get("ome") or attributes).get("multiscales")
        if not images:
            raise UnreadableFileError("has no multiscales in its attributes: it is not an OME-Zarr")
        axes = [axis if isinstance(axis, dict) else {"name": axis} for axis in images[0]["axes"]]
        names = "".join(str(axis["name"]) for axis in axes)
        first = images[0]["datasets"][0]
        array: Any = group[first["path"]]
        if not {*"zyx"} <= {*names} <= {*"tczyx"} or len(names) != len(array.shape):
            raise UnreadableFileError(f"has the axes {names}: they must be z, y, x, and c if any")
        if "t" in names and array.shape[names.index("t")] > 1:
            count = array.shape[names.index("t")]
            raise UnreadableFileError(f"has {count} time points: save each as a volume")
        transforms = [*first.get(TRANSFORMS, ()), *images[0].get(TRANSFORMS, ())]
        scale, origin = np.ones(len(names)), np.zeros(len(names))
        for transform in transforms:
            if transform["type"] == "scale":
                scale, origin = scale * transform["scale"], origin * transform["scale"]
            elif transform["type"] == "translation":
                origin = origin + transform["translation"]
        units = {axis["name"]: axis.get("unit") for axis in axes if axis["name"] in "zyx"}
        unknown = [unit for unit in units.values() if unit and unit not in MM_PER_UNIT]
        if unknown:
            raise UnreadableFileError(
                f"has the unit {unknown[0]}: it must be one of {', '.join(MM_PER_UNIT)}"
            )
    at = [names.index(name) for name in "zyx"]
    assumption = None
    if not any(transform["type"] == "scale" for transform in transforms):
        assumption = "no voxel spacing: 1 mm is assumed"
    elif not all(units.values()):
        assumption = "no unit of its voxel spacing: mm is assumed"
    return Level(
        array=array,
        axes=names,
        scale=tuple(float(scale[n]) for n in at),
        translation=tuple(float(origin[n]) for n in at),
        units=tuple(units[name] for name in "zyx"),
        assumption=assumption,
    )
