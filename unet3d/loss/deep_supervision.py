"""Compute a loss at every level of deep supervision."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def average_levels(
    compute: Callable[[Tensor, Tensor], Tensor], logits: Tensor | Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Return the weighted mean of a loss over the levels of deep supervision, finest first.

    Each level has half the weight of the one before and sees the labels at its own resolution.
    """
    levels = split_levels(logits, labels)
    losses = [compute(y, resize_labels(labels, y.shape[2:])) for y in levels]
    if len(losses) == 1:
        return losses[0]
    weights = [2.0**-i for i in range(len(losses))]
    weighted = [w * loss for w, loss in zip(weights, losses, strict=True)]
    return torch.stack(weighted).sum() / sum(weights)


def split_levels(logits: Tensor | Sequence[Tensor], labels: Tensor) -> Sequence[Tensor]:
    """Return the levels of logits, finest first.

    MONAI's DynUNet has a tensor (B, L, K, D, H, W) of levels at the same resolution.
    """
    if not isinstance(logits, Tensor):
        return logits
    return logits.unbind(1) if logits.dim() == labels.dim() + 2 else [logits]


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Resample labels (B, D, H, W) to another size, by the nearest voxel."""
    for axis, (new, old) in enumerate(zip(size, labels.shape[1:], strict=True), start=1):
        if old % new == 0:
            every = old // new
            labels = labels[(slice(None),) * axis + (slice(every // 2, None, every),)]
        else:
            # The middle of voxel i is at (2i + 1) / 2: integers, as a half has too few digits.
            centers = torch.arange(1, 2 * new, 2, device=labels.device) * old // (2 * new)
            labels = labels.index_select(axis, centers)
    return labels.contiguous()
