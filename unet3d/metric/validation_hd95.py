"""HD95 per class of whole volumes while a network is trained, in the grids that it sees."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from unet3d.metric.scores import score_case
from unet3d.types import IGNORE_LABEL

MOST_POINTS = 1_000_000
"""Voxels of both surfaces of a class. The noise of a network that has learned nothing yet has more;
to measure it takes minutes and says nothing, so such a case is left out."""


class ValidationHD95:
    """Collects volumes by `update` and sums them up by `compute`.

    `judged` are the labels of each class, `spacing_mm` the voxels of each case. What is absent is
    judged as in an evaluation (`scores.RULES`).
    """

    def __init__(
        self, judged: Mapping[str, Sequence[int]], spacing_mm: Mapping[str, Sequence[float]]
    ):
        self.judged = judged
        self.spacing_mm = spacing_mm
        self.reset()

    def reset(self) -> None:
        """Forget all volumes."""
        self.found: list[list[float]] = []  # of each volume, of each class

    def update(self, cases: Sequence[str], prediction: Tensor, labels: Tensor) -> None:
        """Take in the predicted classes and the true ones, both (B, D, H, W)."""
        for case, p, t in zip(cases, prediction.cpu().numpy(), labels.cpu().numpy(), strict=True):
            of_classes = score_case(
                p,
                t,
                spacing_mm=self.spacing_mm[case],
                classes=self.judged,
                ignore_label=IGNORE_LABEL,
                most_points=MOST_POINTS,
            )
            self.found.append([of_class["hd95_mm"] for of_class in of_classes.values()])

    def compute(self) -> dict[str, float]:
        """`hd95_mm`, the mean over the classes, and `hd95_mm/<class>`; none without a figure."""
        means = {}
        for number, name in enumerate(self.judged):
            there = [volume[number] for volume in self.found if not np.isnan(volume[number])]
            if there:
                means[f"hd95_mm/{name}"] = float(np.mean(there))
        return {"hd95_mm": float(np.mean(list(means.values())))} | means if means else {}
