"""The expected calibration error of a network's probabilities.

MONAI's CalibrationErrorMetric takes the probabilities of all classes for the whole volume at once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.types import get_ignore_label


class CalibrationError:
    """Mean difference of confidence and accuracy, over bins of the confidence.

    Only voxels that the reference or the prediction has as foreground count: background far from
    any structure is certain and right. With `regions`, each region is a decision of its own. Sums
    are kept instead of probabilities, so that a case takes no memory.
    """

    def __init__(self, *, bins: int = 15, regions: Mapping[str, list[int]] | None = None):
        if bins < 2:
            raise UsageError(f"metrics.calibration.bins must be 2 or more, got {bins}")
        self.bins, self.regions = bins, None if regions is None else list(regions.values())
        self.start()

    def start(self) -> None:
        """Begin a case."""
        self.sums: Tensor | None = None  # (3, bins): voxels, confidence, correct ones

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (K, ...) and labels (...) of a part."""
        logits = logits.float()
        if self.regions is None:
            confidence, predicted = logits.softmax(0).max(0)
            known = labels < len(logits)
            self._add(confidence, predicted == labels, known & ((predicted > 0) | (labels > 0)))
            return
        known = labels != get_ignore_label(labels)
        for x, region in zip(logits, self.regions, strict=True):
            is_region = torch.isin(labels, torch.tensor(region, device=labels.device))
            predicted = x > 0
            self._add(x.abs().sigmoid(), predicted == is_region, known & (predicted | is_region))

    def _add(self, confidence: Tensor, correct: Tensor, counted: Tensor) -> None:
        confidence, correct = confidence[counted].double(), correct[counted].double()
        index = (confidence * self.bins).long().clamp(max=self.bins - 1)
        parts = [torch.ones_like(confidence), confidence, correct]
        sums = torch.stack([torch.bincount(index, part, self.bins) for part in parts])
        self.sums = sums if self.sums is None else self.sums + sums

    def finish(self) -> Mapping[str, float]:
        """Return the error of the case; NaN without a voxel of foreground."""
        if self.sums is None:
            return {"ece": float("nan")}
        voxels, confidence, correct = self.sums.cpu()
        return {"ece": float((confidence - correct).abs().sum() / voxels.sum())}
