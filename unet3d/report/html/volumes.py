"""Pack the volumes of a case into few bytes: cropped, in 8 bits, coarser if they must be."""

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MARGIN_MM = 15
"""What is shown around the labels."""

WINDOW = (0.5, 99.5)
"""Percentiles of the intensities that become black and white."""

SAMPLE = 200_000
"""Voxels from which these percentiles are computed."""

COARSER = (1, 1.5, 2, 3, 4, 6)
"""Sizes of a voxel that are tried, relative to the shortest side of the original one."""


@dataclass(frozen=True, kw_only=True)
class CaseVolumes:
    """Volumes (D, H, W) of a case, whose axes point right, anterior and superior."""

    name: str
    title: str
    image: np.ndarray | None
    layers: Mapping[str, np.ndarray]  # uint8: the number of a class, from 1; 0 for none
    spacing_mm: tuple[float, float, float]
    classes: Mapping[str, str]  # name -> color
    notes: Mapping[str, str]  # class -> what is said about it

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size in voxels."""
        return next(iter(self.volumes.values())).shape

    @property
    def volumes(self) -> dict[str, np.ndarray]:
        """Return the image, if there is one, and the layers."""
        return {**({} if self.image is None else {"": self.image}), **self.layers}


@dataclass(frozen=True, kw_only=True)
class PackedVolumes:
    """What a page needs to show a case: facts, and gzipped bytes of each volume, x fastest."""

    facts: dict[str, Any]
    image: bytes | None
    layers: dict[str, bytes]

    @property
    def size(self) -> int:
        """Return the bytes that they take in a page."""
        return sum(4 * (len(v) // 3 + 1) for v in (self.image or b"", *self.layers.values()))


def pack_within(case: CaseVolumes, budget: int) -> PackedVolumes | None:
    """Return the finest volumes that fit into `budget` bytes of a page; None if none do."""
    case = crop(case)
    case = replace(case, image=None if case.image is None else to_bytes(case.image))
    for factor in COARSER:
        packed = pack(coarsen(case, factor * min(case.spacing_mm)), level=9)
        if packed.size <= budget:
            return packed
    return None


def pack(case: CaseVolumes, *, level: int) -> PackedVolumes:
    """Compress the volumes of a case; `level` is gzip's."""

    def compress(volume: np.ndarray) -> bytes:
        return gzip.compress(volume.astype(np.uint8, copy=False).tobytes("F"), level, mtime=0)

    return PackedVolumes(
        facts={
            "name": case.name,
            "title": case.title,
            "shape": list(case.shape),
            "spacing": [round(mm, 4) for mm in case.spacing_mm],
            "classes": [
                {"name": name, "color": color, "note": case.notes.get(name, "")}
                for name, color in case.classes.items()
            ],
        },
        image=None if case.image is None else compress(case.image),
        layers={name: compress(volume) for name, volume in case.layers.items()},
    )


def to_base64(packed: bytes) -> str:
    """Return bytes as text for a page."""
    return base64.b64encode(packed).decode("ascii")


def to_bytes(image: np.ndarray) -> np.ndarray:
    """Map intensities between two percentiles to 0..255, plane by plane to bound memory."""
    sample = image.reshape(-1)[:: max(1, image.size // SAMPLE)].astype(np.float32)
    finite = sample[np.isfinite(sample)]
    low, high = np.percentile(finite, WINDOW) if len(finite) else (0.0, 1.0)
    result = np.empty(image.shape, np.uint8)
    for plane, out in zip(image, result, strict=True):
        scaled = (np.nan_to_num(plane.astype(np.float32)) - low) / max(high - low, 1e-6)
        out[:] = (255 * scaled.clip(0, 1)).round()
    return result


def crop(case: CaseVolumes) -> CaseVolumes:
    """Return the part around all labels, with a margin; everything if there is no label."""
    foreground = np.zeros(case.shape, bool)
    for layer in case.layers.values():
        foreground |= layer > 0
    box = []
    for axis, mm in enumerate(case.spacing_mm):
        filled = np.flatnonzero(foreground.any(axis=tuple({0, 1, 2} - {axis})))
        if not len(filled):
            return case
        margin = round(MARGIN_MM / mm)
        box.append(slice(max(0, filled[0] - margin), filled[-1] + 1 + margin))
    inside = tuple(box)
    return replace(
        case,
        image=None if case.image is None else case.image[inside],
        layers={name: layer[inside] for name, layer in case.layers.items()},
    )


def coarsen(case: CaseVolumes, voxel_mm: float) -> CaseVolumes:
    """Return volumes whose voxels are about `voxel_mm` long where they are shorter now."""
    steps = [max(1, round(voxel_mm / mm)) for mm in case.spacing_mm]
    steps = [min(step, n) for step, n in zip(steps, case.shape, strict=True)]
    if steps == [1, 1, 1]:
        return case
    d, h, w = (mm * step for mm, step in zip(case.spacing_mm, steps, strict=True))
    return replace(
        case,
        image=None if case.image is None else average_blocks(case.image, steps),
        layers={name: take_centers(layer, steps) for name, layer in case.layers.items()},
        spacing_mm=(d, h, w),
    )


def average_blocks(volume: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Average blocks of voxels, axis by axis; an incomplete block at the end is left out."""
    result = volume.astype(np.float32)
    for axis, step in enumerate(steps):
        count = result.shape[axis] // step
        trimmed = np.take(result, range(count * step), axis)
        shape = [*trimmed.shape[:axis], count, step, *trimmed.shape[axis + 1 :]]
        result = trimmed.reshape(shape).mean(axis + 1)
    return result.round().astype(np.uint8)


def take_centers(volume: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Take the voxel in the middle of each complete block."""
    middle = tuple(
        slice(step // 2, n // step * step, step)
        for step, n in zip(steps, volume.shape, strict=True)
    )
    return volume[middle]
