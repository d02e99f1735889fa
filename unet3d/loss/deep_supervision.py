"""Compute a loss at every level of deep supervision."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.lazy_logits import LazyLogits

Logits = Tensor | LazyLogits
Level = tuple[Any, Tensor]
"""Logits (B, K, D, H, W) of one level, and the labels (B, D, H, W) at its resolution."""


def average_levels(losses: Tensor) -> Tensor:
    """Return the weighted mean of losses (L), finest first: each has half the weight before it."""
    if len(losses) == 1:
        return losses.view(())
    weights = torch.exp2(-torch.arange(len(losses), dtype=losses.dtype, device=losses.device))
    return (losses * weights).sum() / (2 - 2.0 ** (1 - len(losses)))


def split_levels(logits: Logits | Sequence[Logits], labels: Tensor) -> list[Level]:
    """Return the levels of logits, finest first, each with the labels at its resolution.

    MONAI's DynUNet has a tensor (B, L, K, D, H, W) of levels at the same resolution.
    """
    levels: Any = logits
    if isinstance(logits, Tensor | LazyLogits):
        levels = [logits]
        if isinstance(logits, Tensor) and logits.dim() == labels.dim() + 2:
            levels = logits.unbind(1)
    shape = levels[0].shape
    if labels.dim() != len(shape) - 1 or len(labels) != shape[0]:  # kernels would read past them
        raise UsageError(
            f"logits of shape {list(shape)} need labels (B, D, H, W) of the same batch, got "
            f"{list(labels.shape)}"
        )
    return [(level, resize_labels(labels, level.shape[2:])) for level in levels]


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
