"""Compute all scores of a case per class: Dice, IoU, HD95, surface Dice and volumes.

A structure's surface voxels have a face towards a voxel outside of it, or lie at the volume's
border. The distance of a surface voxel is that from its center to the nearest center of the other
surface, in mm. HD95 and surface Dice equal MONAI's `compute_hausdorff_distance(percentile=95)` and
`compute_surface_dice(use_subvoxels=False)`, with less time and memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from unet3d.errors import UsageError

if TYPE_CHECKING:  # torch takes a second, which an evaluation of files does not need
    from torch import Tensor

SCORES = {
    "dice": "2 TP / (2 TP + FP + FN), in voxels",
    "iou": "TP / (TP + FP + FN), in voxels",
    "hd95_mm": "95th-percentile Hausdorff distance in mm: the larger of the two directed 95th "
    "percentiles of the distances between surface voxels",
    "surface_dice": "fraction of both surfaces' voxels within the class's tolerance of the other "
    "surface",
    "reference_ml": "volume of the reference in ml",
    "prediction_ml": "volume of the prediction in ml",
    "difference_ml": "prediction_ml - reference_ml",
}
"""Name and definition of each score, written to the results."""

RULES = {
    "absent from both": "a case in which neither prediction nor reference has the class is not "
    "part of the class's scores (volumes count as 0 ml)",
    "absent from one": "a class that only the prediction or only the reference has gets Dice, IoU "
    "and surface Dice 0, and the diagonal of the image in mm as HD95, the worst possible values",
    "not annotated": "a class that a case does not annotate is not part of its scores",
    "ignored voxels": "where the reference is an ignored label, both count as background, but a "
    "face towards it is no surface; HD95 and surface Dice are not known where no surface is left",
}
"""Rules for special cases, written to the results."""


@runtime_checkable
class ClassMetric(Protocol):
    """Scores one class of a case, from masks; validation and evaluation call it."""

    scores: Mapping[str, str]
    """Name and definition of each score."""

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the scores of two masks (D, H, W), not both empty, in the box of both."""


@runtime_checkable
class LogitMetric(Protocol):
    """Scores the logits of a case, part by part; validation calls it."""

    def start(self) -> None:
        """Begin a case."""

    def update(self, logits: "Tensor", labels: "Tensor") -> None:
        """Add logits (K, ...) and labels (...) of a part; labels of K and more are unknown."""

    def finish(self) -> Mapping[str, float]:
        """Return the scores of the case."""


def score_case(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    classes: Mapping[str, Sequence[int]],
    tolerance_mm: float | Mapping[str, float] = 1.0,
    ignore_labels: Sequence[int] = (),
    max_points: int | None = None,
    metrics: Sequence[ClassMetric] = (),
) -> dict[str, dict[str, float]]:
    """Return the SCORES of each class of a case, from labels (D, H, W), and those of `metrics`.

    Classes may overlap. Scores are NaN where neither array has the class, HD95 and surface Dice
    also where surfaces exceed `max_points` voxels. Temporary arrays are booleans in a class's box.
    """
    whole = reference
    prediction, reference = mask_ignored(prediction, reference, ignore_labels)
    is_partial = reference is not whole
    voxel_ml = float(np.prod(spacing_mm)) / 1000
    diagonal = float(np.linalg.norm(np.multiply(reference.shape, spacing_mm)))
    results = {}
    for name, p, r, box in iter_masks(prediction, reference, classes):
        in_p, in_r, shared = (int(np.count_nonzero(m)) for m in (p, r, p & r))
        scores = dict.fromkeys(("dice", "iou", "hd95_mm", "surface_dice"), np.nan)
        extra = {score: np.nan for metric in metrics for score in metric.scores}
        if in_p or in_r:
            scores["dice"] = 2 * shared / (in_p + in_r)
            scores["iou"] = shared / (in_p + in_r - shared)
            scores["hd95_mm"], scores["surface_dice"] = diagonal, 0.0
            for metric in metrics:  # which may change its masks
                found = metric(p.copy(), r.copy(), spacing_mm)
                if unknown := [score for score in found if score not in extra]:
                    raise UsageError(
                        f"{type(metric).__name__} returns {unknown[0]!r}, which its `scores` do "
                        f"not name: {', '.join(metric.scores)}"
                    )
                extra |= {score: float(value) for score, value in found.items()}
        if in_p and in_r:
            mm = tolerance_mm if isinstance(tolerance_mm, float | int) else tolerance_mm[name]
            scores["hd95_mm"], scores["surface_dice"] = compute_surface_scores(
                p,
                r,
                spacing_mm=spacing_mm,
                tolerance_mm=mm,
                max_points=max_points,
                ignored=find_ignored_around(box, whole, ignore_labels) if is_partial else None,
            )
        volumes_ml = {
            "reference_ml": in_r * voxel_ml,
            "prediction_ml": in_p * voxel_ml,
            "difference_ml": (in_p - in_r) * voxel_ml,
        }
        results[name] = scores | volumes_ml | extra
    return results


