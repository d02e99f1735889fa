"""Overlap losses: formulas over the sums of each class; backward saves only logits and labels."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import average_levels
from unet3d.loss.dice_terms import ClassSums
from unet3d.loss.voxel_loss import Kind, VoxelLoss

Regions = Mapping[str, int | Sequence[int]]
Weighting = Literal["square", "simple", "uniform"]
EXPONENTS = {"square": 2, "simple": 1, "uniform": 0}


class OverlapLoss(nn.Module):
    """The error of a formula over class sums + `ce` * mean cross-entropy.

    Voxels labeled IGNORE_LABEL count in neither. With `batch` a class has one sum over the batch,
    otherwise one per volume. VoxelLoss explains class weights, regions and other options. With deep
    supervision, logits are a list, finest first: each has half the weight of the one before and
    sees the labels at its own resolution.
    """

    def __init__(self, voxel_loss: VoxelLoss, *, ce: float, smooth: float, batch: bool):
        super().__init__()
        self.voxel_loss, self.ce, self.smooth, self.batch = voxel_loss, ce, smooth, batch

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums, entropy = self.voxel_loss(logits, labels, batch=self.batch)
        return self.compute_error(sums) + self.ce * entropy

    def compute_error(self, sums: ClassSums) -> Tensor:
        """Return the formula's value."""
        raise NotImplementedError


class DiceCE(OverlapLoss):
    """`dice` * (1 - mean soft Dice of the foreground) + `ce` * mean cross-entropy."""

    def __init__(
        self,
        *,
        dice: float = 1.0,
        ce: float = 1.0,
        smooth: float = 1e-5,
        batch_dice: bool = True,
        voxel_loss: Kind = "ce",
        gamma: float = 2.0,
        topk: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if min(dice, ce) < 0 or dice + ce == 0 or smooth <= 0:
            raise UsageError(
                "loss needs loss.dice >= 0, loss.ce >= 0, not both 0, and loss.smooth > 0, "
                f"got {dice}, {ce} and {smooth}"
            )
        entropy = VoxelLoss(
            kind=voxel_loss,
            gamma=gamma,
            topk=topk,
            label_smoothing=label_smoothing,
            class_weights=class_weights,
            regions=regions,
        )
        super().__init__(entropy, ce=ce, smooth=smooth, batch=batch_dice)
        self.dice = dice

    def compute_error(self, sums: ClassSums) -> Tensor:
        overlap, predicted, reference = self.voxel_loss.select_foreground(sums)
        scores = (2 * overlap + self.smooth) / (predicted + reference + self.smooth)
        return self.dice * (1 - scores.mean())


class Tversky(OverlapLoss):
    """Mean of (1 - Tversky index)^(1 / `gamma`) over the foreground + `ce` * mean cross-entropy.

    The index is a Dice that weights false positives by `alpha` and false negatives by `beta`: 0.5
    and 0.5 are the Dice. A `gamma` above 1 gives small errors a larger gradient (focal Tversky).
    """

    def __init__(
        self,
        *,
        alpha: float = 0.3,
        beta: float = 0.7,
        gamma: float = 1.0,
        ce: float = 0.0,
        smooth: float = 1e-5,
        batch: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if min(alpha, beta, ce) < 0 or alpha + beta == 0 or min(smooth, gamma) <= 0:
            raise UsageError(
                "loss needs loss.alpha >= 0, loss.beta >= 0, not both 0, loss.ce >= 0, "
                f"loss.gamma > 0 and loss.smooth > 0, got {alpha}, {beta}, {ce}, {gamma}, {smooth}"
            )
        entropy = VoxelLoss(class_weights=class_weights, regions=regions)
        super().__init__(entropy, ce=ce, smooth=smooth, batch=batch)
        self.alpha, self.beta, self.gamma = alpha, beta, gamma

    def compute_error(self, sums: ClassSums) -> Tensor:
        overlap, predicted, reference = self.voxel_loss.select_foreground(sums)
        false = self.alpha * (predicted - overlap) + self.beta * (reference - overlap)
        errors = 1 - (overlap + self.smooth) / (overlap + false + self.smooth)
        if self.gamma != 1:  # the root of 0 has no derivative, that of a rounding error no value
            errors = errors.clamp(min=self.smooth) ** (1 / self.gamma)
        return errors.mean()


class GeneralizedDice(OverlapLoss):
    """1 - one soft Dice of all classes together, weighted by their size, + `ce` * cross-entropy.

    A class of n voxels has the weight 1 / n^2 (square), 1 / n (simple) or 1 (uniform); one without
    voxels that of the smallest. The background counts, too. MONAI's loss smooths with weights as
    small as 1 / n^2, which can outweigh a large patch; here the largest weight is 1.
    """

    def __init__(
        self,
        *,
        weighting: Weighting = "square",
        ce: float = 0.0,
        smooth: float = 1e-5,
        batch: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if weighting not in get_args(Weighting):
            raise UsageError(f"loss.weighting is square, simple or uniform, got {weighting}")
        if ce < 0 or smooth <= 0:
            raise UsageError(f"loss needs loss.ce >= 0 and loss.smooth > 0, got {ce} and {smooth}")
        entropy = VoxelLoss(class_weights=class_weights, regions=regions)
        super().__init__(entropy, ce=ce, smooth=smooth, batch=batch)
        self.exponent = EXPONENTS[weighting]

    def compute_error(self, sums: ClassSums) -> Tensor:
        reference = sums.reference
        largest = torch.finfo(reference.dtype).max
        smallest = torch.where(reference > 0, reference, largest).amin(1, keepdim=True)
        weights = (smallest / reference.where(reference > 0, smallest)) ** self.exponent
        overlap = (weights * sums.overlap).sum(1)
        total = (weights * (sums.predicted + reference)).sum(1)
        return (1 - (2 * overlap + self.smooth) / (total + self.smooth)).mean()
