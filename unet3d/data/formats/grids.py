"""Put a volume that holds a part of a grid onto the grid."""

import numpy as np

from unet3d.data.formats.volume_format import Grid
from unet3d.types import Triple

TOLERANCE = 1e-2
"""Tolerated distance in voxels between the corners of two grids."""


def find_offset(part: Grid, grid: Grid) -> Triple | None:
    """Return the voxel of `grid` that is the first of `part`; None if it is not a part of the grid.

    >>> whole = Grid(shape=(4, 4, 4), affine=np.eye(4))
    >>> shifted = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 1.0]])
    >>> find_offset(Grid(shape=(4, 4, 2), affine=shifted), whole)
    (0, 0, 2)
    """
    if not np.linalg.det(grid.affine[:3, :3]):
        return None
    to_grid = np.linalg.solve(grid.affine, part.affine)
    size = np.array(part.shape[:3])
    offset = np.rint(to_grid[:3, 3])
    drift = np.abs((to_grid[:3, :3] - np.eye(3)) * (size - 1)).sum(axis=1)
    distance = drift + np.abs(to_grid[:3, 3] - offset)
    if distance.max() > TOLERANCE or offset.min() < 0 or (offset + size > grid.shape[:3]).any():
        return None
    d, h, w = (int(n) for n in offset)
    return d, h, w


def paste(channels: np.ndarray, offset: Triple, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros of (C, *shape) with the channels at an offset."""
    if channels.shape[1:] == shape:
        return channels
    result = np.zeros((len(channels), *shape[::-1]), channels.dtype).transpose(0, 3, 2, 1)
    slices = tuple(
        slice(start, start + n) for start, n in zip(offset, channels.shape[1:], strict=True)
    )
    result[(slice(None), *slices)] = channels
    return result
