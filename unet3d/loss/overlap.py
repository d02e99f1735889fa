"""Overlap losses: formulas over the sums of each class; backward saves only logits and labels."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import (
    LabelCheck,
    Level,
    Logits,
    average_levels,
    split_levels,
)
from unet3d.loss.dice_terms import (
    PLAIN_CROSS_ENTROPY,
    TINY,
    ClassSums,
    CrossEntropyOptions,
    make_region_table,
    sum_classes,
)
from unet3d.types import IGNORE_LABEL

Regions = Mapping[str, int | Sequence[int]]
VoxelLoss = Literal["ce", "focal", "topk"]
SMALLEST_ERROR = 1e-7
"""Error of a class from which on the focal Tversky loss has no gradient."""

EXPONENTS = {"square": 2, "simple": 1, "uniform": 0}


class OverlapLoss(nn.Module):
    """The error of a formula over class sums + `ce` * mean cross-entropy.

    Voxels labeled 255 (with more classes 32767) count in neither; other labels that are no class
    are an error, on a GPU in the first batch alone. With `batch` a class has one sum over the
    batch, otherwise one per volume. In the cross-entropy a voxel counts as much as the weight of
    its class, as in torch.nn.CrossEntropyLoss. Overlapping `regions` (name -> labels) have binary
    cross-entropy, and one weight each. With deep supervision, logits are a list, finest first: each
    has half the weight of the one before and sees the labels at its own resolution.
    """

    def __init__(
        self,
        *,
        ce: float,
        smooth: float,
        batch: bool,
        class_weights: Sequence[float] | None,
        regions: Regions | None,
        kind: CrossEntropyOptions = PLAIN_CROSS_ENTROPY,
    ):
        super().__init__()
        if ce < 0 or smooth <= 0:
            raise UsageError(f"loss needs loss.ce >= 0 and loss.smooth > 0, got {ce} and {smooth}")
        listed = [] if isinstance(class_weights, Mapping) else class_weights
        if listed is not None and not (any(listed) and min(listed) >= 0):
            raise UsageError(
                f"loss.class_weights is a list of numbers >= 0, not all 0, got {class_weights}"
            )
        self.ce, self.smooth, self.batch, self.kind = ce, smooth, batch, kind
        self.check_labels: LabelCheck | None = LabelCheck()
        weights = None if class_weights is None else torch.tensor(class_weights)
        table = None if regions is None else make_region_table(regions.values())
        self.register_buffer("class_weights", weights, persistent=False)
        self.register_buffer("region_table", table, persistent=False)
        self.class_weights: Tensor | None
        self.region_table: Tensor | None

    reads_lazy_logits = True

    def forward(self, logits: Logits | Sequence[Logits], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        num_classes = None if self.region_table is None else IGNORE_LABEL
        levels = split_levels(logits, labels, num_classes, self.check_labels)
        table, outputs = self.region_table, levels[0][0].shape[1]
        if table is not None and len(table) != outputs:
            raise UsageError(
                f"the loss has {len(table)} regions, the network {outputs} outputs: give the "
                "network one output per region, without a background"
            )
        return average_levels(self.compute_levels(levels))

    def compute_levels(self, levels: Sequence[Level]) -> Tensor:
        """Return the loss (L) of each level of deep supervision."""
        weights, outputs = self.class_weights, levels[0][0].shape[1]
        if weights is not None and len(weights) != outputs:
            raise UsageError(
                f"loss.class_weights has {len(weights)} weights, the network {outputs} outputs: "
                "give one weight per class, background first, or per region"
            )
        sums = sum_classes(levels, self.region_table, batch=self.batch, kind=self.kind)
        cross_entropy, counted = sums.cross_entropy, sums.counted
        if weights is not None:
            cross_entropy, counted = cross_entropy * weights, counted * weights
        mean = cross_entropy.sum((1, 2)) / counted.sum((1, 2)).clamp(min=TINY)
        return self.compute_errors(sums) + self.ce * mean

    def compute_errors(self, sums: ClassSums) -> Tensor:
        """Return the formula's value (L) at each level."""
        raise NotImplementedError

    def select_foreground(self, sums: ClassSums) -> list[Tensor]:
        """Return overlap, predicted and reference without the background, which regions lack."""
        first = 1 if self.region_table is None else 0
        if sums.overlap.shape[-1] <= first:
            raise UsageError(
                "the network has one output, the background, and the loss counts the foreground: "
                "give it two or more, or regions"
            )
        return [part[..., first:] for part in (sums.overlap, sums.predicted, sums.reference)]


