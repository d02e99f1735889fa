"""Soft Dice + cross-entropy that keeps the logits and the labels, and nothing else at full size.

Softmax, logarithm and the gradient are worked out in float32 (at least), a slab of the volume at a
time, so that neither one-hot labels nor float32 copies of the logits ever exist as a whole. What it
computes stands in dice_ce_reference.py.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.errors import UsageError
from unet3d.loss.chunks import list_chunks, upcast
from unet3d.loss.dice_bce import DiceBCEFunction, make_region_table
from unet3d.types import IGNORE_LABEL


class DiceCE(nn.Module):
    """`dice` times (1 - mean soft Dice of the foreground) + `ce` times mean cross-entropy.

    Voxels labelled IGNORE count in neither. With `batch_dice` a class has one Dice over the
    whole batch, else one per volume. Networks with deep supervision give a list of logits, finest
    first: each counts half of the one before, and sees the labels at its own resolution.
    Overlapping `regions` (name -> labels) have an output each, and binary cross-entropy.
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
                "loss needs dice >= 0, ce >= 0, not both 0, and smooth > 0, "
                f"got {dice}, {ce} and {smooth}"
            )
        self.dice, self.ce, self.smooth, self.batch_dice = dice, ce, smooth, batch_dice
        table = None if regions is None else make_region_table(regions.values())
        self.register_buffer("table", table, persistent=False)

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), labels (B, D, H, W) of any integer type -> scalar."""
        outputs = [logits] if isinstance(logits, Tensor) else list(logits)
        weights = [2.0**-i for i in range(len(outputs))]
        losses = [
            w * self._one(y, resize_labels(labels, y.shape[2:]))
            for w, y in zip(weights, outputs, strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    def _one(self, logits: Tensor, labels: Tensor) -> Tensor:
        choices = (self.dice, self.ce, self.smooth, self.batch_dice)
        if self.table is None:
            return _DiceCE.apply(logits, labels, *choices)
        return DiceBCEFunction.apply(logits, labels, self.table, *choices)


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Labels (B, D, H, W) at another resolution, by the nearest voxel."""
    for axis, (new, old) in enumerate(zip(size, labels.shape[1:], strict=True), start=1):
        if new != old:
            centres = (torch.arange(new, device=labels.device) + 0.5) * (old / new)
            labels = labels.index_select(axis, centres.long())
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
            for rows in list_chunks(logits):
                log_p = F.log_softmax(upcast(logits[:, :, rows]), dim=1)
                slab = labels[:, rows]
                valid = slab != IGNORE_LABEL
                for c in range(k):
                    here = slab == c
                    log_c = log_p[:, c]
                    entropy[:, c] -= torch.where(here, log_c, 0).flatten(1).sum(1)
                    reference[:, c] += here.flatten(1).sum(1)
                    p_c = log_c.exp()
                    overlap[:, c] += torch.where(here, p_c, 0).flatten(1).sum(1)
                    predicted[:, c] += torch.where(valid, p_c, 0).flatten(1).sum(1)
                del log_p, log_c, p_c
            if batch_dice:
                overlap, predicted, reference = (
                    s.sum(0, keepdim=True) for s in (overlap, predicted, reference)
                )
            counted = sums[2].sum().clamp(min=1)
            union = predicted + reference + smooth
            scores = (2 * overlap + smooth) / union
            ctx.save_for_backward(logits, labels, union, scores, counted)
            ctx.dice, ctx.ce = dice, ce
            return dice * (1 - scores[:, 1:].mean()) + ce * entropy.sum() / counted

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, union, scores, counted = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            k = logits.shape[1]
            # d loss / d p of a foreground class: push everywhere, minus pull where it is the label
            weight = torch.full_like(union, ctx.dice / (union.shape[0] * (k - 1)))
            weight[:, 0] = 0
            pull, push = (2 * weight / union), (weight * scores / union)
            result = torch.empty_like(logits)
            for rows in list_chunks(logits):
                p = F.softmax(upcast(logits[:, :, rows]), dim=1)
                slab = labels[:, rows]
                inner = torch.zeros_like(p[:, 0])
                for c in range(k):
                    inner += p[:, c] * _slope(c, slab, pull, push)
                scale = grad * (slab != IGNORE_LABEL)
                for c in range(k):
                    g = p[:, c] * (_slope(c, slab, pull, push) - inner)
                    g += (p[:, c] - (slab == c).to(p.dtype)) * (ctx.ce / counted)
                    result[:, c, rows] = g * scale
                del p, g
            return result, None, None, None, None, None


def _slope(c: int, labels: Tensor, pull: Tensor, push: Tensor) -> Tensor:
    """The derivative of the Dice part by p of class c, at every voxel of a slab."""
    there = push[:, c, None, None, None]
    return torch.where(labels == c, there - pull[:, c, None, None, None], there)
