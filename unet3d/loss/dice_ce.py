"""Compute soft Dice + cross-entropy; backward saves only the logits and the labels."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import average_levels
from unet3d.loss.voxel_loss import Kind, VoxelLoss


class DiceCE(nn.Module):
    """`dice` * (1 - mean soft Dice of the foreground) + `ce` * mean cross-entropy.

    Voxels labeled IGNORE_LABEL count in neither. With `batch_dice` a class has one Dice over the
    batch, otherwise one per volume. VoxelLoss explains `voxel_loss`, `gamma`, `topk`,
    `label_smoothing`, `class_weights` and `regions`. With deep supervision, logits are a list,
    finest first: each has half the weight of the one before and sees the labels at its own
    resolution.
    """

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
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if min(dice, ce) < 0 or dice + ce == 0 or smooth <= 0:
            raise UsageError(
                "loss needs loss.dice >= 0, loss.ce >= 0, not both 0, and loss.smooth > 0, "
                f"got {dice}, {ce} and {smooth}"
            )
        self.dice, self.ce, self.smooth, self.batch_dice = dice, ce, smooth, batch_dice
        self.voxel_loss = VoxelLoss(
            kind=voxel_loss,
            gamma=gamma,
            topk=topk,
            label_smoothing=label_smoothing,
            class_weights=class_weights,
            regions=regions,
        )

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums, entropy = self.voxel_loss(logits, labels, batch=self.batch_dice)
        overlap, predicted, reference = self.voxel_loss.select_foreground(sums)
        scores = (2 * overlap + self.smooth) / (predicted + reference + self.smooth)
        return self.dice * (1 - scores.mean()) + self.ce * entropy
