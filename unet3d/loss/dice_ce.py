"""Compute soft Dice + cross-entropy; backward saves only the logits and the labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.errors import UsageError
from unet3d.loss.dice_terms import compute_gradient, make_region_table, sum_terms


class DiceCE(nn.Module):
    """`dice` * (1 - mean soft Dice of the foreground) + `ce` * mean cross-entropy.

    Voxels labeled IGNORE_LABEL count in neither. With `batch_dice` a class has one Dice over the
    batch, otherwise one per volume. With deep supervision, logits are a list, finest first: each
    has half the weight of the one before and sees the labels at its own resolution. Overlapping
    `regions` (name -> labels) have one output each, and binary cross-entropy.
    """

    def __init__(
        self,
        *,
        dice: float = 1.0,
        ce: float = 1.0,
        smooth: float = 1e-5,
        batch_dice: bool = True,
        regions: Mapping[str, int | Sequence[int]] | None = None,
    ):
        super().__init__()
        if min(dice, ce) < 0 or dice + ce == 0 or smooth <= 0:
            raise UsageError(
                "loss needs loss.dice >= 0, loss.ce >= 0, not both 0, and loss.smooth > 0, "
                f"got {dice}, {ce} and {smooth}"
            )
        self.dice, self.ce, self.smooth, self.batch_dice = dice, ce, smooth, batch_dice
        table = None if regions is None else make_region_table(regions.values())
        self.register_buffer("region_table", table, persistent=False)

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        return average_levels(self._compute_one, logits, labels)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        options = (self.dice, self.ce, self.smooth, self.batch_dice)
        return _DiceCE.apply(logits, labels, self.region_table, *options)


def average_levels(
    compute: Callable[[Tensor, Tensor], Tensor], logits: Tensor | Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Return the weighted mean of a loss over the levels of deep supervision, finest first."""
    outputs = [logits] if isinstance(logits, Tensor) else list(logits)
    weights = [2.0**-i for i in range(len(outputs))]
    losses = [
        w * compute(y, resize_labels(labels, y.shape[2:]))
        for w, y in zip(weights, outputs, strict=True)
    ]
    return torch.stack(losses).sum() / sum(weights)


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Resample labels (B, D, H, W) to another size, by the nearest voxel."""
    for axis, (new, old) in enumerate(zip(size, labels.shape[1:], strict=True), start=1):
        if new != old:
            # The middle of voxel i is at (2i + 1) / 2: integers, as a half has too few digits.
            centers = torch.arange(1, 2 * new, 2, device=labels.device) * old // (2 * new)
            labels = labels.index_select(axis, centers)
    return labels


class _DiceCE(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        table: Tensor | None,
        dice: float,
        ce: float,
        smooth: float,
        batch_dice: bool,
    ) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            sums = sum_terms(logits, labels, table)
            terms, voxels = sums[:4], sums[4, :, 0]
            entropy, k = terms[3].sum(), logits.shape[1]
            overlap, predicted, reference = (
                terms[:3].sum(1, keepdim=True) if batch_dice else terms[:3]
            )
            num_values = (voxels.sum() * (1 if table is None else k)).clamp(min=1)
            union = predicted + reference + smooth
            scores = (2 * overlap + smooth) / union
            ctx.save_for_backward(logits, labels, table, union, scores, num_values)
            ctx.dice, ctx.ce = dice, ce
            foreground = scores[:, 1:] if table is None else scores  # class 0 is the background
            return dice * (1 - foreground.mean()) + ce * entropy / num_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, table, union, scores, num_values = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            rows, k = union.shape
            background = int(table is None)
            weight = torch.full_like(union, ctx.dice / (rows * (k - background)))
            weight[:, :background].zero_()
            pull, push = 2 * weight / union, weight * scores / union
            pull, push = (t.expand(len(logits), k).contiguous() for t in (pull, push))
            scales = torch.stack([grad, grad * (ctx.ce / num_values)])
            gradient = compute_gradient(logits, labels, table, pull, push, scales)
            return gradient, None, None, None, None, None, None
