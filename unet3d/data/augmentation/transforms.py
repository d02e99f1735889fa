"""Rotate, scale, deform and flip patches, and change the intensities of a channel.

All lengths are in voxels from the center of the patch. A patch is sampled from its context, which
is larger by the same number of voxels on both sides of an axis, so that both have the same center.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, cos, exp, floor, sin

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.types import Triple

THIN_RATIO = 3
"""An axis is thin if the longest one has more than this many times its voxels. Its slices are thick
then: patches are not rotated into it, and not scaled or deformed along it."""


EPSILON = 1e-7  # prevents a division by 0 for constant patches


@dataclass(frozen=True, kw_only=True)
class SpatialTransform:
    """Sample voxel o at `matrix @ o`, displaced by up to `displacement` per axis; then flip."""

    matrix: np.ndarray | None = None  # (3, 3); None: no interpolation, only flips
    displacement: float = 0.0  # of the elastic deformation
    grid_spacing: int = 1  # of its control points
    seed: int = 0  # of their displacements
    flips: Sequence[int] = ()  # axes

    def compute_context_size(self, patch: Sequence[int]) -> Triple:
        """Return the size that holds every sampled voxel; never smaller than the patch."""
        size = np.array(patch)
        if self.matrix is None:
            return tuple(size.tolist())
        half, is_thin = (size - 1) / 2, get_thin_axes(patch)
        reach = np.abs(self.matrix) @ half + np.where(is_thin, 0.0, self.displacement)
        margin = np.ceil(reach - half - 1e-6).clip(0).astype(int)
        return tuple((size + 2 * margin).tolist())


def get_thin_axes(shape: Sequence[int]) -> tuple[bool, bool, bool]:
    """Return which axes are thin.

    >>> get_thin_axes([320, 150, 26]), get_thin_axes([60, 60, 20])
    ((False, False, True), (False, False, False))
    """
    return tuple((THIN_RATIO * np.array(shape) < max(shape)).tolist())


def make_affine_matrix(radians: Sequence[float], scale: float, patch: Sequence[int]) -> np.ndarray:
    """Return the matrix that rotates about each axis and magnifies by `scale`, except thin axes."""
    is_thin = get_thin_axes(patch)
    matrix = np.eye(3)
    for axis, angle in enumerate(radians):
        plane = [n for n in range(3) if n != axis]
        if any(is_thin[n] for n in plane):
            continue
        rotation = np.eye(3)
        rotation[np.ix_(plane, plane)] = [[cos(angle), -sin(angle)], [sin(angle), cos(angle)]]
        matrix = matrix @ rotation
    # A magnified patch is sampled from fewer voxels.
    return matrix @ np.diag(np.where(is_thin, 1.0, 1 / scale))


def apply_transform(
    image: Tensor, label: Tensor, transform: SpatialTransform, patch: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Sample (C, *patch) and (*patch) from an image (C, *context) and a label (*context).

    The image is sampled linearly, the label by nearest neighbor; both are 0 outside the context.
    Without a matrix nothing is interpolated.
    """
    if transform.matrix is None:
        image, label = center_crop(image, patch), center_crop(label, patch)
    else:
        grid = _make_sampling_grid(transform, patch, image)[None]
        labels = label[None, None].to(image.dtype)  # floats hold every uint8 exactly
        image = F.grid_sample(image[None], grid, "bilinear", "zeros", align_corners=False)[0]
        labels = F.grid_sample(labels, grid, "nearest", "zeros", align_corners=False)[0, 0]
        label = labels.to(label.dtype)
    if transform.flips:
        axes = [axis - 3 for axis in transform.flips]
        image, label = image.flip(axes), label.flip(axes)
    return image, label


