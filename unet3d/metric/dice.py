"""Dice and IoU per class, of whole volumes, from confusion matrices.

A class's score is its mean over the volumes in which it occurs, in the reference or in the
prediction: a class that is absent from both says nothing about a volume and is left out (NaN if it
is absent from all of them); one that is predicted where it should not be, or missed, scores 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.types import IGNORE


def confusion(prediction: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Count voxels of one volume: (K, K) int64, reference in rows, prediction in columns."""
    valid = labels != IGNORE
    pairs = labels[valid].long() * num_classes + prediction[valid].long()
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


class Dice:
    """Collects volumes by `update` and sums them up by `compute`."""

    def __init__(self, class_names: Sequence[str]):
        self.class_names = list(class_names)
        self.reset()

    def reset(self) -> None:
        """Forget all volumes."""
        self.matrices: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Take in (B, K, D, H, W) logits and (B, D, H, W) labels; return the predicted classes."""
        prediction = logits.argmax(1).to(torch.uint8)
        for p, t in zip(prediction, labels, strict=True):
            counts = confusion(p, t, len(self.class_names))
            self.matrices.append(counts.cpu())
        return prediction

    def compute(self) -> dict[str, float]:
        """`dice`, `iou` (means over the foreground) and `dice/<class>`, `iou/<class>`."""
        counts = torch.stack(self.matrices).double()  # (volumes, K, K)
        hit = counts.diagonal(dim1=1, dim2=2)
        either = counts.sum(1) + counts.sum(2)  # predicted + reference voxels
        scores = {"dice": 2 * hit / either, "iou": hit / (either - hit)}  # 0 / 0 is NaN: left out
        result = {}
        for name, per_volume in scores.items():
            per_class = per_volume.nanmean(0)
            result[name] = per_class[1:].nanmean().item()
            for c, class_name in enumerate(self.class_names):
                if c > 0:
                    result[f"{name}/{class_name}"] = per_class[c].item()
        return result
