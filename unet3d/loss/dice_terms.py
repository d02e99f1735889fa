"""Compute the sums behind overlap losses and cross-entropy, and their gradient.

Classes exclude each other (softmax), or regions, sets of labels, overlap (a sigmoid each, binary
cross-entropy). On CUDA either takes one kernel, on a CPU softmax with the plain cross-entropy one
pass. Elsewhere softmax, logarithm and gradient are computed chunk by chunk, so that one-hot labels
and float32 copies of the logits never have the full size.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.custom_ops import custom_op, get_device_type, upcast
from unet3d.lazy_logits import LazyLogits
from unet3d.loss.deep_supervision import Level, Logits
from unet3d.loss.kernels import cpu, cuda, make_dense
from unet3d.triton_kernels import KERNEL_TYPES, runs_triton
from unet3d.types import get_ignore_label

CHUNK_ELEMENTS = 2**18
"""Logits of one volume that are in float32 at once: 1 MiB for each of a few temporaries."""

SPACE = (2, 3, 4)

TINY = 1e-30
"""Replaces a probability of 0 in front of a power or a logarithm."""


class ClassSums(NamedTuple):
    """Sums over the voxels of each volume, or of the batch; ignored voxels are left out.

    Each is (L, B, K) or (L, 1, K), for L levels and K classes or regions. `overlap` sums the
    probability where the class is the label, `predicted` everywhere; `reference` counts the voxels
    of the class. `cross_entropy` sums that of voxels whose label is the class, or of a region
    everywhere, and `counted` the weights of the voxels in it.
    """

    overlap: Tensor
    predicted: Tensor
    cross_entropy: Tensor
    reference: Tensor
    counted: Tensor


class CrossEntropyOptions(NamedTuple):
    """Weights of voxels in the cross-entropy; p is the predicted probability of a voxel's label."""

    gamma: float = 0.0
    """Exponent of the focal loss: a voxel has the weight (1 - p)^gamma."""
    topk: float | None = None
    """Fraction of the batch's voxels that are not ignored: those with the largest cross-entropy."""
    smoothing: float = 0.0
    """Probability that is taken from the label and spread evenly over all classes, or over a region
    and its outside; cannot be combined with the others."""


PLAIN_CROSS_ENTROPY = CrossEntropyOptions()


class TermOptions(NamedTuple):
    """What the terms of voxels depend on besides logits and labels."""

    table: Tensor | None = None
    """Result of make_region_table; None for classes."""
    kind: CrossEntropyOptions = PLAIN_CROSS_ENTROPY
    threshold: Tensor | None = None
    """Result of find_threshold, with `kind.topk`."""


def sum_classes(
    levels: Sequence[Level],
    table: Tensor | None = None,
    *,
    batch: bool,
    kind: CrossEntropyOptions = PLAIN_CROSS_ENTROPY,
) -> ClassSums:
    """Sum up the logits of each level by its labels; backward saves only these two.

    The sums of all levels are one tensor, so that a formula launches its operations once.
    """
    parts = zip(*(_sum_level(*level, table, kind) for level in levels), strict=True)
    stacked = [torch.stack(part, 1) for part in parts]  # (3 or 2, L, B, K)
    if batch:
        stacked = [part.sum(2, keepdim=True) for part in stacked]
    return ClassSums(*stacked[0].unbind(), *stacked[1].unbind())


