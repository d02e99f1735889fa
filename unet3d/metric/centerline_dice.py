"""Centerline Dice: whether thin, connected structures are found along their whole length.

MONAI has a loss for it, with soft skeletons, and no metric.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np


class CenterlineDice:
    """Harmonic mean of the parts of each skeleton that lie in the other mask."""

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
