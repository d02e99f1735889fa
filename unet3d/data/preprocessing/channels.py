"""Preprocess an image in memory: reorient, crop, normalize and resample it.

MONAI's Spacing computes the coordinates of every voxel; one axis after the other takes less time
and memory (benchmarks/cpu-monai-parts.json). Bundles carry this module: it needs numpy, scipy and
nibabel alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

Triple = tuple[int, int, int]
Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

ANISO_THRESHOLD = 3
"""Spacing ratio above which an axis is coarse: values are not interpolated across it."""

TIE = 2.0**-20
"""How much less than its neighbor a voxel of labels counts, which decides between equal ones."""

SPACING_RTOL = 1e-3  # headers round: 0.9 um may be above or below three times 0.3 um

AUTO = "auto"
"""Background that is found for each channel of each case: the constant value of its border."""

MIN_FRACTION = 0.5
"""Fraction of the border that must have the corners' value: the anatomy may touch the border."""

Intensity = tuple[float, float, float, float]
"""Mean, standard deviation and percentiles 0.5 and 99.5 of a channel's foreground."""


@dataclass(frozen=True, kw_only=True)
class FileGrid:
    """How a preprocessed volume maps to the voxel grid of its file.

    The file's volume is transposed and flipped to one orientation, cropped to a box, and resampled
    so that the outer edges of the result are the box's: voxel i covers [i, i + 1], and linear
    interpolation reads at (i + 0.5) * n_from / n_to - 0.5, clipped to the volume.
    """

    file_shape: Triple
    axes: Triple  # the file axes that become axes 0, 1, 2
    flips: tuple[bool, bool, bool]  # after the transpose
    box: Box  # (start, stop) per axis, after the flips
    shape: Triple  # of the preprocessed volume

    def crop(self, volume: np.ndarray) -> np.ndarray:
        """Return a view of the file's (..., D, H, W), reoriented and within the box."""
        volume = reorient(volume, self.axes, self.flips)
        return volume[(..., *(slice(start, stop) for start, stop in self.box))]

    def locate(self, spans: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Return the box of the file that holds spans (start, stop) of the cropped volume."""
        located = [slice(0)] * 3
        for axis, flip, (first, _), span in zip(
            self.axes, self.flips, self.box, spans, strict=True
        ):
            start, stop = first + span[0], first + span[1]
            size = self.file_shape[axis]
            located[axis] = slice(size - stop, size - start) if flip else slice(start, stop)
        return tuple(located)


def preprocess_channels(
    channels: np.ndarray,
    affine: np.ndarray,
    *,
    orientation: str,
    spacing_mm: Sequence[float] | None,
    background: Sequence[float | str],
    crop_to_foreground: bool,
    normalize: Sequence[str],
    intensities: Sequence[Intensity] | None,
) -> tuple[np.ndarray, FileGrid]:
    """Reorient, crop, normalize and resample channels (C, D, H, W).

    `background` has one value for all of them or one for each, `normalize` and `intensities` have
    one for each. Return the channels in float32, and how to go back to the grid of the file.
    """
    axes, flips = find_orientation(affine, orientation)
    d, h, w = channels.shape[1:]
    reoriented = reorient(channels, axes, flips)
    values = find_background(channels, background)
    box: Box = ((0, reoriented.shape[1]), (0, reoriented.shape[2]), (0, reoriented.shape[3]))
    if crop_to_foreground:
        box = find_nonzero_box(reoriented, values)
    old_mm = get_spacing(affine, axes)
    new_mm = spacing_mm or old_mm
    shape = compute_resampled_shape([stop - start for start, stop in box], old_mm, new_mm)
    grid = FileGrid(file_shape=(d, h, w), axes=axes, flips=flips, box=box, shape=shape)
    orders = choose_interpolation_orders(old_mm, new_mm, 3)
    image = np.empty((len(channels), *shape), np.float32)
    for c, method in enumerate(normalize):
        channel = grid.crop(channels[c]).astype(np.float32)
        known = intensities[c] if intensities and method == "ct" else None
        normalize_in_place(channel, method, np.float32(values[c]), known)
        image[c] = resample(channel, shape, orders)
    return image, grid


def normalize_in_place(
    channel: np.ndarray, method: str, background: np.float32, known: Intensity | None
) -> None:
    """Normalize a channel (D, H, W), float32.

    `known` are the dataset's intensities, for ct; or those of the volume (its mean, its standard
    deviation, its minimum and its maximum) of which this is a region.
    """
    if method == "none":
        if background:
            channel[channel == background] = 0
        return
    if method == "rgb_to_0_1":
        channel /= 255
        return
    if method == "rescale_to_0_1":
        low, high = known[2:] if known else (channel.min(), channel.max())
        channel -= np.float32(low)
        channel /= max(np.float32(high) - np.float32(low), 1e-8)
        return
    selected = ...  # voxels that are normalized: all, unless zscore_nonzero
    if method == "ct":
        assert known is not None, "the config provides them if a channel is ct"
        np.clip(channel, *known[2:], out=channel)
    elif method == "zscore_nonzero":
        foreground = channel != background
        if known or foreground.any():
            selected = foreground
            if background:
                channel[~foreground] = 0
    if known:
        mean, std = known[:2]
    else:
        mean, std = channel[selected].mean(dtype=float), channel[selected].std(dtype=float)
    channel[selected] -= mean
    channel[selected] /= max(std, 1e-8)


def find_background(channels: np.ndarray, background: Sequence[float | str]) -> list[float]:
    """Return the value of each channel (C, D, H, W); AUTO gives 0 if the border is not constant."""
    return choose_background_values(background, list(map(list_faces, channels)))


def choose_background_values(
    background: Sequence[float | str], faces: Sequence[Sequence[np.ndarray]]
) -> list[float]:
    """Return the value of each channel, whose `faces` are read for AUTO alone."""
    values = background if len(background) > 1 else [background[0]] * len(faces)
    return [
        (find_border_value(own) or 0.0) if value == AUTO else float(value)
        for own, value in zip(faces, values, strict=True)
    ]


def list_faces(channel: np.ndarray) -> list[np.ndarray]:
    """Return the first and the last plane of (D, H, W) along each axis."""
    return [np.moveaxis(channel, axis, 0)[end] for axis in range(3) for end in (0, -1)]


def find_border_value(faces: Sequence[np.ndarray]) -> float | None:
    """Return the value of all eight corners if most of the faces of a volume have it too."""
    corners = {face[corner].item() for face in faces[:2] for corner in product((0, -1), repeat=2)}
    if len(corners) > 1:
        return None
    value = corners.pop()
    equal = sum(np.count_nonzero(face == value) for face in faces)
    return float(value) if equal >= MIN_FRACTION * sum(face.size for face in faces) else None


def find_orientation(affine: np.ndarray, code: str) -> tuple[Triple, tuple[bool, bool, bool]]:
    """Return the (axes, flips) of FileGrid that reorient a file's volume to `code`.

    >>> find_orientation(np.diag([-1.0, 1, 1, 1]), "RAS")
    ((0, 1, 2), (True, False, False))
    """
    from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

    change = ornt_transform(io_orientation(affine), axcodes2ornt(tuple(code)))
    axes = np.argsort(change[:, 0])
    return tuple(axes.tolist()), tuple((change[axes, 1] < 0).tolist())


def convert_to_mm(affine: np.ndarray, xyzt_units: int) -> np.ndarray:
    """Return an affine in mm; NIfTI's `xyzt_units` say if its own is in meters or microns."""
    converted = np.array(affine, np.float64)
    converted[:3] *= {1: 1e3, 3: 1e-3}.get(int(xyzt_units) & 7, 1)
    return converted