class DiceCE(OverlapLoss):
    """`dice` * (1 - mean soft Dice of the foreground) + `ce` * mean cross-entropy.

    `voxel_loss` replaces the cross-entropy. The focal loss weights a voxel whose label has
    probability p by (1 - p)^gamma. Top-k averages over a share of the voxels, those with the
    largest cross-entropy. `label_smoothing` spreads that much of each label's probability over all
    classes.
    """

    def __init__(
        self,
        *,
        dice: float = 1.0,
        ce: float = 1.0,
        smooth: float = 1e-5,
        batch_dice: bool = True,
        voxel_loss: VoxelLoss = "ce",
        gamma: float = 2.0,
        topk: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if dice < 0 or dice + ce == 0:
            raise UsageError(
                f"loss needs loss.dice >= 0 and loss.ce >= 0, not both 0, got {dice} and {ce}"
            )
        if voxel_loss not in get_args(VoxelLoss):
            raise UsageError(f"loss.voxel_loss is ce, focal or topk, got {voxel_loss}")
        if voxel_loss == "focal" and gamma < 1:
            raise UsageError(f"loss.gamma is at least 1, got {gamma}")
        if voxel_loss == "topk" and not 0 < topk <= 1:
            raise UsageError(f"loss.topk is a share of the voxels, 0 < topk <= 1, got {topk}")
        if voxel_loss == "topk" and regions is not None:
            raise UsageError("loss.voxel_loss=topk takes one class per voxel, not data.regions")
        if not 0 <= label_smoothing < 1 or (label_smoothing and voxel_loss != "ce"):
            raise UsageError(
                "loss.label_smoothing is a probability, 0 <= label_smoothing < 1, and goes with "
                f"loss.voxel_loss=ce; got {label_smoothing} with {voxel_loss}"
            )
        super().__init__(
            ce=ce,
            smooth=smooth,
            batch=batch_dice,
            class_weights=class_weights,
            regions=regions,
            kind=CrossEntropyOptions(
                gamma=gamma if voxel_loss == "focal" else 0.0,
                topk=topk if voxel_loss == "topk" else None,
                smoothing=label_smoothing,
            ),
        )
        self.dice = dice

    def compute_errors(self, sums: ClassSums) -> Tensor:
        overlap, predicted, reference = self.select_foreground(sums)
        scores = (2 * overlap + self.smooth) / (predicted + reference + self.smooth)
        return self.dice * (1 - scores.mean((1, 2)))


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
        batch_dice: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if min(alpha, beta) < 0 or alpha + beta == 0 or gamma <= 0:
            raise UsageError(
                "loss needs loss.alpha >= 0, loss.beta >= 0, not both 0, and loss.gamma > 0, "
                f"got {alpha}, {beta} and {gamma}"
            )
        super().__init__(
            ce=ce, smooth=smooth, batch=batch_dice, class_weights=class_weights, regions=regions
        )
        self.alpha, self.beta, self.exponent = alpha, beta, 1 / gamma

    def compute_errors(self, sums: ClassSums) -> Tensor:
        overlap, predicted, reference = self.select_foreground(sums)
        false = self.alpha * (predicted - overlap) + self.beta * (reference - overlap)
        errors = 1 - (overlap + self.smooth) / (overlap + false + self.smooth)
        if self.exponent != 1:  # the root of 0 has no derivative, that of a rounding error no value
            errors = errors.clamp(min=SMALLEST_ERROR) ** self.exponent
        return errors.mean((1, 2))


class GeneralizedDice(OverlapLoss):
    """1 - one soft Dice of all classes together, weighted by their size, + `ce` * cross-entropy.

    A class of n voxels has the weight 1 / n^2 (square), 1 / n (simple) or 1 (uniform); one without
    voxels that of the smallest. The background counts, too. MONAI's loss smooths with weights as
    small as 1 / n^2, which can outweigh a large patch; here the largest weight is 1.
    """

    def __init__(
        self,
        *,
        weighting: str = "square",
        ce: float = 0.0,
        smooth: float = 1e-5,
        batch_dice: bool = True,
        class_weights: Sequence[float] | None = None,
        regions: Regions | None = None,
    ):
        if weighting not in EXPONENTS:
            raise UsageError(f"loss.weighting is square, simple or uniform, got {weighting}")
        super().__init__(
            ce=ce, smooth=smooth, batch=batch_dice, class_weights=class_weights, regions=regions
        )
        self.exponent = EXPONENTS[weighting]

    def compute_errors(self, sums: ClassSums) -> Tensor:
        reference = sums.reference
        largest = torch.finfo(reference.dtype).max
        smallest = torch.where(reference > 0, reference, largest).amin(2, keepdim=True)
        weights = (smallest / reference.where(reference > 0, smallest)) ** self.exponent
        overlap = (weights * sums.overlap).sum(2)
        total = (weights * (sums.predicted + reference)).sum(2)
        return (1 - (2 * overlap + self.smooth) / (total + self.smooth)).mean(1)
