"""Spacing, patches and levels for a data set, from its sizes and spacings alone.

These are the rules of nnU-Net's planner; tests/workflows/planning/test_topology.py compares them with it, and
docs/method.md says where `unet3d plan` differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from unet3d.data.preprocessing.resampling import compute_resampled_shape
from unet3d.types import Triple

COARSE = 3
"""An axis with so many times the spacing of the finest one is not resampled to the median."""

LEAST = 4
"""Voxels that pooling must leave along an axis."""

ALONE = 12
"""Voxels that an axis must have to be pooled alone."""

LARGEST = 256**3
"""Voxels of the patch that the search begins with."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Pooling windows from a level to the next, and each level's kernel."""

    windows: tuple[Triple, ...]
    kernels: tuple[Triple, ...]

    @property
    def factor(self) -> Triple:
        """What a patch's sides are to be multiples of."""
        d, h, w = (prod(window[axis] for window in self.windows) for axis in range(3))
        return d, h, w


def target_spacing(
    spacings: Sequence[Sequence[float]], shapes: Sequence[Sequence[int]]
) -> tuple[float, float, float]:
    """The median along each axis; along one that is coarse and thin, a fine one of those there.

    Most cases would lose slices at a coarse axis's median, and few at its 10th percentile. Seven
    digits are kept: files have no more.
    """
    target = np.percentile(spacings, 50, axis=0)
    size = np.percentile(shapes, 50, axis=0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != worst]
    coarse = target[worst] > COARSE * max(target[others])
    if coarse and size[worst] * COARSE < min(size[others]):
        fine = np.percentile([s[worst] for s in spacings], 10)
        least = max(target[others])
        target[worst] = fine if fine >= least else least + 1e-5
    d, h, w = (float(f"{s:.7g}") for s in target)
    return d, h, w


def find_median_shape(
    spacings: Sequence[Sequence[float]],
    shapes: Sequence[Sequence[int]],
    target_mm: Sequence[float],
) -> tuple[float, float, float]:
    """Return the median size of the cases at a spacing, in voxels; it may end in a half.

    >>> find_median_shape([(1, 1, 1), (1, 1, 2)], [(8, 8, 8), (8, 9, 8)], (1, 1, 1))
    (8.0, 8.5, 12.0)
    """
    resampled = [
        compute_resampled_shape(n, s, target_mm) for n, s in zip(shapes, spacings, strict=True)
    ]
    d, h, w = (float(n) for n in np.median(resampled, axis=0))
    return d, h, w


def initial_patch(spacing_mm: Sequence[float], median: Sequence[float]) -> Triple:
    """A patch as isotropic in mm as can be, no larger than the median case."""
    scale = (LARGEST * prod(spacing_mm)) ** (1 / 3)
    sides = (min(round(scale / s), ceil(n)) for s, n in zip(spacing_mm, median, strict=True))
    d, h, w = (max(1, side) for side in sides)
    return d, h, w


def plan_levels(spacing_mm: Sequence[float], patch: Sequence[int]) -> Levels:
    """Pool and convolve along an axis once its voxels are less than twice the finest.

    An axis that is convolved at a level is at all below it, and the coarsest level convolves
    along all three. An axis is pooled while it has 8 voxels, or 12 where it would be the only one.

    >>> plan_levels((1, 1, 1), (40, 56, 40)).windows
    ((2, 2, 2), (2, 2, 2), (2, 2, 2))
    >>> plan_levels((5, 1, 1), (16, 128, 128)).windows
    ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))
    >>> plan_levels((5, 1, 1), (16, 128, 128)).kernels
    ((1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """
    size, at = list(patch), list(spacing_mm)
    kernel: Triple = (1, 1, 1)
    windows, kernels = [], []
    while window := _window(at, size):
        d, h, w = (3 if k == 3 or s / min(at) < 2 else 1 for k, s in zip(kernel, at, strict=True))
        kernel = (d, h, w)
        kernels.append(kernel)
        windows.append(window)
        size = [-(-n // w) for n, w in zip(size, window, strict=True)]
        at = [s * w for s, w in zip(at, window, strict=True)]
    return Levels(windows=tuple(windows), kernels=(*kernels, (3, 3, 3)))


def _window(spacing_mm: Sequence[float], size: Sequence[int]) -> Triple | None:
    """Return the next pooling window, or None where nothing is to be pooled any more."""
    large = [axis for axis in range(3) if size[axis] >= 2 * LEAST]
    finest = min((spacing_mm[axis] for axis in large), default=0)
    pooled = [axis for axis in large if spacing_mm[axis] / finest < 2]
    if not pooled or (len(pooled) == 1 and size[pooled[0]] < ALONE):
        return None
    d, h, w = (2 if axis in pooled else 1 for axis in range(3))
    return d, h, w


def round_up_to_multiple(patch: Sequence[int], factor: Sequence[int]) -> Triple:
    """The next multiples of what the levels divide by."""
    d, h, w = (-(-n // f) * f for n, f in zip(patch, factor, strict=True))
    return d, h, w


def list_patches(spacing_mm: Sequence[float], median: Sequence[float]) -> list[Triple]:
    """List the patches to try, each with fewer voxels than the one before and levels to pool."""
    first = initial_patch(spacing_mm, median)
    patch: Triple | None = round_up_to_multiple(first, plan_levels(spacing_mm, first).factor)
    seen: set[Triple] = set()
    found: list[Triple] = []
    while patch is not None and patch not in seen:
        seen.add(patch)
        if plan_levels(spacing_mm, patch).windows and not (
            found and prod(found[-1]) <= prod(patch)
        ):
            found.append(patch)
        patch = _shrink(patch, spacing_mm, median)
    return found


def _shrink(patch: Triple, spacing_mm: Sequence[float], median: Sequence[float]) -> Triple | None:
    """Take one step from the axis that is largest for the cases there; None at the end.

    A step is what the shorter axis has to be a multiple of. The other axes may then have other
    multiples, so that a patch can grow. On a tie the first axis is taken, the coarsest one last:
    nnU-Net takes the last of its axes, which are in the opposite order behind the coarsest.
    """
    factor = plan_levels(spacing_mm, patch).factor
    coarsest = max(range(3), key=lambda axis: (spacing_mm[axis], axis))
    order = sorted(range(3), key=lambda axis: (-patch[axis] / median[axis], axis == coarsest))
    for axis in order:
        less = list(patch)
        less[axis] -= factor[axis]
        step = plan_levels(spacing_mm, less).factor[axis]
        less[axis] = patch[axis] - step
        if less[axis] >= LEAST:
            return round_up_to_multiple(less, plan_levels(spacing_mm, less).factor)
    return None
