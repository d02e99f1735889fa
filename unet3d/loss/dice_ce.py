"""Compute soft Dice + cross-entropy; backward saves only the logits and the labels.

Softmax, logarithm and gradient are computed in float32 or higher, chunk by chunk, so that one-hot
labels and float32 copies of the logits never have the full size. dice_ce_reference.py defines the
result.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.errors import UsageError
from unet3d.loss.chunks import iter_chunks, upcast
from unet3d.loss.dice_bce import DiceBCEFunction, make_region_table
from unet3d.types import IGNORE_LABEL


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
        outputs = [logits] if isinstance(logits, Tensor) else list(logits)
        weights = [2.0**-i for i in range(len(outputs))]
        losses = [
            w * self._compute_one(y, resize_labels(labels, y.shape[2:]))
            for w, y in zip(weights, outputs, strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        options = (self.dice, self.ce, self.smooth, self.batch_dice)
        if self.region_table is None:
            return _DiceCE.apply(logits, labels, *options)
        return DiceBCEFunction.apply(logits, labels, self.region_table, *options)


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Resample labels (B, D, H, W) to another size, by the nearest voxel."""
    for axis, (new, old) in enumerate(zip(size, labels.shape[1:], strict=True), start=1):
        if new != old:
            centers = (torch.arange(new, device=labels.device) + 0.5) * (old / new)
            labels = labels.index_select(axis, centers.long())
    return labels


class _DiceCE(Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        labels: Tensor,
        dice: float,
        ce: float,
        smooth: float,
        batch_dice: bool,
    ) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            b, k = logits.shape[:2]
            sums = upcast(logits.new_zeros(())).new_zeros(4, b, k)
            overlap, predicted, reference, entropy = sums
            for rows in iter_chunks(logits):
                log_p = F.log_softmax(upcast(logits[:, :, rows]), dim=1)
                y = labels[:, rows]
                valid = y != IGNORE_LABEL
                for c in range(k):
                    is_class = y == c
                    log_c = log_p[:, c]
                    entropy[:, c] -= torch.where(is_class, log_c, 0).flatten(1).sum(1)
                    reference[:, c] += is_class.flatten(1).sum(1)
                    p_c = log_c.exp()
                    overlap[:, c] += torch.where(is_class, p_c, 0).flatten(1).sum(1)
                    predicted[:, c] += torch.where(valid, p_c, 0).flatten(1).sum(1)
                del log_p, log_c, p_c
            if batch_dice:
                overlap, predicted, reference = (
                    s.sum(0, keepdim=True) for s in (overlap, predicted, reference)
                )
            num_voxels = sums[2].sum().clamp(min=1)
            union = predicted + reference + smooth
            scores = (2 * overlap + smooth) / union
            ctx.save_for_backward(logits, labels, union, scores, num_voxels)
            ctx.dice, ctx.ce = dice, ce
            return dice * (1 - scores[:, 1:].mean()) + ce * entropy.sum() / num_voxels

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, union, scores, num_voxels = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            k = logits.shape[1]
            # d loss / d p of a foreground class: push everywhere, minus pull where it is the label
            weight = torch.full_like(union, ctx.dice / (union.shape[0] * (k - 1)))
            weight[:, 0] = 0
            pull, push = (2 * weight / union), (weight * scores / union)
            result = torch.empty_like(logits)
            for rows in iter_chunks(logits):
                p = F.softmax(upcast(logits[:, :, rows]), dim=1)
                y = labels[:, rows]
                inner = torch.zeros_like(p[:, 0])
                for c in range(k):
                    inner += p[:, c] * _dice_slope(c, y, pull, push)
                scale = grad * (y != IGNORE_LABEL)
                for c in range(k):
                    g = p[:, c] * (_dice_slope(c, y, pull, push) - inner)
                    g += (p[:, c] - (y == c).to(p.dtype)) * (ctx.ce / num_voxels)
                    result[:, c, rows] = g * scale
                del p, g
            return result, None, None, None, None, None


def _dice_slope(c: int, labels: Tensor, pull: Tensor, push: Tensor) -> Tensor:
    """Return the derivative of the Dice part by p of class c, at every voxel of a chunk."""
    outside = push[:, c, None, None, None]
    return torch.where(labels == c, outside - pull[:, c, None, None, None], outside)
