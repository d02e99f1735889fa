"""Compute soft Dice + cross-entropy + skeleton recall, for thin structures."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import Level
from unet3d.loss.dice_terms import sum_classes
from unet3d.loss.overlap import DiceCE, Regions
from unet3d.types import get_ignore_label

SPACE = (-3, -2, -1)


class SkeletonRecall(DiceCE):
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
        regions: Regions | None = None,
    ):
        if recall <= 0 or iterations < 1 or dilations < 0:
            raise UsageError(
                "loss needs loss.recall > 0, loss.iterations >= 1 and loss.dilations >= 0, "
                f"got {recall}, {iterations} and {dilations}"
            )
        super().__init__(
            dice=dice,
            ce=ce,
            smooth=smooth,
            batch_dice=batch_dice,
            class_weights=class_weights,
            regions=regions,
        )
        self.recall, self.iterations, self.dilations = recall, iterations, dilations

    def compute_levels(self, levels: Sequence[Level]) -> Tensor:
        tubes = [(logits, self.keep_tube(labels)) for logits, labels in levels]
        sums = sum_classes(tubes, self.region_table, batch=self.batch)
        overlap, _, reference = self.select_foreground(sums)
        recall = (overlap + self.smooth) / (reference + self.smooth)
        return super().compute_levels(levels) + self.recall * (1 - recall.mean((1, 2)))

    @torch.no_grad()
    def keep_tube(self, labels: Tensor) -> Tensor:
        """Return labels (B, D, H, W) that are ignored outside the tube."""
        ignored = get_ignore_label(labels)
        tube = skeletonize((labels != 0) & (labels != ignored), self.iterations)
        for _ in range(self.dilations):
            tube = dilate(tube)
        return torch.where(tube, labels, ignored)


def dilate(mask: Tensor, *, corners: bool = True) -> Tensor:
    """Add all 26 neighbors of a mask (..., D, H, W); without corners, the 6 that share a face."""
    result = mask.clone()
    for axis in SPACE:
        before = result.clone() if corners else mask
        size = mask.shape[axis] - 1
        for start in (0, 1):
            result.narrow(axis, start, size).logical_or_(before.narrow(axis, 1 - start, size))
    return result


def skeletonize(mask: Tensor, iterations: int) -> Tensor:
    """Return the morphological skeleton of a bool mask (..., D, H, W).

    It joins what opening removes from the mask after 0, 1, ... `iterations` erosions: a structure
    has none if half its thickness is more voxels than that. It may have gaps.
    """
    skeleton = torch.zeros_like(mask)
    for _ in range(iterations + 1):
        eroded = ~dilate(~mask, corners=False)  # beyond the volume is inside
        skeleton |= mask & ~dilate(eroded)
        mask = eroded
    return skeleton
