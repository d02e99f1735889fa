"""Where the voxels of an augmented patch come from: rotation, scale, elastic deformation, flips.

All lengths are voxels, measured from the centre of the patch. What a patch is read from is its
source: larger by the same number of voxels on both sides of an axis, so that both have one centre.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, floor, sin

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.types import Triple

THIN = 3
"""A side is thin if the longest is more than so many times as long. Its slices are thick then:
nothing is turned into it, scaled along it or moved along it."""


@dataclass(frozen=True, kw_only=True)
class SpatialTransform:
    """Voxel o of the patch is read at `matrix @ o`, up to `bend` beside it; then all is flipped."""

    matrix: np.ndarray | None = None  # (3, 3); None: read where it is
    bend: float = 0.0
    bend_spacing: int = 1  # between the points that are moved at random
    seed: int = 0  # of those points
    flips: Sequence[int] = ()  # axes

    def source_size(self, patch: Sequence[int]) -> Triple:
        """What holds every voxel that is read; never smaller than the patch."""
        half = (np.array(patch) - 1) / 2
        reach = half
        if self.matrix is not None:
            reach = np.abs(self.matrix) @ half + np.where(thin_axes(patch), 0.0, self.bend)
        beyond = np.ceil(reach - half - 1e-6).clip(0).astype(int)
        d, h, w = (p + 2 * int(b) for p, b in zip(patch, beyond, strict=True))
        return d, h, w


def thin_axes(sides: Sequence[int]) -> tuple[bool, bool, bool]:
    """Which axes are left alone.

    >>> thin_axes([320, 150, 26]), thin_axes([60, 60, 20])
    ((False, False, True), (False, False, False))
    """
    d, h, w = (THIN * n < max(sides) for n in sides)
    return d, h, w


def make_affine_matrix(radians: Sequence[float], scale: float, patch: Sequence[int]) -> np.ndarray:
    """Turned about each axis and shown `scale` times as large, but for thin axes."""
    flat = thin_axes(patch)
    turned = np.eye(3)
    for axis, angle in enumerate(radians):
        others = [n for n in range(3) if n != axis]
        if any(flat[n] for n in others):
            continue
        about = np.eye(3)
        about[np.ix_(others, others)] = [[cos(angle), -sin(angle)], [sin(angle), cos(angle)]]
        turned = turned @ about
    # What looks larger comes from fewer voxels.
    return turned @ np.diag(np.where(flat, 1.0, 1 / scale))


def apply_transform(
    image: Tensor, label: Tensor, move: SpatialTransform, patch: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(C, *source) and (*source) -> (C, *patch) and (*patch), read once.

    The image is interpolated linearly, the label takes the nearest voxel's; outside the source both
    are 0. Without a matrix every voxel is as it was.
    """
    if move.matrix is None:
        image, label = center_crop(image, patch), center_crop(label, patch)
    else:
        places = _places(move, patch, image)[None]
        # In float every label is exact, 255 too.
        labels = label[None, None].to(image.dtype)
        image = F.grid_sample(image[None], places, "bilinear", "zeros", align_corners=False)[0]
        labels = F.grid_sample(labels, places, "nearest", "zeros", align_corners=False)[0, 0]
        label = labels.to(label.dtype)
    if move.flips:
        axes = [axis - 3 for axis in move.flips]
        image, label = image.flip(axes), label.flip(axes)
    return image, label


def center_crop(source: Tensor, patch: Sequence[int]) -> Tensor:
    """A view of the patch in the middle of the last three axes."""
    for axis, size in zip((-3, -2, -1), patch, strict=True):
        source = source.narrow(axis, (source.shape[axis] - size) // 2, size)
    return source


def _places(move: SpatialTransform, patch: Sequence[int], image: Tensor) -> Tensor:
    """(*patch, 3), as grid_sample wants it: the last axis first, -1..1 from edge to edge."""
    assert move.matrix is not None
    device, flat = image.device, thin_axes(patch)
    along = [torch.arange(n, device=device) - (n - 1) / 2 for n in patch]
    d, h, w = along[0][:, None, None], along[1][:, None], along[2]
    bends = make_elastic_field(move, patch, device) if move.bend else None
    places = torch.empty(*patch, 3, device=device)
    for axis, (a, b, c) in enumerate(move.matrix.tolist()):
        place = a * d + b * h + c * w
        if bends is not None and not flat[axis]:
            place += bends[axis]
        torch.mul(place, 2 / image.shape[1 + axis], out=places[..., 2 - axis])
    return places


def make_elastic_field(
    move: SpatialTransform, patch: Sequence[int], device: torch.device
) -> Tensor:
    """(3, *patch): a smooth displacement, along each axis never larger than `move.bend`.

    The points of a coarse grid are moved at random; cubic B-splines join them.
    """
    generator = torch.Generator(device).manual_seed(move.seed)
    splines = [_splines(n, move.bend_spacing, device) for n in patch]
    points = torch.rand(3, *(s.shape[1] for s in splines), generator=generator, device=device)
    field = (2 * points - 1) * move.bend
    for spline in splines:  # the axis in front of the others becomes voxels and goes behind them
        field = torch.tensordot(field, spline, dims=([1], [1]))
    return field


def _splines(size: int, spacing: int, device: torch.device) -> Tensor:
    """(size, points): how much of each point's displacement a voxel takes; a row's sum is 1."""
    count = floor((size - 1) / spacing) + 4
    voxel = torch.arange(size, device=device)[:, None] / spacing + 1
    far = (voxel - torch.arange(count, device=device)).abs()
    near = 2 / 3 - far**2 + far**3 / 2
    return torch.where(far < 1, near, (2 - far).clamp(min=0) ** 3 / 6)
