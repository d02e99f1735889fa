"""Spacing, patch and levels for a data set, from its sizes and spacings alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from unet3d.types import Triple

COARSE = 3
"""An axis with so many times the spacing of the finest one is not resampled to the median."""

LEAST = 4
"""Voxels that pooling must leave along an axis."""

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

    Most cases would lose slices at a coarse axis's median, and few at its 10th percentile.
    """
    target = np.median(spacings, axis=0)
    size = np.median(shapes, axis=0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != worst]
    coarse = target[worst] > COARSE * max(target[others])
    if coarse and size[worst] * COARSE < min(size[others]):
        fine = np.percentile([s[worst] for s in spacings], 10)
        target[worst] = max(fine, max(target[others]) + 1e-5)
    d, h, w = (round(float(s), 5) for s in target)
    return d, h, w


def first_patch(spacing_mm: Sequence[float], median: Sequence[int]) -> Triple:
    """A patch as isotropic in mm as can be, no larger than the median case."""
    scale = (LARGEST * prod(spacing_mm)) ** (1 / 3)
    d, h, w = (max(1, min(round(scale / s), n)) for s, n in zip(spacing_mm, median, strict=True))
    return d, h, w


def levels(spacing_mm: Sequence[float], patch: Sequence[int], most: int = 6) -> Levels:
    """Pool and convolve along an axis once its voxels are no coarser than twice the finest.

    >>> levels((1, 1, 1), (40, 56, 40)).windows
    ((2, 2, 2), (2, 2, 2), (2, 2, 2))
    >>> levels((5, 1, 1), (16, 128, 128)).windows
    ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2))
    """
    size, at = list(patch), list(spacing_mm)
    windows, kernels = [], [_kernel(at)]
    while len(windows) < most - 1:
        large = [axis for axis in range(3) if size[axis] >= 2 * LEAST]
        if not large:
            break
        finest = min(at[axis] for axis in large)
        d, h, w = (2 if a in large and at[a] / finest < 2 else 1 for a in range(3))
        window = (d, h, w)
        size = [n // w for n, w in zip(size, window, strict=True)]
        at = [s * w for s, w in zip(at, window, strict=True)]
        windows.append(window)
        kernels.append(_kernel(at))
    return Levels(windows=tuple(windows), kernels=tuple(kernels))


def _kernel(spacing_mm: Sequence[float]) -> Triple:
    d, h, w = (3 if s / min(spacing_mm) < 2 else 1 for s in spacing_mm)
    return d, h, w


def whole(patch: Sequence[int], factor: Sequence[int]) -> Triple:
    """The next multiples of what the levels divide by."""
    d, h, w = (-(-n // f) * f for n, f in zip(patch, factor, strict=True))
    return d, h, w


def smaller(
    patch: Sequence[int], spacing_mm: Sequence[float], median: Sequence[int]
) -> Triple | None:
    """One step less along the axis that is largest for the cases there; None at the end."""
    factor = levels(spacing_mm, patch).factor
    order = sorted(range(3), key=lambda axis: -patch[axis] / median[axis])
    for axis in order:
        less = list(patch)
        while less[axis] - factor[axis] >= LEAST:
            less[axis] -= factor[axis]
            left = levels(spacing_mm, less)
            fewer = whole(less, left.factor)  # other levels may want other multiples
            if left.windows and prod(fewer) < prod(patch):
                return fewer
    return None
