"""OME-Zarr 0.4 and 0.5, by zarr."""

import os
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volume_format import (
    CHUNK,
    MM_PER_UNIT,
    NO_SPACING,
    SLAB,
    StoredVoxels,
    UnreadableFileError,
    VolumeFormat,
    VolumeHeader,
    get_number_type,
    iter_boxes,
)

TRANSFORMS = "coordinateTransformations"

LOWEST = 256  # most voxels along an axis of their lowest resolution
PARALLEL_CHUNKS = 10  # chunks that zarr decompresses at a time, by default


@dataclass(frozen=True, kw_only=True)
class Level:
    """The full resolution of an image; its axes are some of t, c, z, y and x."""

    array: Any
    axes: str
    scale: tuple[float, ...]  # of z, y and x, in their units
    translation: tuple[float, ...]
    units: tuple[str | None, ...]
    assumption: str | None


class OmeZarr(VolumeFormat):
    """Folders that end in .zarr, or lie in one; arrays are (x, y, z), as those of NIfTI."""

    name = "OME-Zarr"
    suffixes = (".ome.zarr", ".zarr")
    packages = ("zarr", "numcodecs")
    names_axes = False
    cannot_hold = ("orientation",)
    is_folder = writes_parts = True

    def list_files(self, file: Path) -> list[Path]:
        """Return all files of the folder, and of folders that it links to, but of its labels."""
        folders = os.walk(file, followlinks=True)
        paths = (Path(folder, name) for folder, _, names in folders for name in names)
        return sorted(path for path in paths if not path.is_relative_to(file / "labels"))

    def read_header(self, file: Path) -> VolumeHeader:
        level = open_level(file)
        size = dict(zip(level.axes, level.array.shape, strict=True))
        factors = np.array([MM_PER_UNIT[unit or "mm"] for unit in level.units])
        affine = np.diag([*(level.scale * factors)[::-1], 1.0])
        affine[:3, 3] = (level.translation * factors)[::-1]
        chunk = prod(level.array.shards or level.array.chunks)
        return VolumeHeader(
            shape=(size["x"], size["y"], size["z"], size.get("c", 1)),
            affine=affine,
            dtype=get_number_type(level.array.dtype),
            assumption=level.assumption,
            buffer_bytes=level.array.dtype.itemsize
            * min(PARALLEL_CHUNKS * chunk, max(chunk, prod(level.array.shape))),
        )

    def open_voxels(self, file: Path, header: VolumeHeader) -> StoredVoxels:
        level = open_level(file)
        return StoredVoxels(level.array, level.axes)

    def create_labels(
        self, path: Path, dtype: Any, like: Path, grid: VolumeHeader, channels: int | None = None
    ) -> Any:
        return TransposedArray(create_array(path, dtype, like, grid, channels))

    def open_labels(self, path: Path) -> Any:
        import zarr

        return TransposedArray(zarr.open_group(path, mode="r+")["0"])

    def finish_labels(self, path: Path) -> None:
        """Add lower resolutions, which viewers show first.

        Each has every second voxel along the axes whose voxels are smallest.
        """
        import zarr

        group: Any = zarr.open_group(path, mode="r+")
        attributes: dict[str, Any] = dict(group.attrs)
        image = attributes.get("ome", attributes)["multiscales"][0]
        first, array = image["datasets"][0], group["0"]
        (old, *translation), sizes = first[TRANSFORMS], np.array(array.shape)
        scale = np.array(old["scale"])
        factors = np.array([MM_PER_UNIT[unit or "mm"] for unit in open_level(path).units])
        image["datasets"] = [first]
        while max(sizes[-3:]) > LOWEST:
            spacing, steps = scale[-3:] * factors, np.ones_like(sizes)
            steps[-3:] = np.where(spacing < 2 * min(spacing), 2, 1)
            scale, sizes = scale * steps, -(-sizes // steps)
            name = str(len(image["datasets"]))
            chunks = tuple(min(n, size) for n, size in zip(array.chunks, sizes, strict=True))
            lower = group.create_array(
                name,
                shape=sizes.tolist(),
                chunks=chunks,
                dtype=array.dtype,
                overwrite=True,
                dimension_names=getattr(array.metadata, "dimension_names", None),
            )
            for box in iter_boxes(lower.shape, chunks, SLAB):
                part = (slice(s.start * n, s.stop * n) for s, n in zip(box, steps, strict=True))
                lower[box] = array[tuple(part)][tuple(slice(None, None, n) for n in steps)]
            scaling = {"type": "scale", "scale": scale.tolist()}
            image["datasets"].append({"path": name, TRANSFORMS: [scaling, *translation]})
            array = lower
        group.attrs.update(attributes)


@dataclass(frozen=True)
class TransposedArray:
    """An array (..., z, y, x), written by slices (..., x, y, z)."""

    array: Any

    def __setitem__(self, box: tuple[Any, ...], labels: np.ndarray) -> None:
        self.array[(*box[:-3], *box[:-4:-1])] = labels.swapaxes(-1, -3)


def is_within_zarr(path: Path) -> bool:
    """Return whether a path is an OME-Zarr, or an image within one, such as a.zarr/labels/cells."""
    return any(folder.name.endswith(OmeZarr.suffixes) for folder in (path, *path.parents))


def is_group(path: Path) -> bool:
    """Return whether a folder within an OME-Zarr may hold an image."""
    return is_within_zarr(path) and any((path / name).exists() for name in ("zarr.json", ".zattrs"))


def create_array(
    path: Path, dtype: Any, like: Path, grid: VolumeHeader, channels: int | None = None
) -> Any:
    """Create an image of zeros in the version of the image `like`, or 0.5."""
    import zarr

    if is_within_zarr(like):  # as it is: viewers compare the numbers
        level = open_level(like)
        scale, translation, units = level.scale, level.translation, level.units
        version = open_group(like).metadata.zarr_format
    else:
        scale = grid.spacing_mm[::-1]
        translation = tuple(grid.affine[2::-1, 3].tolist())
        units, version = (None if grid.assumption else "millimeter",) * 3, 3
    axes: list[dict[str, str]] = [
        {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
        for name, unit in zip("zyx", units, strict=True)
    ]
    shape = grid.shape[2::-1]
    chunks = tuple(min(CHUNK, n) for n in shape)
    if channels is not None:
        axes = [{"name": "c", "type": "channel"}, *axes]
        scale, translation = (1.0, *scale), (0.0, *translation)
        shape, chunks = (channels, *shape), (1, *chunks)
    transforms: list[dict[str, Any]] = [{"type": "scale", "scale": list(scale)}]
    if any(translation):
        transforms.append({"type": "translation", "translation": list(translation)})
    image = {"axes": axes, "datasets": [{"path": "0", TRANSFORMS: transforms}]}
    group = zarr.open_group(path, mode="w", zarr_format=version)
    if version == 3:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    else:
        group.attrs["multiscales"] = [{"version": "0.4", **image}]
    names = [axis["name"] for axis in axes] if version == 3 else None  # Zarr 2 has none
    return group.create_array(
        "0", shape=shape, chunks=chunks, dtype=dtype, fill_value=0, dimension_names=names
    )


def open_group(file: Path) -> Any:
    """Open a group as its files are; consolidated metadata may be older."""
    import zarr

    return zarr.open_group(file, mode="r", use_consolidated=False)


def measure_voxel(dataset: dict[str, Any]) -> float:
    """Return the volume of a level's voxels."""
    scales = (t["scale"] for t in dataset.get(TRANSFORMS, ()) if t["type"] == "scale")
    return abs(prod(chain.from_iterable(scales)))  # an axis may be inverted


def open_level(file: Path) -> Level:
    """Open the full resolution of an image, whatever the order of its levels."""
    group = open_group(file)
    attributes: dict[str, Any] = dict(group.attrs)
    images = (attributes.get("ome") or attributes).get("multiscales")
    if not images:
        raise UnreadableFileError(
            "has no multiscales in its attributes: it is not an OME-Zarr, or holds several images: "
            f"name one, as in {file.name}/0"
        )
    axes, first = images[0]["axes"], min(images[0]["datasets"], key=measure_voxel)
    names = "".join(str(axis["name"]) for axis in axes)
    array: Any = group[first["path"]]
    size = dict(zip(names, array.shape, strict=True))
    if not {*"zyx"} <= {*names} <= {*"tczyx"} or size.get("t", 1) > 1:
        described = " x ".join(f"{n} ({axis})" for axis, n in size.items())
        raise UnreadableFileError(f"has the axes {described}: they must be z, y, x, and c if any")
    scale, origin = np.ones(len(names)), np.zeros(len(names))
    transforms = [*first.get(TRANSFORMS, ()), *images[0].get(TRANSFORMS, ())]
    for transform in transforms:
        if transform["type"] == "scale":
            scale, origin = scale * transform["scale"], origin * transform["scale"]
        elif transform["type"] == "translation":
            origin = origin + transform["translation"]
    units = {axis["name"]: axis.get("unit") for axis in axes if axis["name"] in "zyx"}
    for unit in units.values():
        if unit and unit not in MM_PER_UNIT:
            raise UnreadableFileError(f"has the unit {unit}: it must be one such as micrometer")
    assumption = None
    if not any(transform["type"] == "scale" for transform in transforms):
        assumption = NO_SPACING
    elif not all(units.values()):
        assumption = "no unit of its voxel spacing: mm is assumed"
    at = [names.index(name) for name in "zyx"]
    return Level(
        array=array,
        axes=names,
        scale=tuple(float(scale[n]) for n in at),
        translation=tuple(float(origin[n]) for n in at),
        units=tuple(units[name] for name in "zyx"),
        assumption=assumption,
    )
