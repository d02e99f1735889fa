"""Compute the sums behind Dice and cross-entropy, and their gradient.

Classes exclude each other (softmax), or regions, sets of labels, overlap (a sigmoid each, binary
cross-entropy). On CUDA either takes one kernel. Elsewhere softmax, logarithm and gradient are
computed chunk by chunk, so that one-hot labels and float32 copies of the logits never have the full
size. dice_ce_reference.py defines the result.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.custom_ops import custom_op
from unet3d.triton_kernels import runs_triton
from unet3d.types import IGNORE_LABEL

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)

CHUNK_ELEMENTS = 2**20
"""Logits of one volume that are in float32 at once: 4 MiB for each of a few temporaries."""


def make_region_table(regions: Iterable[int | Sequence[int]]) -> Tensor:
    """Build an (R, 256) bool table: whether a label belongs to a region."""
    sets = [[region] if isinstance(region, int) else list(region) for region in regions]
    table = torch.zeros(len(sets), 256, dtype=torch.bool)
    for row, labels in zip(table, sets, strict=True):
        row[torch.tensor(labels)] = True
    return table


def upcast(x: Tensor) -> Tensor:
    """Cast to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sum_terms(logits: Tensor, labels: Tensor, table: Tensor | None) -> Tensor:
    """Return (5, B, K): sums over voxels that are not ignored, per volume and class or region.

    They are: p where the class is the label, p, voxels of the class, cross-entropy, all voxels.
    """
    if _has_kernels(logits):
        return sum_terms_cuda(logits, labels, table)
    b, k = logits.shape[:2]
    sums = upcast(logits.new_zeros(())).new_zeros(5, b, k)
    overlap, predicted, reference, entropy, voxels = sums
    for rows in _iter_chunks(logits):
        y = labels[:, rows]
        valid = y != IGNORE_LABEL
        voxels += valid.flatten(1).sum(1, keepdim=True)
        log_p = None if table is not None else F.log_softmax(upcast(logits[:, :, rows]), dim=1)
        for c in range(k):
            if log_p is not None:
                is_class, log_c = y == c, log_p[:, c]
                entropy[:, c] -= torch.where(is_class, log_c, 0).flatten(1).sum(1)
                p = log_c.exp()
            else:
                assert table is not None
                x, is_class = upcast(logits[:, c, rows]), table[c][y.long()]
                p = x.sigmoid()
                cross = F.softplus(x) - torch.where(is_class, x, 0)
                entropy[:, c] += torch.where(valid, cross, 0).flatten(1).sum(1)
            reference[:, c] += is_class.flatten(1).sum(1)
            overlap[:, c] += torch.where(is_class, p, 0).flatten(1).sum(1)
            predicted[:, c] += torch.where(valid, p, 0).flatten(1).sum(1)
        del log_p, p
    return sums


def compute_gradient(
    logits: Tensor, labels: Tensor, table: Tensor | None, pull: Tensor, push: Tensor, scales: Tensor
) -> Tensor:
    """Return the gradient of the logits.

    The derivative of Dice by p is `push` everywhere, minus `pull` where the class is the label;
    both are (B, K). `scales` are the factors of Dice and of cross-entropy.
    """
    if _has_kernels(logits):
        return compute_gradient_cuda(logits, labels, table, pull, push, scales)
    result = torch.empty_like(logits)
    for rows in _iter_chunks(logits):
        y = labels[:, rows]
        x = upcast(logits[:, :, rows])
        p = F.softmax(x, dim=1) if table is None else x.sigmoid()
        del x
        dice_scale, ce_scale = (s * (y != IGNORE_LABEL) for s in scales)
        inner = torch.zeros_like(p[:, 0])
        if table is None:
            for c in range(p.shape[1]):
                inner += p[:, c] * _dice_slope(y == c, c, pull, push)
        for c in range(p.shape[1]):
            is_class = y == c if table is None else table[c][y.long()]
            p_c, slope = p[:, c], _dice_slope(is_class, c, pull, push)
            g = p_c * (slope - inner) if table is None else slope * p_c * (1 - p_c)
            result[:, c, rows] = g * dice_scale + (p_c - is_class.to(p.dtype)) * ce_scale
        del p, p_c, g
    return result


@custom_op("unet3d::dice_ce_sums")
def sum_terms_cuda(logits: Tensor, labels: Tensor, table: Tensor | None) -> Tensor:
    """Run sum_terms in one kernel."""
    from unet3d.loss.kernels import cuda

    return cuda.sum_terms(logits, labels, table)


@sum_terms_cuda.register_fake
def _(logits: Tensor, labels: Tensor, table: Tensor | None) -> Tensor:
    return logits.new_empty(5, *logits.shape[:2], dtype=torch.float32)


@custom_op("unet3d::dice_ce_gradient")
def compute_gradient_cuda(
    logits: Tensor, labels: Tensor, table: Tensor | None, pull: Tensor, push: Tensor, scales: Tensor
) -> Tensor:
    """Run compute_gradient in one kernel."""
    from unet3d.loss.kernels import cuda

    return cuda.compute_gradient(logits, labels, table, pull, push, scales)


@compute_gradient_cuda.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty_like(logits)


def _has_kernels(logits: Tensor) -> bool:
    return logits.dtype in KERNEL_TYPES and runs_triton(logits, "loss")


def _iter_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the first spatial axis, each of at most CHUNK_ELEMENTS logits per volume."""
    _, k, rows, h, w = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(1, k * h * w))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _dice_slope(is_class: Tensor, c: int, pull: Tensor, push: Tensor) -> Tensor:
    """Return the derivative of the Dice part by p of class c, at every voxel of a chunk."""
    outside = push[:, c, None, None, None]
    return torch.where(is_class, outside - pull[:, c, None, None, None], outside)
