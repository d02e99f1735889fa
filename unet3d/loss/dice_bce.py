"""Compute soft Dice + binary cross-entropy of overlapping regions; see dice_ce.py.

A region is a set of labels and has its own sigmoid output. Backward saves only the logits and 8-bit
labels. dice_ce_reference.py defines the result.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.loss.chunks import iter_chunks, upcast
from unet3d.types import IGNORE_LABEL


def make_region_table(regions: Iterable[int | Sequence[int]]) -> Tensor:
    """Build an (R, 256) bool table: whether a label belongs to a region."""
    rows = [torch.zeros(256, dtype=torch.bool).index_fill_(0, _to_tensor(r), True) for r in regions]
    return torch.stack(rows)


def _to_tensor(labels: int | Sequence[int]) -> Tensor:
    return torch.tensor([labels] if isinstance(labels, int) else list(labels))


class DiceBCEFunction(Function):
    """(logits (B, R, D, H, W), labels (B, D, H, W), table (R, 256), weights ...) -> scalar."""

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        labels: Tensor,
        table: Tensor,
        dice: float,
        ce: float,
        smooth: float,
        batch_dice: bool,
    ) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            b, r = logits.shape[:2]
            sums = upcast(logits.new_zeros(())).new_zeros(4, b, r)
            overlap, predicted, reference, entropy = sums
            voxels = sums.new_zeros(())
            for rows in iter_chunks(logits):
                y = labels[:, rows].long()
                valid = y != IGNORE_LABEL
                voxels += valid.sum()
                for c in range(r):
                    x, is_region = upcast(logits[:, c, rows]), table[c][y]
                    p = torch.where(valid, x.sigmoid(), 0)
                    cross = F.softplus(x) - torch.where(is_region, x, 0)
                    entropy[:, c] += torch.where(valid, cross, 0).flatten(1).sum(1)
                    reference[:, c] += is_region.flatten(1).sum(1)
                    overlap[:, c] += torch.where(is_region, p, 0).flatten(1).sum(1)
                    predicted[:, c] += p.flatten(1).sum(1)
            if batch_dice:
                overlap, predicted, reference = (
                    s.sum(0, keepdim=True) for s in (overlap, predicted, reference)
                )
            num_values = (voxels * r).clamp(min=1)
            union = predicted + reference + smooth
            scores = (2 * overlap + smooth) / union
            ctx.save_for_backward(logits, labels, table, union, scores, num_values)
            ctx.dice, ctx.ce = dice, ce
            return dice * (1 - scores.mean()) + ce * entropy.sum() / num_values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, table, union, scores, num_values = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            weight = torch.full_like(union, ctx.dice / union.numel())
            pull, push = (2 * weight / union), (weight * scores / union)
            result = torch.empty_like(logits)
            for rows in iter_chunks(logits):
                y = labels[:, rows].long()
                scale = grad * (y != IGNORE_LABEL)
                for c in range(logits.shape[1]):
                    p, is_region = upcast(logits[:, c, rows]).sigmoid(), table[c][y]
                    slope = push[:, c, None, None, None] - torch.where(
                        is_region, pull[:, c, None, None, None], 0
                    )
                    g = slope * p * (1 - p) + (p - is_region.to(p.dtype)) * (ctx.ce / num_values)
                    result[:, c, rows] = g * scale
            return result, None, None, None, None, None, None