def get_spacing(affine: np.ndarray, axes: Triple) -> tuple[float, float, float]:
    """Return the spacing in mm along the reoriented axes."""
    return tuple(np.linalg.norm(affine[:3, :3], axis=0)[list(axes)].tolist())


def reorient(volume: np.ndarray, axes: Triple, flips: Sequence[bool]) -> np.ndarray:
    """Return a view of (..., D, H, W) with its last three axes transposed and flipped."""
    extra = volume.ndim - 3
    transposed = volume.transpose(*range(extra), *(extra + a for a in axes))
    return transposed[(..., *(slice(None, None, -1 if flip else 1) for flip in flips))]


def find_nonzero_box(channels: np.ndarray, background: Sequence[float]) -> Box:
    """Return the smallest box around the foreground of all channels; without one, the full box."""
    foreground = np.zeros_like(channels[0], bool)  # in the channels' memory order
    for channel, value in zip(channels, background, strict=True):
        foreground |= channel != value

    def extent(axis: int) -> tuple[int, int]:
        rows = np.flatnonzero(foreground.any(tuple(a for a in range(3) if a != axis)))
        return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, foreground.shape[axis])

    return extent(0), extent(1), extent(2)


def compute_resampled_shape(
    size: Sequence[int], old_mm: Sequence[float], new_mm: Sequence[float]
) -> Triple:
    """Return the shape after resampling from one spacing to another."""
    d, h, w = (max(1, round(n * o / s)) for n, o, s in zip(size, old_mm, new_mm, strict=True))
    return d, h, w


