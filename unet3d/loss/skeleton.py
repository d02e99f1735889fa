"""Find the skeletons of binary volumes by morphology, a few operations on bools per voxel."""

from collections.abc import Iterator

import torch
from torch import Tensor

SPACE = (-3, -2, -1)


def dilate(mask: Tensor) -> Tensor:
    """Add all 26 neighbors of a mask (..., D, H, W)."""
    for axis in SPACE:
        result = mask.clone()
        for part, neighbors in _iter_neighbors(result, mask, axis):
            part |= neighbors
        mask = result
    return mask


def erode(mask: Tensor) -> Tensor:
    """Remove voxels with one of 6 neighbors outside a mask; beyond the volume is inside."""
    result = mask.clone()
    for axis in SPACE:
        for part, neighbors in _iter_neighbors(result, mask, axis):
            part &= neighbors
    return result


def _iter_neighbors(result: Tensor, mask: Tensor, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the part of a result that has a neighbor in a direction, and these neighbors."""
    size = mask.shape[axis] - 1
    yield result.narrow(axis, 0, size), mask.narrow(axis, 1, size)
    yield result.narrow(axis, 1, size), mask.narrow(axis, 0, size)


def skeletonize(mask: Tensor, iterations: int) -> Tensor:
    """Return the morphological skeleton of a bool mask (..., D, H, W).

    It joins what opening removes from the mask after 0, 1, ... `iterations` erosions: a structure
    has none if half its thickness is more voxels than that. It may have gaps.
    """
    skeleton = torch.zeros_like(mask)
    for _ in range(iterations + 1):
        eroded = erode(mask)
        skeleton |= mask & ~dilate(eroded)
        mask = eroded
    return skeleton
