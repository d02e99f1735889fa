"""Compute soft Dice + cross-entropy + skeleton recall, for thin structures."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import average_levels
from unet3d.loss.dice_ce import DiceCE
from unet3d.loss.dice_terms import sum_classes
from unet3d.loss.skeleton import dilate, skeletonize
from unet3d.types import IGNORE_LABEL

MAX_RADIUS = 1000
"""Voxels: more than any structure has."""


class SkeletonRecall(nn.Module):
    """DiceCE + `recall` * (1 - mean recall of the foreground along the skeleton of the labels).

    The skeleton of all that is not background is dilated to a tube; recall is the mean probability
    of a class in its part of the tube (Kirchhoff et al., ECCV 2024). The paper thins labels on the
    CPU, with scikit-image; here the skeleton is a morphological one, on the device of the labels.
    """

    def __init__(
        self,
        *,
        dice: float = 1.0,
        ce: float = 1.0,
        recall: float = 1.0,
        iterations: int = 10,
        dilations: int = 2,
        smooth: float = 1e-5,
        batch_dice: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if recall <= 0 or not (1 <= iterations <= MAX_RADIUS and 0 <= dilations <= MAX_RADIUS):
            raise UsageError(
                f"loss needs loss.recall > 0, loss.iterations in 1..{MAX_RADIUS} and "
                f"loss.dilations in 0..{MAX_RADIUS}, got {recall}, {iterations} and {dilations}"
            )
        self.recall, self.iterations, self.dilations = recall, iterations, dilations
        self.dice_ce = DiceCE(
            dice=dice,
            ce=ce,
            smooth=smooth,
            batch_dice=batch_dice,
            class_weights=class_weights,
            regions=regions,
        )

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        options = self.dice_ce
        table, batch = options.voxel_loss.region_table, options.batch_dice
        sums = sum_classes(logits, self.keep_tube(labels), table, batch=batch)
        overlap, _, reference = options.voxel_loss.select_foreground(sums)
        recall = (overlap + options.smooth) / (reference + options.smooth)
        return self.dice_ce(logits, labels) + self.recall * (1 - recall.mean())

    @torch.no_grad()
    def keep_tube(self, labels: Tensor) -> Tensor:
        """Return labels (B, D, H, W) that are ignored outside the tube."""
        tube = skeletonize((labels != 0) & (labels != IGNORE_LABEL), self.iterations)
        for _ in range(self.dilations):
            tube = dilate(tube)
        return torch.where(tube, labels, IGNORE_LABEL)