def make_interpolation_matrix(old: int, new: int, order: int) -> np.ndarray:
    """Return a (new, old) matrix that interpolates along an axis; order 3 is a cubic spline."""
    if old == new:
        return np.eye(old, dtype=np.float32)
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    if order == 0:
        return np.eye(old, dtype=np.float32)[np.floor(position + 0.5).astype(int).clip(max=old - 1)]
    if order == 1 or old < 4:
        distance = np.abs(position[:, None] - np.arange(old))
        return np.maximum(1 - distance, 0).astype(np.float32)
    from scipy.ndimage import map_coordinates

    columns = [
        map_coordinates(unit, position[None], order=3, mode="nearest") for unit in np.eye(old)
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def resample(volume: np.ndarray, shape: Sequence[int], orders: Sequence[int]) -> np.ndarray:
    """Resample (D, H, W), float32, axis by axis.

    A matrix product per axis needs at most two copies; scipy.ndimage.zoom filters in float64.
    """
    return multiply_axes(volume, make_interpolation_matrices(volume.shape, shape, orders))


def make_interpolation_matrices(
    old: Sequence[int], new: Sequence[int], orders: Sequence[int]
) -> dict[int, np.ndarray]:
    """Return the matrix of each axis whose size changes, those that shrink most first."""
    return {
        axis: make_interpolation_matrix(old[axis], new[axis], orders[axis])
        for axis in sorted(range(3), key=lambda a: new[a] / old[a])
        if old[axis] != new[axis]
    }


def multiply_axes(volume: np.ndarray, matrices: Mapping[int, np.ndarray]) -> np.ndarray:
    """Multiply axes of (D, H, W) by a matrix each."""
    for axis, matrix in matrices.items():
        if axis == 0:
            flat = matrix @ np.ascontiguousarray(volume).reshape(len(volume), -1)
            volume = flat.reshape(len(matrix), *volume.shape[1:])
        else:
            volume = volume @ matrix.T if axis == 2 else np.matmul(matrix, volume)
    return volume


def choose_interpolation_orders(
    old_mm: Sequence[float], new_mm: Sequence[float], order: int
) -> list[int]:
    """Return `order` for each axis, but 0 (nearest) for the coarse axis, if it is one alone."""
    for sizes in (old_mm, new_mm):
        if max(sizes) > ANISO_THRESHOLD * min(sizes) * (1 + SPACING_RTOL):
            coarse = np.isclose(sizes, max(sizes), rtol=SPACING_RTOL, atol=0)
            return [0 if is_coarse and coarse.sum() == 1 else order for is_coarse in coarse]
    return [order] * 3


def resample_labels(labels: np.ndarray, shape: Sequence[int], orders: Sequence[int]) -> np.ndarray:
    """Resample labels (D, H, W): each voxel gets the label with the largest interpolated mask.

    Interpolating the labels themselves would invent labels between two others. A label is
    interpolated in its bounding box alone, as there may be hundreds; `orders` are 0 or 1. Of two
    voxels that count alike, as every pair does at a factor of 2, the first decides: were it always
    the lower label, classes would lose half a voxel along every border.
    """
    from scipy.ndimage import find_objects

    if tuple(shape) == labels.shape:
        return labels
    matrices = make_interpolation_matrices(labels.shape, shape, orders)
    for matrix in matrices.values():
        matrix *= 1 - TIE * np.arange(matrix.shape[1], dtype=np.float32)
    best = np.full(tuple(shape), -1, np.float32)
    result = np.zeros(tuple(shape), labels.dtype)
    boxes = [tuple(slice(0, size) for size in labels.shape), *find_objects(labels)]
    for value, box in enumerate(boxes):
        if box is None:
            continue
        mask, target, parts = (labels[box] == value).astype(np.float32), list(box), {}
        for axis, matrix in matrices.items():
            part = matrix[:, box[axis]]
            reached = np.flatnonzero(part.any(1))  # none: it is between two nearest voxels
            target[axis] = slice(*reached[[0, -1]] + (0, 1)) if len(reached) else slice(0, 0)
            parts[axis] = part[target[axis]]
        mask, place = multiply_axes(mask, parts), tuple(target)
        np.copyto(result[place], value, where=mask > best[place])
        np.maximum(best[place], mask, out=best[place])
    return result


def spread_annotations(labels: np.ndarray, shape: Sequence[int], ignored: int) -> np.ndarray:
    """Label ignored voxels as one beside them that will be part of the same, larger voxel.

    Or an annotated slice between two planes of a coarser grid would not be part of any.
    """
    labels = labels.copy()
    for axis, (old, new) in enumerate(zip(labels.shape, shape, strict=True)):
        planes = np.moveaxis(labels, axis, 0)
        target = ((np.arange(old) + 0.5) * new / old).astype(int)
        forward = [(n, n + 1) for n in range(old - 1) if target[n] == target[n + 1]]
        for start, end in (*forward, *((end, start) for start, end in reversed(forward))):
            np.copyto(planes[end], planes[start], where=planes[end] == ignored)
    return labels


def get_directions(orientation: str) -> list[str]:
    """Return the direction of each axis of a volume."""
    names = {"RL": "left-right", "AP": "front-back", "SI": "up-down"}
    return [next(name for ends, name in names.items() if c in ends) for c in orientation]


def describe_axes(sizes: Sequence[float], orientation: str) -> str:
    """Format sizes along x, y and z with the directions of these axes.

    >>> describe_axes((40, 56, 40), "RAS")
    '40 (left-right) x 56 (front-back) x 40 (up-down)'
    """
    pairs = zip(sizes, get_directions(orientation), strict=True)
    return " x ".join(f"{size:g} ({direction})" for size, direction in pairs)


def find_thin_axis(sizes: Sequence[float]) -> int | None:
    """Return the axis along which sizes are half of the others or less.

    >>> find_thin_axis((26, 320, 150)), find_thin_axis((100, 80, 60))
    (0, None)
    """
    least, second, _ = sorted(sizes)
    return list(sizes).index(least) if 2 * least <= second else None


def explain_swapped_axes(
    patch: Sequence[int], shapes: Sequence[Sequence[int]], orientation: str
) -> str | None:
    """Return a warning if patches are thin along another axis than the volumes.

    >>> print(explain_swapped_axes((16, 64, 64), [(128, 128, 20), (140, 128, 22)], "RAS"))
    data.patch_size=[16, 64, 64] is thin along x, volumes of 134 x 128 x 21 along z (up-down)
    """
    sizes = np.median(shapes, axis=0).tolist()
    ours, theirs = find_thin_axis(patch), find_thin_axis(sizes)
    if ours is None or theirs in (None, ours):
        return None
    return (
        f"data.patch_size={list(patch)} is thin along {'xyz'[ours]}, volumes of "
        f"{' x '.join(f'{n:g}' for n in sizes)} along {'xyz'[theirs]} "
        f"({get_directions(orientation)[theirs]})"
    )
