"""Compute a loss at every level of deep supervision."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.errors import UsageError
from unet3d.lazy_logits import LazyLogits
from unet3d.types import IGNORE_LABEL, MAX_CLASSES, get_label_dtype

Logits = Tensor | LazyLogits
Level = tuple[Any, Tensor]
"""Logits (B, K, D, H, W) of one level, and the labels (B, D, H, W) at its resolution."""


def average_levels(losses: Tensor) -> Tensor:
    """Return the weighted mean of losses (L), finest first: each has half the weight before it."""
    if len(losses) == 1:
        return losses.view(())
    weights = torch.exp2(-torch.arange(len(losses), dtype=losses.dtype, device=losses.device))
    return (losses * weights).sum() / (2 - 2.0 ** (1 - len(losses)))


def split_levels(
    logits: Logits | Sequence[Logits],
    labels: Tensor,
    num_classes: int | None = None,
    check_labels: Callable[[Tensor, int], None] | None = None,
) -> list[Level]:
    """Return the levels of logits, finest first, each with the labels at its resolution.

    MONAI's DynUNet has a tensor (B, L, K, D, H, W) of levels at the same resolution. Labels have
    the dtype for `num_classes`, by default the number of outputs.
    """
    levels: Any = logits
    if isinstance(logits, Tensor | LazyLogits):
        levels = [logits]
        if isinstance(logits, Tensor) and logits.dim() == labels.dim() + 2:
            levels = logits.unbind(1)
    shape = levels[0].shape
    if labels.shape != (shape[0], *shape[2:]):  # kernels would read past them
        raise UsageError(
            f"logits of shape {list(shape)} need labels (B, D, H, W) of the same batch and size, "
            f"got {list(labels.shape)}"
        )
    num_classes = num_classes or shape[1]
    if labels.dtype == torch.int8:  # in which 255 is -1
        labels = labels.to(torch.int16)
    converted = convert_labels(labels, num_classes)
    if check_labels is not None:
        check_labels(labels, num_classes)
    return [(level, resize_labels(converted, level.shape[2:])) for level in levels]


def convert_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels of any integer type as bytes, or as int16 for more than 255 classes.

    IGNORE_LABEL is the last int16, MAX_CLASSES, as a byte.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise UsageError(
            f"labels are integers, the class of each voxel, got {labels.dtype}: use labels.long()"
        )
    return labels.to(getattr(torch, get_label_dtype(num_classes)))


class LabelCheck:
    """Refuse labels that are no class: in every batch on a CPU, in the first one on a GPU.

    The check has to wait for the GPU.
    """

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, labels: Tensor, num_classes: int) -> None:
        is_fake = isinstance(labels, FakeTensor) or labels.is_meta or torch.compiler.is_compiling()
        if is_fake or not labels.numel() or (self.is_done and not labels.is_cpu):
            return
        self.is_done = True
        if labels.dtype in (torch.uint16, torch.uint32, torch.uint64):
            labels = labels.long()  # they lack masked_fill
        is_ignored = (labels == IGNORE_LABEL) | (labels == MAX_CLASSES)
        for value in map(int, labels.masked_fill(is_ignored, 0).aminmax()):
            if not 0 <= value < num_classes:
                ignored = IGNORE_LABEL if num_classes <= IGNORE_LABEL else MAX_CLASSES
                raise UsageError(
                    f"labels have the value {value}, which is none of {num_classes} classes: give "
                    f"voxels to ignore the label {ignored}"
                )


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
