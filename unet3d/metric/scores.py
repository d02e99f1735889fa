"""Every score of one case, class by class: Dice, IoU, HD95, surface Dice and volumes."""

from collections.abc import Mapping, Sequence

import numpy as np

from unet3d.metric.surface import surface_scores

SCORES = {
    "dice": "2 TP / (2 TP + FP + FN), of voxels",
    "iou": "TP / (TP + FP + FN), of voxels",
    "hd95_mm": "the larger of the two directed 95th percentiles of the distances between the "
    "surfaces' voxels, in mm",
    "surface_dice": "the share of both surfaces' voxels that lie within the class's tolerance of "
    "the other surface",
    "reference_ml": "volume of the reference in ml",
    "prediction_ml": "volume of the prediction in ml",
    "difference_ml": "prediction_ml - reference_ml",
}
"""What is scored, and what the numbers mean, for whoever reads a file of them."""

RULES = {
    "absent from both": "a case in which neither prediction nor reference has the class is left "
    "out of the class's scores (volumes count as 0 ml)",
    "absent from one": "a class that is missed, or predicted where there is none, has Dice, IoU "
    "and surface Dice 0 and as HD95 the diagonal of the image in mm, the worst that can be",
    "ignored voxels": "where the reference has ignore_label, both count as background",
}
"""What is scored where there is nothing to compare."""

Box = tuple[slice, ...]


def score_case(
    prediction: np.ndarray,
    reference: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    classes: Mapping[str, Sequence[int]],
    tolerance_mm: float | Mapping[str, float] = 1.0,
    ignore_label: int | None = None,
    most_points: int | None = None,
) -> dict[str, dict[str, float]]:
    """SCORES of each class, from the labels (D, H, W) of a case; NaN where a class is left out.

    A class is one or more labels above 0; classes may overlap. The largest arrays made on the way
    are booleans of the box around one class.
    """
    prediction, reference = mask_ignored(prediction, reference, ignore_label)
    voxel_ml = float(np.prod(spacing_mm)) / 1000
    diagonal = float(np.linalg.norm(np.multiply(reference.shape, spacing_mm)))
    boxes = [_boxes(a) for a in (prediction, reference)]
    found = {}
    for name, labels in classes.items():
        box = _around([boxed[c] for boxed in boxes for c in labels if c in boxed])
        p, r = (_mask(a[box], labels) for a in (prediction, reference))
        in_p, in_r, hit = (int(np.count_nonzero(m)) for m in (p, r, p & r))
        volumes = {
            "reference_ml": in_r * voxel_ml,
            "prediction_ml": in_p * voxel_ml,
            "difference_ml": (in_p - in_r) * voxel_ml,
        }
        overlap = {"dice": np.nan, "iou": np.nan}
        if in_p or in_r:
            overlap = {"dice": 2 * hit / (in_p + in_r), "iou": hit / (in_p + in_r - hit)}
        if in_p and in_r:
            tolerance = (
                tolerance_mm if isinstance(tolerance_mm, float | int) else tolerance_mm[name]
            )
            hd95, near = surface_scores(
                p, r, spacing_mm=spacing_mm, tolerance_mm=tolerance, most_points=most_points
            )
        else:
            hd95, near = (diagonal, 0.0) if in_p or in_r else (np.nan, np.nan)
        found[name] = overlap | {"hd95_mm": hd95, "surface_dice": near} | volumes
    return found


def mask_ignored(
    prediction: np.ndarray, reference: np.ndarray, ignore_label: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Both with background where the reference is to be ignored."""
    if ignore_label is None or not (ignored := reference == ignore_label).any():
        return prediction, reference
    return np.where(ignored, 0, prediction), np.where(ignored, 0, reference)


def find_labels(volume: np.ndarray) -> list[int]:
    """The different values of a volume, a slab at a time."""
    return sorted({int(v) for slab in np.moveaxis(volume, -1, 0) for v in np.unique(slab)})


def _boxes(volume: np.ndarray) -> dict[int, Box]:
    """The box around each label above 0 that there is."""
    from scipy.ndimage import find_objects

    return {c: box for c, box in enumerate(find_objects(volume), start=1) if box is not None}


def _around(boxes: Sequence[Box]) -> Box:
    """The box around boxes; an empty one around none."""
    if not boxes:
        return (slice(0, 0),) * 3
    return tuple(
        slice(min(s.start for s in along), max(s.stop for s in along))
        for along in zip(*boxes, strict=True)
    )


def _mask(volume: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    mask = volume == labels[0]
    for label in labels[1:]:
        mask |= volume == label
    return mask
