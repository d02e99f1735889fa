"""Compute HD95 and the normalized surface Dice of two structures.

A structure's surface voxels have a face towards a voxel outside of it, or lie at the volume's
border. The distance of a surface voxel is that from its center to the nearest center of the other
surface, in mm. HD95 is the larger of the two directed 95th percentiles; the surface Dice is the
fraction of both surfaces' voxels within the tolerance of the other. Both equal MONAI's
`compute_hausdorff_distance(percentile=95)` and `compute_surface_dice(use_subvoxels=False)`, with
less time and memory; see `scores.py` for absent structures.
"""

from collections.abc import Sequence

import numpy as np


def compute_surface_scores(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    tolerance_mm: float,
    max_points: int | None = None,
) -> tuple[float, float]:
    """Return HD95 in mm and the surface Dice of two non-empty boolean volumes (D, H, W).

    Both may be cropped to their common bounding box. NaN if the surfaces have more than
    `max_points` voxels together, since the time grows with their number.
    """
    predicted, true = find_surface_voxels(prediction), find_surface_voxels(reference)
    if max_points is not None:
        points = np.count_nonzero(predicted) + np.count_nonzero(true)
        if points > max_points:
            return np.nan, np.nan
    to_reference = measure_surface_distances(predicted, true, spacing_mm)
    to_prediction = measure_surface_distances(true, predicted, spacing_mm)
    hd95 = max(np.percentile(to_reference, 95), np.percentile(to_prediction, 95))
    both = np.concatenate([to_reference, to_prediction])
    both = both.astype(np.float32)  # in float64, 3 * 0.1 mm would exceed 0.3 mm
    return float(hd95), float(np.mean(both <= np.float32(tolerance_mm)))


def find_surface_voxels(structure: np.ndarray) -> np.ndarray:
    """Return the voxels of a structure with at least one of their six neighbors outside of it."""
    inside = structure.copy()
    for axis in range(structure.ndim):
        interior, original = np.moveaxis(inside, axis, 0), np.moveaxis(structure, axis, 0)
        interior[1:] &= original[:-1]
        interior[:-1] &= original[1:]
        interior[0] = interior[-1] = False
    return structure & ~inside


def measure_surface_distances(
    start: np.ndarray, end: np.ndarray, spacing_mm: Sequence[float]
) -> np.ndarray:
    """Return the distance of every voxel of `start` to the nearest of `end`, unordered."""
    from scipy.spatial import KDTree

    # A tree of the surface points needs less memory than a distance transform of the volume.
    tree = KDTree(np.argwhere(end) * np.asarray(spacing_mm, float), leafsize=32)
    outside = np.argwhere(start & ~end)  # the others have distance 0
    distances = np.zeros(np.count_nonzero(start))
    distances[: len(outside)] = tree.query(outside * np.asarray(spacing_mm, float))[0]
    return distances