def _sum_level(
    logits: Logits, labels: Tensor, table: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    if isinstance(logits, LazyLogits):
        return _SumClasses.apply(logits.edge, logits, labels, table, *options)
    return _SumClasses.apply(logits, None, labels, table, *options)


class _SumClasses(Function):
    """Sum up logits, or lazy ones, whose edge is then in their place."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        lazy: LazyLogits | None,
        labels: Tensor,
        table: Tensor | None,
        kind: CrossEntropyOptions,
    ) -> tuple[Tensor, Tensor]:
        def iter_tiles() -> Iterator[tuple[Tensor, Tensor]]:
            if lazy is None:
                return iter([(logits, labels)])
            return ((x, rows.of(labels)) for rows, x in lazy.tiles())

        with torch.autocast(logits.device.type, enabled=False):
            threshold = None if kind.topk is None else find_threshold(iter_tiles(), kind.topk)
            ctx.save_for_backward(logits if lazy is None else None, labels, table, threshold)
            ctx.kind, ctx.lazy = kind, lazy
            options = TermOptions(table, kind, threshold)
            sums = reduce(Tensor.add_, (sum_terms(*tile, options) for tile in iter_tiles()))
            differentiable, counts = sums[:3], sums[3:]
            ctx.mark_non_differentiable(counts)
            ctx.set_materialize_grads(False)
            return differentiable, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing depends on the sums
            return (None,) * 5
        logits, labels, table, threshold = ctx.saved_tensors
        options = TermOptions(table, ctx.kind, threshold)
        lazy, ctx.lazy = ctx.lazy, None  # which holds the network's last map
        if lazy is not None:
            lazy.add_gradient(lambda rows, x: compute_gradient(x, rows.of(labels), grad, options))
            return (None,) * 5
        with torch.autocast(labels.device.type, enabled=False):
            gradient = (
                None
                if logits is None  # a second backward, which the network refuses
                else compute_gradient(logits, labels, grad, options)
            )
            return gradient, None, None, None, None


def make_region_table(regions: Iterable[int | Sequence[int]]) -> Tensor:
    """Build an (R, 256) bool table: whether a label belongs to a region."""
    sets = [[region] if isinstance(region, int) else list(region) for region in regions]
    table = torch.zeros(len(sets), 256, dtype=torch.bool)
    for row, labels in zip(table, sets, strict=True):
        row[torch.tensor(labels)] = True
    return table


def find_threshold(tiles: Iterable[tuple[Tensor, Tensor]], share: float) -> Tensor:
    """Return the cross-entropy from which on a voxel counts, and the weight of voxels that have it.

    The weights of N voxels that are not ignored sum up to `share` * N. `tiles` are logits and
    labels.
    """
    parts = []
    for logits, labels in tiles:
        part = upcast(logits.new_zeros(())).new_full(labels.shape, -1.0)
        for rows in iter_chunks(logits):
            x, is_class, valid = _get_chunk(logits, labels, None, rows)
            log_q = _get_log_q(F.log_softmax(x, dim=1), is_class)
            part[:, rows] = torch.where(valid, -log_q, -1.0)[:, 0]
        parts.append(part.flatten())
    entropy = parts[0] if len(parts) == 1 else torch.cat(parts)
    largest = entropy.topk(max(1, round(share * entropy.numel()))).values
    counted = (entropy != -1).sum()  # on the GPU, which nothing has to wait for
    count = (share * counted).round().long().clamp(1, len(largest))
    value = largest.gather(0, count.view(1) - 1)[0]
    ties = (count - (entropy > value).sum()) / (entropy == value).sum()
    return torch.stack([value, ties.to(value.dtype)])


def sum_terms(logits: Tensor, labels: Tensor, options: TermOptions) -> Tensor:
    """Return the sums of ClassSums as (5, B, K)."""
    table, kind, _ = options
    if _has_kernels(logits, labels, options):
        return _sum_by_kernel(make_dense(logits), labels, table, kind.gamma, kind.smoothing)
    return _sum_in_chunks(logits, labels, options)


@custom_op("unet3d::dice_ce_sums")
def _sum_by_kernel(
    logits: Tensor, labels: Tensor, table: Tensor | None, gamma: float, smoothing: float
) -> Tensor:
    if get_device_type(logits) == "cuda":
        return cuda.sum_terms(logits, labels, table, gamma, smoothing)
    if cpu.kernels.supports(logits):
        return cpu.sum_terms(logits, labels)
    return _sum_in_chunks(logits, labels, TermOptions())


@_sum_by_kernel.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty(5, *logits.shape[:2], dtype=torch.float32, device=logits.device)


def _sum_in_chunks(logits: Tensor, labels: Tensor, options: TermOptions) -> Tensor:
    table, kind, threshold = options
    sums = upcast(logits.new_zeros(())).new_zeros(5, *logits.shape[:2])
    for rows in iter_chunks(logits):
        x, is_class, valid = _get_chunk(logits, labels, table, rows)
        counted = is_class
        if table is None:
            log_p = F.log_softmax(x, dim=1)
            p = log_p.exp()
            cross = torch.where(is_class, -log_p, 0)
            if kind.smoothing:
                target = _smooth(is_class, kind.smoothing, logits.shape[1], p.dtype)
                cross = torch.where(valid, -log_p * target, 0)
            if kind.gamma or threshold is not None:
                weight = _weigh(-cross.sum(1, keepdim=True), kind.gamma, threshold)
                cross = cross * weight
                counted = is_class * weight if threshold is not None else is_class
        else:
            p, away = x.sigmoid(), torch.where(is_class, -x, x)
            cross = F.softplus(away) - kind.smoothing / 2 * away
            if kind.gamma:
                cross = cross * _weigh(-cross, kind.gamma, None)
            cross, counted = torch.where(valid, cross, 0), valid
        overlap, predicted = torch.where(is_class, p, 0), torch.where(valid, p, 0)
        for total, term in zip(sums, (overlap, predicted, cross, is_class, counted), strict=True):
            total += term.sum(SPACE, dtype=total.dtype)
    return sums


def compute_gradient(logits: Tensor, labels: Tensor, grad: Tensor, options: TermOptions) -> Tensor:
    """Return the gradient of the logits, given that of the first three sums, (3, B, K)."""
    table, kind, _ = options
    if _has_kernels(logits, labels, options):
        given, numbers = (make_dense(logits), labels, table), (kind.gamma, kind.smoothing)
        return _differentiate_by_kernel(*given, grad.contiguous(), *numbers)
    return _compute_gradient_in_chunks(logits, labels, grad, options)


@custom_op("unet3d::dice_ce_gradient")
def _differentiate_by_kernel(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None,
    grad: Tensor,
    gamma: float,
    smoothing: float,
) -> Tensor:
    if get_device_type(logits) == "cuda":
        return cuda.compute_gradient(logits, labels, table, grad, gamma, smoothing)
    if cpu.kernels.supports(logits):
        return cpu.compute_gradient(logits, labels, grad)
    return _compute_gradient_in_chunks(logits, labels, grad, TermOptions())


@_differentiate_by_kernel.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty_like(logits)


def _compute_gradient_in_chunks(
    logits: Tensor, labels: Tensor, grad: Tensor, options: TermOptions
) -> Tensor:
    table, kind, threshold = options
    result = torch.empty_like(logits)
    by_overlap, by_predicted, by_entropy = grad[..., None, None, None]
    for rows in iter_chunks(logits):
        x, is_class, valid = _get_chunk(logits, labels, table, rows)
        slope = torch.where(is_class, by_predicted + by_overlap, by_predicted)
        log_p = F.log_softmax(x, dim=1) if table is None else None
        if log_p is not None:
            p = log_p.exp()
            mean_slope = (p * slope).sum(1, keepdim=True)
            pull = by_entropy * _smooth(is_class, kind.smoothing, logits.shape[1], p.dtype)
            scale = pull.sum(1, keepdim=True)
        else:
            p = x.sigmoid()
            mean_slope = p * slope
            pull = by_entropy * _smooth(is_class, kind.smoothing, 2, p.dtype)
            scale = by_entropy
        if kind.gamma or threshold is not None:
            if log_p is not None:
                log_q = _get_log_q(log_p, is_class)
            else:
                log_q = -F.softplus(torch.where(is_class, -x, x))
            steepness = _weigh_slope(log_q, kind.gamma, threshold)
            pull, scale = pull * steepness, scale * steepness
        g = p * (slope - mean_slope) + (p * scale - pull)
        result[:, :, rows] = torch.where(valid, g, 0)
    return result


def _has_kernels(logits: Tensor, labels: Tensor, options: TermOptions) -> bool:
    """Return whether kernels take these tensors; those of a CPU, only plain cross-entropy."""
    if get_device_type(logits) == "cuda":
        return options.kind.topk is None and runs_triton(logits, "loss")
    is_plain = options.table is None and options.kind == PLAIN_CROSS_ENTROPY
    is_plain &= labels.dtype in (torch.uint8, torch.int16)
    return is_plain and logits.dtype in KERNEL_TYPES and get_device_type(logits) == "cpu"


def iter_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the first spatial axis, each of at most CHUNK_ELEMENTS logits per volume."""
    _, k, rows, h, w = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(1, k * h * w))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _get_chunk(
    logits: Tensor, labels: Tensor, table: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits and whether a class is the label (B, K, ...), and which voxels count."""
    x, y = upcast(logits[:, :, rows]), labels[:, rows]
    if table is None:
        classes = torch.arange(x.shape[1], dtype=y.dtype, device=y.device)
        is_class = y[:, None] == classes[:, None, None, None]
    else:
        is_class = table[:, y.long()].movedim(0, 1)
    return x, is_class, (y != get_ignore_label(y))[:, None]


def _get_log_q(log_p: Tensor, is_class: Tensor) -> Tensor:
    """Return the logarithm of the label's probability (B, 1, ...); 0 where it is ignored."""
    return torch.where(is_class, log_p, 0).sum(1, keepdim=True)


def _weigh(log_q: Tensor, gamma: float, threshold: Tensor | None) -> Tensor:
    """Return how much the cross-entropy of voxels counts."""
    if threshold is None:
        return (-torch.expm1(log_q)) ** gamma
    lowest, ties = threshold
    return torch.where(-log_q == lowest, ties, (-log_q > lowest).to(log_q.dtype))


def _weigh_slope(log_q: Tensor, gamma: float, threshold: Tensor | None) -> Tensor:
    """Return how much steeper the terms of voxels are than their cross-entropy."""
    if threshold is not None:
        return _weigh(log_q, gamma, threshold)
    q, rest = log_q.exp(), (-torch.expm1(log_q)).clamp(min=TINY)
    return rest ** (gamma - 1) * (rest - gamma * q * log_q)


def _smooth(is_class: Tensor, smoothing: float, classes: int, dtype: torch.dtype) -> Tensor:
    """Return the probability of a class that its label stands for."""
    truth = is_class.to(dtype)
    return truth * (1 - smoothing) + smoothing / classes if smoothing else truth
