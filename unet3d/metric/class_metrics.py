"""Metrics of the config group that score one class of a case from masks: `scores.ClassMetric`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from unet3d.errors import UsageError

CONNECTIVITIES = {6: 1, 18: 2, 26: 3}  # neighbors of a voxel: how many axes they differ along


class VolumeError:
    """The difference of a class's volumes, as a fraction of the reference's."""

    scores: ClassVar = {
        "volume_error": "|prediction - reference| / reference, of the volumes; none without a "
        "reference"
    }

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the error."""
        expected = np.count_nonzero(reference)
        difference = abs(np.count_nonzero(prediction) - expected)
        return {"volume_error": difference / expected if expected else np.nan}


class LesionScores:
    """F1 score, sensitivity and precision over connected components, whatever their size.

    MONAI's PanopticQualityMetric matches components one to one, by IoU: a lesion that is found in
    part does not count.
    """

    scores: ClassVar = {
        "lesion_f1": "2 P S / (P + S)",
        "lesion_sensitivity": "S: fraction of the reference's components of which the prediction "
        "has more than min_overlap",
        "lesion_precision": "P: fraction of the prediction's components of which the reference "
        "has more than min_overlap",
    }

    def __init__(self, *, min_overlap: float = 0.0, connectivity: int = 26):
        if not 0 <= min_overlap < 1 or connectivity not in CONNECTIVITIES:
            raise UsageError(
                "metrics.lesions needs min_overlap in [0, 1) and connectivity of 6, 18 or 26, got "
                f"{min_overlap} and {connectivity}"
            )
        self.min_overlap, self.connectivity = min_overlap, connectivity

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the scores: NaN for sensitivity or precision without components, F1 is then 0."""
        sensitivity = self._find_overlapping(reference, prediction)
        precision = self._find_overlapping(prediction, reference)
        total = np.nan_to_num(sensitivity) + np.nan_to_num(precision)
        return {
            "lesion_f1": 2 * sensitivity * precision / total if total else 0.0,
            "lesion_sensitivity": sensitivity,
            "lesion_precision": precision,
        }

    def _find_overlapping(self, mask: np.ndarray, other: np.ndarray) -> float:
        """Return the fraction of the mask's components that the other mask has."""
        from scipy.ndimage import generate_binary_structure, label

        neighbors = generate_binary_structure(3, CONNECTIVITIES[self.connectivity])
        components, count = label(mask, neighbors)
        if not count:
            return np.nan
        voxels = np.bincount(components.ravel(), minlength=count + 1)[1:]
        shared = np.bincount(components[other], minlength=count + 1)[1:]
        return float((shared > self.min_overlap * voxels).mean())


class CenterlineDice:
    """Harmonic mean of the parts of each skeleton that lie in the other mask.

    It says whether thin, connected structures are found along their whole length. MONAI has a loss
    for it, with soft skeletons, and no metric.
    """

    scores: ClassVar = {
        "cldice": "2 P S / (P + S), where P is the part of the prediction's skeleton inside of the "
        "reference and S that of the reference's inside of the prediction (Shit et al., CVPR "
        "2021); skeletons are morphological"
    }

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the score; 0 if one mask is empty."""
        if not (prediction.any() and reference.any()):
            return {"cldice": 0.0}
        precision = reference[find_skeleton(prediction)].mean()
        sensitivity = prediction[find_skeleton(reference)].mean()
        total = precision + sensitivity
        return {"cldice": float(2 * precision * sensitivity / total) if total else 0.0}


def find_skeleton(mask: np.ndarray) -> np.ndarray:
    """Return the morphological skeleton: what opening removes after 0, 1, 2, ... erosions."""
    from scipy.ndimage import binary_dilation, binary_erosion

    cube = np.ones((3, 3, 3), bool)
    eroded = np.pad(mask, 1)
    skeleton = np.zeros_like(eroded)
    while eroded.any():
        rest = binary_erosion(eroded)
        skeleton |= eroded & ~binary_dilation(rest, cube)
        eroded = rest
    return skeleton[1:-1, 1:-1, 1:-1]
