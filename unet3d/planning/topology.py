"""Plan spacing, patches and levels for a dataset from its sizes and spacings alone.

These are the rules of nnU-Net's planner. tests/planning/test_topology.py compares them
with it, and docs/explanation/planning.md lists where `unet3d plan` differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from unet3d.data.preprocessing.channels import compute_resampled_shape
from unet3d.types import FloatTriple, Triple

COARSE_RATIO = 3
"""An axis with more than this times the spacing of the others is resampled to a finer spacing than
the median."""

MAX_COARSENING = 27
"""Times the voxel volume that a plan for a training time may have: three times the spacing."""

MIN_VOXELS = 4
"""Voxels that pooling must leave along an axis."""

MIN_VOXELS_ALONE = 12
"""Voxels that an axis must have to be pooled when no other axis is."""

MAX_PATCH_VOXELS = 256**3
"""Voxels of the patch that the search starts with."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The pooling windows between levels, and the convolution kernel of each level."""

    pool_windows: tuple[Triple, ...]
    kernels: tuple[Triple, ...]

    @property
    def factor(self) -> Triple:
        """Return what the patch's sides must be multiples of."""
        d, h, w = (prod(window[axis] for window in self.pool_windows) for axis in range(3))
        return d, h, w


def choose_target_spacing(
    spacings: Sequence[Sequence[float]], shapes: Sequence[Sequence[int]]
) -> FloatTriple:
    """Return the median spacing along each axis; along a coarse and thin axis the 10th percentile.

    At the median of a coarse axis many cases would lose slices, at its 10th percentile few do.
    Seven digits are kept: files have no more.
    """
    target = np.percentile(spacings, 50, axis=0)
    size = np.percentile(shapes, 50, axis=0)
    coarsest = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != coarsest]
    is_coarse = target[coarsest] > COARSE_RATIO * max(target[others])
    if is_coarse and size[coarsest] * COARSE_RATIO < min(size[others]):
        fine = np.percentile([s[coarsest] for s in spacings], 10)
        minimum = max(target[others])
        target[coarsest] = fine if fine >= minimum else minimum + 1e-5
    d, h, w = (float(f"{s:.7g}") for s in target)
    return d, h, w


def list_coarser_spacings(spacing_mm: FloatTriple) -> list[FloatTriple]:
    """Return coarser spacings in steps of 1.26, up to `MAX_COARSENING` times the voxel volume.

    Axes with less than half of the coarsest spacing become coarser before the others, as in
    nnU-Net's low-resolution configuration.

    >>> list_coarser_spacings((5.0, 1.5, 1.5))[:3]
    [(5.0, 1.89, 1.89), (5.0, 2.38, 2.38), (5.0, 3.0, 3.0)]
    """
    spacings = [spacing_mm]
    while prod(spacings[-1]) < MAX_COARSENING * prod(spacing_mm):
        fine = [2 * s < max(spacings[-1]) for s in spacings[-1]]
        d, h, w = (
            float(f"{s * 2 ** (1 / 3):.3g}") if is_fine or not any(fine) else s
            for s, is_fine in zip(spacings[-1], fine, strict=True)
        )
        spacings.append((d, h, w))
    return spacings[1:]


def find_median_shape(
    spacings: Sequence[Sequence[float]], shapes: Sequence[Sequence[int]], target_mm: Sequence[float]
) -> FloatTriple:
    """Return the median size of the cases at a spacing, in voxels; it may end in a half.

    >>> find_median_shape([(1, 1, 1), (1, 1, 2)], [(8, 8, 8), (8, 9, 8)], (1, 1, 1))
    (8.0, 8.5, 12.0)
    """
    resampled = [
        compute_resampled_shape(n, s, target_mm) for n, s in zip(shapes, spacings, strict=True)
    ]
    return tuple(np.median(resampled, axis=0).tolist())


def choose_initial_patch(spacing_mm: Sequence[float], median: Sequence[float]) -> Triple:
    """Return a patch that is as isotropic in mm as possible and no larger than the median case."""
    scale = (MAX_PATCH_VOXELS * prod(spacing_mm)) ** (1 / 3)
    sides = (min(round(scale / s), ceil(n)) for s, n in zip(spacing_mm, median, strict=True))
    d, h, w = (max(1, side) for side in sides)
    return d, h, w