def center_crop(context: Tensor, patch: Sequence[int]) -> Tensor:
    """Return a view of the center of the last three axes."""
    for axis, size in zip((-3, -2, -1), patch, strict=True):
        context = context.narrow(axis, (context.shape[axis] - size) // 2, size)
    return context


def _make_sampling_grid(transform: SpatialTransform, patch: Sequence[int], image: Tensor) -> Tensor:
    """Return (*patch, 3) for grid_sample: the last axis first, -1..1 from edge to edge."""
    assert transform.matrix is not None
    device, is_thin = image.device, get_thin_axes(patch)
    centered = [torch.arange(n, device=device, dtype=torch.float32) - (n - 1) / 2 for n in patch]
    d, h, w = centered[0][:, None, None], centered[1][:, None], centered[2]
    field = make_elastic_field(transform, patch, device) if transform.displacement else None
    grid = torch.empty(*patch, 3, device=device, dtype=torch.float32)
    for axis, (a, b, c) in enumerate(transform.matrix.tolist()):
        position = a * d + b * h + c * w
        if field is not None and not is_thin[axis]:
            position += field[axis]
        torch.mul(position, 2 / image.shape[1 + axis], out=grid[..., 2 - axis])
    return grid


def make_elastic_field(
    transform: SpatialTransform, patch: Sequence[int], device: torch.device
) -> Tensor:
    """Return a smooth displacement (3, *patch), at most `transform.displacement` per axis.

    Cubic B-splines interpolate random displacements of the control points of a coarse grid.
    """
    generator = torch.Generator(device).manual_seed(transform.seed)
    splines = [_make_spline_matrix(n, transform.grid_spacing, device) for n in patch]
    shape = (3, *(s.shape[1] for s in splines))
    points = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
    field = (2 * points - 1) * transform.displacement
    for spline in splines:  # turns the first spatial axis into voxels and moves it to the end
        field = torch.tensordot(field, spline, dims=([1], [1]))
    return field


def _make_spline_matrix(size: int, spacing: int, device: torch.device) -> Tensor:
    """Return the weights (size, points) of control points on voxels; each row sums to 1.

    They are those of scipy's BSpline.design_matrix, but computed on the device: copying them there
    would wait for the GPU.
    """
    count = floor((size - 1) / spacing) + 4
    voxel = torch.arange(size, device=device, dtype=torch.float32)[:, None] / spacing + 1
    distance = (voxel - torch.arange(count, device=device)).abs()
    inner = 2 / 3 - distance**2 + distance**3 / 2
    return torch.where(distance < 1, inner, (2 - distance).clamp(min=0) ** 3 / 6)


def add_noise(channel: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise."""
    sample = torch.randn(channel.shape, generator=generator, device=channel.device)
    return channel + std * sample


def blur(channel: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian of `sigma` voxels; edges are replicated."""
    radius = ceil(3 * sigma)
    weights = [exp(-0.5 * (n / sigma) ** 2) for n in range(-radius, radius + 1)]
    for axis in range(3):
        size = channel.shape[axis]
        padding = [0, 0, 0, 0, 0, 0]
        padding[4 - 2 * axis : 6 - 2 * axis] = radius, radius  # F.pad counts axes from the last
        padded = F.pad(channel[None, None], padding, mode="replicate")[0, 0]
        channel = torch.zeros_like(channel)
        for n, weight in enumerate(weights):
            channel.add_(padded.narrow(axis, n, size), alpha=weight / sum(weights))
    return channel


def scale_contrast(channel: Tensor, factor: float) -> Tensor:
    """Multiply the distances from the patch's mean; clamp to the original range."""
    mean, (low, high) = channel.mean(), torch.aminmax(channel)
    return ((channel - mean) * factor + mean).clamp(low, high)


def simulate_low_resolution(channel: Tensor, zoom: float) -> Tensor:
    """Downsample by `zoom` along each axis that is not thin, and upsample again."""
    shape = channel.shape
    low_shape = [
        n if is_thin else max(1, round(n * zoom))
        for n, is_thin in zip(shape, get_thin_axes(shape), strict=True)
    ]
    for size in (low_shape, shape):  # linear both ways: nearest neighbor would shift the image
        channel = F.interpolate(channel[None, None], size=size, mode="trilinear")[0, 0]
    return channel


def apply_gamma(channel: Tensor, power: float) -> Tensor:
    """Raise intensities, scaled to 0..1, to a power; mean and standard deviation are kept."""
    mean, std = channel.mean(), channel.std(correction=0)
    low, high = torch.aminmax(channel)
    curved = ((channel - low) / (high - low + EPSILON)).pow(power)
    return (curved - curved.mean()) / (curved.std(correction=0) + EPSILON) * std + mean


def apply_inverted_gamma(channel: Tensor, power: float) -> Tensor:
    """Raise the inverted intensities to a power."""
    return -apply_gamma(-channel, power)
