"""Train on cases that do not annotate every class.

A label may stand for the background and classes that a case does not annotate. There, these classes
are one: the loss sees the background with the sum of their probabilities, and none of them (the
marginal loss of Shi et al., Medical Image Analysis 2021).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.custom_ops import upcast
from unet3d.lazy_logits import LazyLogits
from unet3d.loss.deep_supervision import Logits, split_levels
from unet3d.loss.dice_terms import iter_chunks
from unet3d.types import IGNORE_LABEL, get_ignore_label

ABSENT_LOGIT = -1e4
"""Logit of a class that the loss does not see; fp16 has it, and its probability is 0."""


class PartialLabels(nn.Module):
    """Call a loss with what is known; a label may stand for any of its `unannotated_classes`."""

    def __init__(self, loss: nn.Module, unannotated_classes: Mapping[int, Sequence[int]]):
        super().__init__()
        self.loss = loss
        self.first = min(unannotated_classes, default=IGNORE_LABEL)
        classes = 1 + max(
            (c for unknown in unannotated_classes.values() for c in unknown), default=0
        )
        table = torch.zeros(256, classes, dtype=torch.bool)
        for label, unknown in unannotated_classes.items():
            table[label, list(unknown)] = True
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    @property
    def reads_lazy_logits(self) -> bool:
        """Return whether the loss that is called does."""
        return getattr(self.loss, "reads_lazy_logits", False)

    def forward(self, logits: Logits | Sequence[Logits], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), or a list of them, and labels (B, D, H, W) -> scalar."""
        levels = split_levels(logits, labels)
        merged = [merge_unknown(*level, self.table) for level in levels]
        labels = levels[0][1]
        is_unknown = (labels >= self.first) & (labels != get_ignore_label(labels))
        return self.loss(merged, labels.masked_fill(is_unknown, 0))


def merge_unknown(logits: Logits, labels: Tensor, table: Tensor) -> Any:
    """Give the background the logit of all classes that a voxel may be of."""
    if isinstance(logits, LazyLogits):
        return logits.map(
            lambda rows, x: _merge(x, rows.of(labels), table),
            lambda rows, x, g: _compute_gradient(x, rows.of(labels), table, g),
        )
    return _MergeUnknown.apply(logits, labels, table)


class _MergeUnknown(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels, table)
        return _merge(logits, labels, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _compute_gradient(*ctx.saved_tensors, grad), None, None


def _merge(logits: Tensor, labels: Tensor, table: Tensor) -> Tensor:
    merged = logits.clone()
    for rows, x, group in _iter_groups(logits, labels, table):
        merged[:, 0, rows] = _sum_group(x, group).to(merged.dtype)
        for c in range(1, group.shape[1]):
            merged[:, c, rows] = torch.where(group[:, c], ABSENT_LOGIT, merged[:, c, rows])
    return merged


def _compute_gradient(logits: Tensor, labels: Tensor, table: Tensor, grad: Tensor) -> Tensor:
    result = grad.clone()
    for rows, x, group in _iter_groups(logits, labels, table):
        share = (x - _sum_group(x, group)[:, None]).exp() * grad[:, :1, rows]
        selected = slice(0, group.shape[1])
        result[:, selected, rows] = torch.where(group, share, grad[:, selected, rows]).to(
            grad.dtype
        )
    return result


def _iter_groups(
    logits: Tensor, labels: Tensor, table: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows, the logits of classes that may be unknown, and which ones a voxel may be of."""
    for rows in iter_chunks(logits):
        group = table[labels[:, rows].long()].movedim(-1, 1)
        group[:, 0] = True
        yield rows, upcast(logits[:, : group.shape[1], rows]), group


def _sum_group(x: Tensor, group: Tensor) -> Tensor:
    return x.masked_fill(~group, -torch.inf).logsumexp(1)
