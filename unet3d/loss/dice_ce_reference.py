"""Reference losses in plain PyTorch, with one-hot labels and float32 copies."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.types import IGNORE_LABEL


def dice_ce(
    logits: Tensor,
    labels: Tensor,
    *,
    dice: float = 1.0,
    ce: float = 1.0,
    smooth: float = 1e-5,
    batch_dice: bool = True,
) -> Tensor:
    """Logits (B, K, D, H, W), labels (B, D, H, W) -> scalar."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORE_LABEL
    truth = (
        F.one_hot(labels.long().where(valid, 0), logits.shape[1]).movedim(-1, 1) * valid[:, None]
    )
    p = logits.softmax(1) * valid[:, None]
    dims = (0, 2, 3, 4) if batch_dice else (2, 3, 4)
    overlap, total = (p * truth).sum(dims), (p + truth).sum(dims)
    scores = (2 * overlap + smooth) / (total + smooth)
    entropy = -(logits.log_softmax(1) * truth).sum() / valid.sum().clamp(min=1)
    return dice * (1 - scores[..., 1:].mean()) + ce * entropy


def dice_bce(
    logits: Tensor,
    labels: Tensor,
    regions: Sequence[Sequence[int]],
    *,
    dice: float = 1.0,
    ce: float = 1.0,
    smooth: float = 1e-5,
    batch_dice: bool = True,
) -> Tensor:
    """Overlapping regions: logits (B, R, D, H, W), labels (B, D, H, W) -> scalar."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = (labels != IGNORE_LABEL)[:, None]
    truth = torch.stack([torch.isin(labels, torch.tensor(r)) for r in regions], dim=1).to(logits)
    p = logits.sigmoid() * valid
    dims = (0, 2, 3, 4) if batch_dice else (2, 3, 4)
    overlap, total = (p * truth).sum(dims), (p + truth).sum(dims)
    scores = (2 * overlap + smooth) / (total + smooth)
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * valid
    return dice * (1 - scores.mean()) + ce * entropy.sum() / (valid.sum() * len(regions))
