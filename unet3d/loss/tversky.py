"""Compute the Tversky and the focal Tversky loss; backward saves only the logits and the labels."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.deep_supervision import average_levels
from unet3d.loss.voxel_loss import VoxelLoss


class Tversky(nn.Module):
    """Mean of (1 - Tversky index)^(1 / `gamma`) over the foreground + `ce` * mean cross-entropy.

    The index is a Dice that weights false positives by `alpha` and false negatives by `beta`: 0.5
    and 0.5 are the Dice. A `gamma` above 1 gives small errors a larger gradient (focal Tversky).
    Ignored voxels, classes, regions and levels are those of DiceCE.
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
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if min(alpha, beta, ce) < 0 or alpha + beta == 0 or min(smooth, gamma) <= 0:
            raise UsageError(
                "loss needs loss.alpha >= 0, loss.beta >= 0, not both 0, loss.ce >= 0, "
                f"loss.gamma > 0 and loss.smooth > 0, got {alpha}, {beta}, {ce}, {gamma}, {smooth}"
            )
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.ce, self.smooth, self.batch = ce, smooth, batch
        self.voxel_loss = VoxelLoss(class_weights=class_weights, regions=regions)

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums, entropy = self.voxel_loss(logits, labels, batch=self.batch)
        overlap, predicted, reference = self.voxel_loss.select_foreground(sums)
        false = self.alpha * (predicted - overlap) + self.beta * (reference - overlap)
        index = (overlap + self.smooth) / (overlap + false + self.smooth)
        errors = 1 - index
        if self.gamma != 1:  # the root of 0 has no derivative, that of a rounding error no value
            errors = errors.clamp(min=self.smooth) ** (1 / self.gamma)
        return errors.mean() + self.ce * entropy
