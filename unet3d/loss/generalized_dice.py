"""Compute the generalized Dice loss; backward saves only the logits and the labels."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import average_levels
from unet3d.loss.voxel_loss import VoxelLoss

Weighting = Literal["square", "simple", "uniform"]
EXPONENTS = {"square": 2, "simple": 1, "uniform": 0}


class GeneralizedDice(nn.Module):
    """1 - one soft Dice of all classes together, weighted by their size, + `ce` * cross-entropy.

    A class of n voxels has the weight 1 / n^2 (square), 1 / n (simple) or 1 (uniform); one without
    voxels that of the smallest. The background counts, too. Ignored voxels, classes, regions and
    levels are those of DiceCE. MONAI's loss smooths with weights as small as 1 / n^2, which can
    outweigh a large patch; here the largest weight is 1.
    """

    def __init__(
        self,
        *,
        weighting: Weighting = "square",
        ce: float = 0.0,
        smooth: float = 1e-5,
        batch: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if weighting not in get_args(Weighting):
            raise UsageError(f"loss.weighting is square, simple or uniform, got {weighting}")
        if ce < 0 or smooth <= 0:
            raise UsageError(f"loss needs loss.ce >= 0 and loss.smooth > 0, got {ce} and {smooth}")
        self.exponent, self.ce, self.smooth, self.batch = EXPONENTS[weighting], ce, smooth, batch
        self.voxel_loss = VoxelLoss(class_weights=class_weights, regions=regions)

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums, entropy = self.voxel_loss(logits, labels, batch=self.batch)
        reference = sums.reference
        largest = torch.finfo(reference.dtype).max
        smallest = torch.where(reference > 0, reference, largest).amin(1, keepdim=True)
        weights = (smallest / reference.where(reference > 0, smallest)) ** self.exponent
        overlap = (weights * sums.overlap).sum(1)
        total = (weights * (sums.predicted + reference)).sum(1)
        scores = (2 * overlap + self.smooth) / (total + self.smooth)
        return (1 - scores).mean() + self.ce * entropy
