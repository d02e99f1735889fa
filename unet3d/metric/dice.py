"""Dice and IoU per class, of whole volumes, from confusion matrices.

A class's score is its mean over the volumes in which it occurs, in the reference or in the
prediction: a class that is absent from both says nothing about a volume and is left out (NaN if it
is absent from all of them); one that is predicted where it should not be, or missed, scores 0.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unet3d.types import IGNORE_LABEL


def confusion(prediction: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Count voxels of one volume: (K, K) int64, reference in rows, prediction in columns."""
    valid = labels != IGNORE_LABEL
    pairs = labels[valid].long() * num_classes + prediction[valid].long()
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


class Dice:
    """Collects volumes by `update` and sums them up by `compute`.

    Judged is each class, or each of the `regions` that are made of several.
    """

    def __init__(
        self, class_names: Sequence[str], regions: Mapping[str, Sequence[int]] | None = None
    ):
        self.num_classes = len(class_names)
        self.judged = {name: [c] for c, name in enumerate(class_names) if c > 0}
        if regions is not None:
            self.judged = {name: list(labels) for name, labels in regions.items()}
        self.reset()

    def reset(self) -> None:
        """Forget all volumes."""
        self.matrices: list[Tensor] = []

    def update(self, prediction: Tensor, labels: Tensor) -> None:
        """Take in the predicted classes and the true ones, both (B, D, H, W)."""
        for p, t in zip(prediction, labels, strict=True):
            self.matrices.append(confusion(p, t, self.num_classes).cpu())

    def compute(self) -> dict[str, float]:
        """`dice`, `iou` (means over the foreground) and `dice/<class>`, `iou/<class>`."""
        counts = torch.stack(self.matrices).double()  # (volumes, K, K)
        result: dict[str, float] = {}
        means: dict[str, list[Tensor]] = {"dice": [], "iou": []}
        for name, labels in self.judged.items():
            reference, prediction = counts[:, labels], counts[:, :, labels]
            hit = reference[:, :, labels].sum((1, 2))
            either = reference.sum((1, 2)) + prediction.sum((1, 2))
            # 0 / 0 is NaN: left out
            for score, value in (("dice", 2 * hit / either), ("iou", hit / (either - hit))):
                means[score].append(value.nanmean())
                result[f"{score}/{name}"] = means[score][-1].item()
        return {score: torch.stack(of).nanmean().item() for score, of in means.items()} | result

    def voxels(self) -> dict[str, tuple[int, int]]:
        """Of each class, over all volumes: voxels of the reference and of the prediction."""
        counts = sum(self.matrices, torch.zeros(self.num_classes, self.num_classes).long())
        return {
            name: (int(counts[labels].sum()), int(counts[:, labels].sum()))
            for name, labels in self.judged.items()
        }
