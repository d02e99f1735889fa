"""Reference losses in plain PyTorch, with one-hot labels and float32 copies."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.types import IGNORE_LABEL


def dice(p: Tensor, truth: Tensor, *, batch: bool) -> Tensor:
    """Return the soft Dice of each class, of the batch or of each volume."""
    dims = (0, 2, 3, 4) if batch else (2, 3, 4)
    overlap, total = (p * truth).sum(dims), (p + truth).sum(dims)
    return (2 * overlap + 1e-5) / (total + 1e-5)


def dice_ce(
    logits: Tensor,
    labels: Tensor,
    *,
    dice_weight: float = 1.0,
    ce: float = 1.0,
    batch_dice: bool = True,
    gamma: float = 0.0,
    topk: float = 1.0,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Tensor:
    """Logits (B, K, D, H, W), labels (B, D, H, W) -> scalar."""
    valid = labels != IGNORE_LABEL
    y = labels.long().where(valid, 0)
    truth = F.one_hot(y, logits.shape[1]).movedim(-1, 1) * valid[:, None]
    scores = dice(logits.softmax(1) * valid[:, None], truth, batch=batch_dice)
    entropy = F.cross_entropy(logits, y, reduction="none")
    q = entropy.neg().exp()
    entropy = torch.where(valid, entropy * (1 - q) ** gamma, -1.0)
    selected = entropy.flatten().topk(max(1, round(topk * int(valid.sum()))))
    weights = torch.tensor(class_weights or [1.0] * logits.shape[1], dtype=logits.dtype)
    counted = (weights[y] * valid).flatten()[selected.indices]
    mean = (selected.values * counted).sum() / counted.sum().clamp(min=1e-30)
    if label_smoothing:
        options = {"ignore_index": IGNORE_LABEL, "label_smoothing": label_smoothing}
        mean = F.cross_entropy(logits, labels.long(), weights, **options)
    return dice_weight * (1 - scores[..., 1:].mean()) + ce * mean


def dice_bce(
    logits: Tensor,
    labels: Tensor,
    regions: Sequence[Sequence[int]],
    *,
    batch_dice: bool = True,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Tensor:
    """Overlapping regions: logits (B, R, D, H, W), labels (B, D, H, W) -> scalar."""
    valid = (labels != IGNORE_LABEL)[:, None]
    truth = torch.stack([torch.isin(labels, torch.tensor(r)) for r in regions], dim=1).to(logits)
    scores = dice(logits.sigmoid() * valid, truth, batch=batch_dice)
    target = truth * (1 - label_smoothing) + label_smoothing / 2
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    q = entropy.neg().exp()
    weights = torch.tensor(class_weights or [1.0] * len(regions), dtype=logits.dtype)
    counted = weights[:, None, None, None] * valid
    mean = (entropy * (1 - q) ** gamma * counted).sum() / counted.sum()
    return 1 - scores.mean() + mean
