"""Compute HD95 per class of whole preprocessed volumes during training."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from unet3d.metric.scores import score_case
from unet3d.types import IGNORE_LABEL

MAX_POINTS = 1_000_000
"""Largest number of surface voxels of a class to score.

The noise that an untrained network predicts has more; measuring it would take minutes for a
meaningless number, so such cases are skipped.
"""


class ValidationHD95:
    """HD95 of each class; call `update` with volumes, then `compute`.

    `scored_classes` maps classes to labels, `spacing_mm` cases to voxel spacings. Absent classes
    are scored as in an evaluation (`scores.RULES`).
    """

    def __init__(
        self,
        scored_classes: Mapping[str, Sequence[int]],
        spacing_mm: Mapping[str, Sequence[float]],
    ):
        self.scored_classes = scored_classes
        self.spacing_mm = spacing_mm
        self.reset()

    def reset(self) -> None:
        """Remove all volumes."""
        self.distances_mm: list[list[float]] = []  # (volumes, classes)

    def update(self, cases: Sequence[str], prediction: Tensor, labels: Tensor) -> None:
        """Add predicted and reference labels, both (B, D, H, W)."""
        for case, p, t in zip(cases, prediction.cpu().numpy(), labels.cpu().numpy(), strict=True):
            scores = score_case(
                p,
                t,
                spacing_mm=self.spacing_mm[case],
                classes=self.scored_classes,
                ignore_labels=[IGNORE_LABEL],
                max_points=MAX_POINTS,
            )
            self.distances_mm.append([by_class["hd95_mm"] for by_class in scores.values()])

    def compute(self) -> dict[str, float]:
        """Return `hd95_mm` (mean over classes) and `hd95_mm/<class>`, without undefined ones."""
        means = {}
        for index, name in enumerate(self.scored_classes):
            values = [row[index] for row in self.distances_mm if not np.isnan(row[index])]
            if values:
                means[f"hd95_mm/{name}"] = float(np.mean(values))
        return {"hd95_mm": float(np.mean(list(means.values())))} | means if means else {}