def plan_levels(spacing_mm: Sequence[float], patch: Sequence[int]) -> Levels:
    """Pool and convolve along an axis once its spacing is less than twice the finest.

    An axis that is convolved at a level is convolved at all levels below it; the coarsest level
    convolves all three. An axis is pooled while it has 8 voxels, or 12 if it is the only one.

    >>> plan_levels((1, 1, 1), (40, 56, 40)).pool_windows
    ((2, 2, 2), (2, 2, 2), (2, 2, 2))
    >>> plan_levels((5, 1, 1), (16, 128, 128)).pool_windows
    ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))
    >>> plan_levels((5, 1, 1), (16, 128, 128)).kernels
    ((1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """
    size, spacing = list(patch), list(spacing_mm)
    kernel: Triple = (1, 1, 1)
    windows, kernels = [], []
    while window := _choose_window(spacing, size):
        finest = min(spacing)
        d, h, w = (
            3 if k == 3 or s / finest < 2 else 1 for k, s in zip(kernel, spacing, strict=True)
        )
        kernel = (d, h, w)
        kernels.append(kernel)
        windows.append(window)
        size = [-(-n // w) for n, w in zip(size, window, strict=True)]
        spacing = [s * w for s, w in zip(spacing, window, strict=True)]
    return Levels(pool_windows=tuple(windows), kernels=(*kernels, (3, 3, 3)))


def _choose_window(spacing_mm: Sequence[float], size: Sequence[int]) -> Triple | None:
    """Return the next pooling window, or None if no axis can be pooled any more."""
    large = [axis for axis in range(3) if size[axis] >= 2 * MIN_VOXELS]
    finest = min((spacing_mm[axis] for axis in large), default=0)
    pooled = [axis for axis in large if spacing_mm[axis] / finest < 2]
    if not pooled or (len(pooled) == 1 and size[pooled[0]] < MIN_VOXELS_ALONE):
        return None
    d, h, w = (2 if axis in pooled else 1 for axis in range(3))
    return d, h, w


def round_up_to_multiple(patch: Sequence[int], factor: Sequence[int]) -> Triple:
    """Round each side up to a multiple of its factor.

    >>> round_up_to_multiple((7, 8, 9), (4, 4, 1))
    (8, 8, 9)
    """
    d, h, w = (-(-n // f) * f for n, f in zip(patch, factor, strict=True))
    return d, h, w


def list_patches(spacing_mm: Sequence[float], median: Sequence[float]) -> list[Triple]:
    """Return the patches to try: each has levels to pool, and fewer voxels than the one before."""
    first = choose_initial_patch(spacing_mm, median)
    patch: Triple | None = round_up_to_multiple(first, plan_levels(spacing_mm, first).factor)
    seen: set[Triple] = set()
    patches: list[Triple] = []
    while patch is not None and patch not in seen:
        seen.add(patch)
        is_smaller = not patches or prod(patch) < prod(patches[-1])
        if is_smaller and plan_levels(spacing_mm, patch).pool_windows:
            patches.append(patch)
        patch = _shrink(patch, spacing_mm, median)
    return patches


def _shrink(patch: Triple, spacing_mm: Sequence[float], median: Sequence[float]) -> Triple | None:
    """Shorten the axis that is largest relative to the cases; None if no axis can be shortened.

    The step is what the shorter axis has to be a multiple of. The other axes may then have other
    multiples, so that a patch can grow. On a tie the first axis is shortened, the coarsest last:
    nnU-Net takes the last of its axes, which are in the opposite order after the coarsest.
    """
    factor = plan_levels(spacing_mm, patch).factor
    coarsest = max(range(3), key=lambda axis: (spacing_mm[axis], axis))
    order = sorted(range(3), key=lambda axis: (-patch[axis] / median[axis], axis == coarsest))
    for axis in order:
        shorter = list(patch)
        shorter[axis] -= factor[axis]
        step = plan_levels(spacing_mm, shorter).factor[axis]
        shorter[axis] = patch[axis] - step
        if shorter[axis] >= MIN_VOXELS:
            return round_up_to_multiple(shorter, plan_levels(spacing_mm, shorter).factor)
    return None