def iter_masks(
    prediction: np.ndarray, reference: np.ndarray, classes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, tuple[slice, ...]]]:
    """Yield each class with both masks, cropped to the box that holds them, and this box."""
    from scipy.ndimage import find_objects

    volumes = prediction, reference
    found = [dict(enumerate(find_objects(volume), start=1)) for volume in volumes]
    for name, labels in classes.items():
        boxes = [box for by_label in found for label in labels if (box := by_label.get(label))]
        merged = tuple(
            slice(min(s.start for s in along), max(s.stop for s in along))
            for along in zip(*boxes, strict=True)
        )
        box = merged or (slice(0, 0),) * 3  # empty where neither has the class
        p, r = (reduce(np.logical_or, (v[box] == c for c in labels)) for v in volumes)
        yield name, p, r, box


def mask_ignored(
    prediction: np.ndarray, reference: np.ndarray, ignore_labels: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays with background where the reference has a label to ignore."""
    if not ignore_labels or not (ignored := np.isin(reference, ignore_labels)).any():
        return prediction, reference
    return np.where(ignored, 0, prediction), np.where(ignored, 0, reference)


def find_ignored_around(
    box: Sequence[slice], labels: np.ndarray, ignore_labels: Sequence[int]
) -> np.ndarray:
    """Return which voxels of a box, and of those around it, have a label to ignore."""
    sides = [(side.start - 1, side.stop + 1, n) for side, n in zip(box, labels.shape, strict=True)]
    part = labels[tuple(slice(max(a, 0), min(b, n)) for a, b, n in sides)]
    outside = [(int(a < 0), int(b > n)) for a, b, n in sides]
    return np.pad(np.isin(part, ignore_labels), outside)


def find_surface(mask: np.ndarray, ignored: np.ndarray | None) -> np.ndarray:
    """Return the voxels of a mask with a face to others, those of `ignored`, around it, aside."""
    from scipy.ndimage import binary_erosion

    if ignored is None:
        return mask & ~binary_erosion(mask)
    return mask & ~binary_erosion(np.pad(mask, 1) | ignored)[(slice(1, -1),) * 3]


def find_labels(volume: np.ndarray) -> list[int]:
    """Return the distinct values of a volume, slice by slice to save memory."""
    return sorted({int(v) for plane in np.moveaxis(volume, -1, 0) for v in np.unique(plane)})


def compute_surface_scores(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    tolerance_mm: float,
    max_points: int | None = None,
    ignored: np.ndarray | None = None,
) -> tuple[float, float]:
    """Return HD95 in mm and the surface Dice of two non-empty boolean volumes (D, H, W).

    Both may be cropped to their common bounding box; `ignored` is a voxel larger on each side. NaN
    if the surfaces have more than `max_points` voxels together, since the time grows with their
    number, or if one has none.
    """
    predicted, true = (find_surface(mask, ignored) for mask in (prediction, reference))
    points = [np.count_nonzero(predicted), np.count_nonzero(true)]
    if not all(points) or (max_points is not None and sum(points) > max_points):
        return np.nan, np.nan
    to_reference = measure_surface_distances(predicted, true, spacing_mm)
    to_prediction = measure_surface_distances(true, predicted, spacing_mm)
    hd95 = max(np.percentile(to_reference, 95), np.percentile(to_prediction, 95))
    both = np.concatenate([to_reference, to_prediction])
    both = both.astype(np.float32)  # in float64, 3 * 0.1 mm would exceed 0.3 mm
    return float(hd95), float(np.mean(both <= np.float32(tolerance_mm)))


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
