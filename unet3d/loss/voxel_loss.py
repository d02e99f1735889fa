"""Compute cross-entropy, focal loss or top-k cross-entropy, and the sums of overlap losses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.loss.dice_terms import TINY, ClassSums, make_region_table, sum_classes

Kind = Literal["ce", "focal", "topk"]


class VoxelLoss(nn.Module):
    """The mean cross-entropy of a batch's voxels; those labeled IGNORE_LABEL do not count.

    The focal loss weights a voxel whose label has probability p by (1 - p)^gamma. Top-k averages
    over a share of the voxels, those with the largest cross-entropy. `label_smoothing` spreads that
    much of each label's probability over all classes. A voxel counts as much as the weight of its
    class, as in torch.nn.CrossEntropyLoss. Overlapping `regions` (name -> labels)
    have binary cross-entropy, and one weight each.
    """

    def __init__(
        self,
        *,
        kind: Kind = "ce",
        gamma: float = 2.0,
        topk: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if kind not in get_args(Kind):
            raise UsageError(f"loss.voxel_loss is ce, focal or topk, got {kind}")
        if kind == "focal" and gamma < 1:
            raise UsageError(f"loss.gamma is at least 1, got {gamma}")
        if kind == "topk" and not 0 < topk <= 1:
            raise UsageError(f"loss.topk is a share of the voxels, 0 < topk <= 1, got {topk}")
        if kind == "topk" and regions is not None:
            raise UsageError("loss.voxel_loss=topk takes one class per voxel, not data.regions")
        if not 0 <= label_smoothing < 1 or (label_smoothing and kind != "ce"):
            raise UsageError(
                "loss.label_smoothing is a probability, 0 <= label_smoothing < 1, and goes with "
                f"loss.voxel_loss=ce; got {label_smoothing} with {kind}"
            )
        if class_weights is not None and not _are_weights(class_weights):
            raise UsageError(
                f"loss.class_weights is a list of numbers >= 0, not all 0, got {class_weights!r}"
            )
        self.gamma = gamma if kind == "focal" else 0.0
        self.topk = topk if kind == "topk" else None
        self.label_smoothing = label_smoothing
        weights = None if class_weights is None else torch.tensor(class_weights)
        table = None if regions is None else make_region_table(regions.values())
        self.register_buffer("class_weights", weights, persistent=False)
        self.register_buffer("region_table", table, persistent=False)
        self.class_weights: Tensor | None
        self.region_table: Tensor | None

    def forward(self, logits: Tensor, labels: Tensor, *, batch: bool) -> tuple[ClassSums, Tensor]:
        """Logits (B, K, D, H, W), labels (B, D, H, W) -> sums of each class, mean.

        Sums are (1, K), over the batch, or (B, K).
        """
        weights, outputs = self.class_weights, logits.shape[1]
        if weights is not None and len(weights) != outputs:
            raise UsageError(
                f"loss.class_weights has {len(weights)} weights, the network {outputs} outputs: "
                "give one weight per class, background first, or per region"
            )
        sums = sum_classes(
            logits,
            labels,
            self.region_table,
            batch=batch,
            gamma=self.gamma,
            topk=self.topk,
            smoothing=self.label_smoothing,
        )
        entropy, counted = sums.entropy, sums.counted
        if weights is not None:
            entropy, counted = entropy * weights, counted * weights
        return sums, entropy.sum() / counted.sum().clamp(min=TINY)

    def select_foreground(self, sums: ClassSums) -> list[Tensor]:
        """Return overlap, predicted and reference without the background, which regions lack."""
        first = 1 if self.region_table is None else 0
        return [part[:, first:] for part in (sums.overlap, sums.predicted, sums.reference)]


def _are_weights(values: Any) -> bool:
    """Return whether values are numbers, none negative, not all 0."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return are_numbers and bool(values) and min(values) >= 0 and any(values)
