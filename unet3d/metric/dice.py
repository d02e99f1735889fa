"""Compute Dice and IoU per class over whole volumes, from counts of voxels.

A class's score is its mean over the volumes in which the reference or the prediction has it (NaN if
none does). A class that only one of them has scores 0. MONAI's DiceMetric gives the same Dice, but
IoU, regions and numbers of voxels would each take another pass.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unet3d.types import get_ignore_label

CHUNK = 2**18  # voxels whose pairs of labels are in memory at once, as ints of 8 bytes


def count_classes(prediction: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return (3, K): a volume's voxels of each class in both, in the reference, in the prediction.

    A confusion matrix of thousands of classes would be large.
    """
    counts = torch.zeros(3, num_classes, dtype=torch.long, device=labels.device)
    for p, r in iter_valid(prediction, labels):
        for total, values in zip(counts, (r[p == r], r, p), strict=True):
            total += torch.bincount(values, minlength=num_classes)
    return counts


def count_regions(prediction: Tensor, labels: Tensor, regions: Iterable[Sequence[int]]) -> Tensor:
    """Return (3, R): the same of regions, each of several labels."""
    sets = [torch.tensor(region, device=labels.device) for region in regions]
    counts = torch.zeros(3, len(sets), dtype=torch.long, device=labels.device)
    for p, r in iter_valid(prediction, labels):
        for n, region in enumerate(sets):
            in_p, in_r = torch.isin(p, region), torch.isin(r, region)
            counts[:, n] += torch.stack([(in_p & in_r).sum(), in_r.sum(), in_p.sum()])
    return counts


def iter_valid(prediction: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the predicted and reference labels of voxels that are not ignored, a part at a time."""
    parts = (volume.flatten().split(CHUNK) for volume in (prediction, labels))
    for predicted, reference in zip(*parts, strict=True):
        valid = reference != get_ignore_label(reference)
        yield predicted[valid].long(), reference[valid].long()


def mask_unannotated(
    prediction: Tensor, labels: Tensor, background: int, classes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return both without the classes that a volume does not annotate.

    Its label `background` stands for the background or one of these classes; 0: it annotates all.
    """
    if background == 0:
        return prediction, labels
    unknown = torch.tensor(classes, device=prediction.device, dtype=prediction.dtype)
    prediction = prediction.masked_fill(torch.isin(prediction, unknown), 0)
    return prediction, labels.masked_fill(labels == background, 0)


class Dice:
    """Dice and IoU of each foreground class, or of `regions` made of several labels."""

    def __init__(
        self, class_names: Sequence[str], regions: Mapping[str, Sequence[int]] | None = None
    ):
        self.num_classes, self.regions = len(class_names), regions
        self.scored_classes = {name: [c] for c, name in enumerate(class_names) if c > 0}
        if regions is not None:
            self.scored_classes = {name: list(labels) for name, labels in regions.items()}
        self.reset()

    def reset(self) -> None:
        self.cases: list[Tensor] = []  # (3, R): voxels of both, of the reference, of the prediction

    def update(self, prediction: Tensor, labels: Tensor) -> None:
        """Add predicted and reference labels, both (B, D, H, W)."""
        for p, t in zip(prediction, labels, strict=True):
            if self.regions is None:
                counts = count_classes(p, t, self.num_classes)[:, 1:]
            else:
                counts = count_regions(p, t, self.regions.values())
            self.cases.append(counts.cpu())

    def compute(self) -> dict[str, float]:
        """Return `dice` and `iou` (means over the classes), `dice/<class>` and `iou/<class>`."""
        counts = torch.stack(self.cases).double()  # (volumes, 3, R)
        per_class: dict[str, Tensor] = {}
        for name, (overlap, reference, prediction) in zip(
            self.scored_classes, counts.movedim(0, -1).unbind(1), strict=True
        ):
            total = reference + prediction
            per_class[f"dice/{name}"] = (2 * overlap / total).nanmean()  # 0 / 0 is NaN
            per_class[f"iou/{name}"] = (overlap / (total - overlap)).nanmean()
        values = list(per_class.values())
        means = {
            "dice": torch.stack(values[0::2]).nanmean(),
            "iou": torch.stack(values[1::2]).nanmean(),
        }
        return {name: value.item() for name, value in (means | per_class).items()}

    def voxels(self) -> dict[str, tuple[int, int]]:
        """Return each class's number of reference and predicted voxels over all volumes."""
        counts = sum(self.cases, torch.zeros(3, len(self.scored_classes)).long())
        return {
            name: (int(reference), int(prediction))
            for name, (_, reference, prediction) in zip(self.scored_classes, counts.T, strict=True)
        }
