"""Distances between two surfaces: HD95 in mm and the normalised surface Dice.

A structure's surface is its voxels with a face towards a voxel outside of it, or at the volume's
border; the distance of a surface voxel is that from its centre to the nearest centre of the other
surface, in mm. HD95 is the larger of the two directed 95th percentiles, and the surface Dice is the
share of both surfaces' voxels that lie within the tolerance of the other. These are MONAI's
`compute_hausdorff_distance(percentile=95)` and `compute_surface_dice(use_subvoxels=False)`, in less
time and memory; see `scores.py` for structures that are absent.
"""

from collections.abc import Sequence

import numpy as np


def surface_scores(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    tolerance_mm: float,
    most_points: int | None = None,
) -> tuple[float, float]:
    """HD95 in mm and surface Dice of two boolean volumes (D, H, W), neither of them empty.

    What lies outside the arrays is background: both may be cropped to the box around the two. NaN
    if the two surfaces have more than `most_points` voxels: time goes with their number.
    """
    of_prediction, of_reference = find_surface_voxels(prediction), find_surface_voxels(reference)
    if most_points is not None:
        points = np.count_nonzero(of_prediction) + np.count_nonzero(of_reference)
        if points > most_points:
            return np.nan, np.nan
    there = measure_surface_distances(of_prediction, of_reference, spacing_mm)
    back = measure_surface_distances(of_reference, of_prediction, spacing_mm)
    hd95 = max(np.percentile(there, 95), np.percentile(back, 95))
    both = np.concatenate([there, back]).astype(np.float32)  # as which 3 * 0.1 mm is within 0.3 mm
    return float(hd95), float(np.mean(both <= np.float32(tolerance_mm)))


def find_surface_voxels(structure: np.ndarray) -> np.ndarray:
    """The voxels of a structure with at least one of their six neighbours outside of it."""
    inside = structure.copy()
    for axis in range(structure.ndim):
        view, other = np.moveaxis(inside, axis, 0), np.moveaxis(structure, axis, 0)
        view[1:] &= other[:-1]
        view[:-1] &= other[1:]
        view[0] = view[-1] = False
    return structure & ~inside


def measure_surface_distances(
    start: np.ndarray, end: np.ndarray, spacing_mm: Sequence[float]
) -> np.ndarray:
    """From every voxel of `start` to the nearest of `end`; their order means nothing."""
    from scipy.spatial import KDTree

    # A tree of the surface's points, and not a distance transform, which holds the whole volume.
    tree = KDTree(np.argwhere(end) * np.asarray(spacing_mm, float), leafsize=32)
    apart = np.argwhere(start & ~end)  # the others are 0 mm away
    found = np.zeros(np.count_nonzero(start))
    found[: len(apart)] = tree.query(apart * np.asarray(spacing_mm, float))[0]
    return found
