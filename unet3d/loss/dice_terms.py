"""Compute the sums behind overlap losses and cross-entropy, and their gradient.

Classes exclude each other (softmax), or regions, sets of labels, overlap (a sigmoid each, binary
cross-entropy). On CUDA either takes one kernel. Elsewhere softmax, logarithm and gradient are
computed chunk by chunk, so that one-hot labels and float32 copies of the logits never have the full
size.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.custom_ops import custom_op
from unet3d.triton_kernels import runs_triton
from unet3d.types import IGNORE_LABEL

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)

CHUNK_ELEMENTS = 2**20
"""Logits of one volume that are in float32 at once: 4 MiB for each of a few temporaries."""

TINY = 1e-30
"""Replaces a probability of 0 in front of a power or a logarithm."""


class ClassSums(NamedTuple):
    """Sums over the voxels of each volume, or of the batch; ignored voxels are left out.

    Each is (B, K) or (1, K), for K classes or regions. `overlap` sums the probability where the
    class is the label, `predicted` everywhere; `reference` counts the voxels of the class.
    `entropy` sums the cross-entropy of voxels whose label is the class, or of a region everywhere,
    and `counted` the weights of the voxels in it.
    """

    overlap: Tensor
    predicted: Tensor
    entropy: Tensor
    reference: Tensor
    counted: Tensor


def sum_classes(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None = None,
    *,
    batch: bool,
    gamma: float = 0.0,
    topk: float | None = None,
    smoothing: float = 0.0,
) -> ClassSums:
    """Sum up logits (B, K, D, H, W) by labels (B, D, H, W); backward saves only these two.

    With `gamma` the cross-entropy of a voxel whose label has probability p is that of the focal
    loss, (1 - p)^gamma as much. With `topk` only this share of the batch's voxels counts, those
    with the largest cross-entropy. With `smoothing` this much of a label's probability is spread
    evenly over all classes, or over a region and its outside; it excludes `gamma` and `topk`.
    """
    parts = _SumClasses.apply(logits, labels, table, gamma, topk, smoothing)
    if batch:
        parts = [part.sum(1, keepdim=True) for part in parts]
    return ClassSums(*parts[0].unbind(), *parts[1].unbind())


class _SumClasses(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        table: Tensor | None,
        gamma: float,
        topk: float | None,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            threshold = None if topk is None else find_threshold(logits, labels, topk)
            ctx.save_for_backward(logits, labels, table, threshold)
            ctx.gamma, ctx.smoothing = gamma, smoothing
            sums = sum_terms(logits, labels, table, gamma, smoothing, threshold)
            differentiable, counts = sums[:3], sums[3:]
            ctx.mark_non_differentiable(counts)
            ctx.set_materialize_grads(False)
            return differentiable, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, table, threshold = ctx.saved_tensors
        with torch.autocast(logits.device.type, enabled=False):
            gradient = compute_gradient(
                logits, labels, table, grad, ctx.gamma, ctx.smoothing, threshold
            )
            return gradient, None, None, None, None, None


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


def find_threshold(logits: Tensor, labels: Tensor, share: float) -> Tensor:
    """Return the cross-entropy from which on a voxel counts, and the weight of voxels that have it.

    The weights of a batch of N voxels sum up to `share` * N.
    """
    entropy = upcast(logits.new_zeros(())).new_full(labels.shape, -1.0)
    for rows in iter_chunks(logits):
        y = labels[:, rows]
        log_q = _get_log_q(F.log_softmax(upcast(logits[:, :, rows]), dim=1), y)
        entropy[:, rows] = torch.where(y == IGNORE_LABEL, -1.0, -log_q)
    count = max(1, round(share * entropy.numel()))
    value = entropy.flatten().topk(count, sorted=False).values.amin()
    ties = (count - (entropy > value).sum()) / (entropy == value).sum()
    return torch.stack([value, ties.to(value.dtype)])


def sum_terms(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None,
    gamma: float = 0.0,
    smoothing: float = 0.0,
    threshold: Tensor | None = None,
) -> Tensor:
    """Return the sums of ClassSums as (5, B, K)."""
    if threshold is None and _has_kernels(logits):
        return sum_terms_cuda(logits, labels, table, gamma, smoothing)
    b, k = logits.shape[:2]
    sums = upcast(logits.new_zeros(())).new_zeros(5, b, k)
    overlap, predicted, entropy, reference, counted = sums
    for rows in iter_chunks(logits):
        y = labels[:, rows]
        valid = y != IGNORE_LABEL
        log_p = None if table is not None else F.log_softmax(upcast(logits[:, :, rows]), dim=1)
        weight = None if log_p is None else _weigh(_get_log_q(log_p, y), gamma, threshold)
        for c in range(k):
            if log_p is not None:
                is_class, log_c = y == c, log_p[:, c]
                cross = -log_c if weight is None else -log_c * weight
                part = is_class if weight is None or threshold is None else is_class * weight
                if smoothing:
                    cross = torch.where(
                        valid, -log_c * _smooth(is_class, smoothing, k, log_c.dtype), 0
                    )
                    entropy[:, c] += cross.flatten(1).sum(1)
                else:
                    entropy[:, c] += torch.where(is_class, cross, 0).flatten(1).sum(1)
                counted[:, c] += part.flatten(1).sum(1)
                p = log_c.exp()
            else:
                assert table is not None
                x, is_class = upcast(logits[:, c, rows]), table[c][y.long()]
                p = x.sigmoid()
                cross = F.softplus(torch.where(is_class, -x, x))
                if smoothing:
                    cross = F.softplus(x) - x * _smooth(is_class, smoothing, 2, x.dtype)
                if gamma:
                    cross = cross * (-torch.expm1(-cross)) ** gamma
                entropy[:, c] += torch.where(valid, cross, 0).flatten(1).sum(1)
                counted[:, c] += valid.flatten(1).sum(1)
            reference[:, c] += is_class.flatten(1).sum(1)
            overlap[:, c] += torch.where(is_class, p, 0).flatten(1).sum(1)
            predicted[:, c] += torch.where(valid, p, 0).flatten(1).sum(1)
        del log_p, p, cross, weight
    return sums


def compute_gradient(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None,
    grad: Tensor,
    gamma: float = 0.0,
    smoothing: float = 0.0,
    threshold: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits, given that of the first three sums, (3, B, K)."""
    if threshold is None and _has_kernels(logits):
        return compute_gradient_cuda(logits, labels, table, grad, gamma, smoothing)
    k, result = logits.shape[1], torch.empty_like(logits)
    by_overlap, by_predicted, by_entropy = grad
    for rows in iter_chunks(logits):
        y = labels[:, rows]
        valid = y != IGNORE_LABEL
        x = upcast(logits[:, :, rows])
        inner: Tensor | float = 0.0
        ce_scale = torch.zeros_like(x[:, 0])
        if table is None:
            log_p = F.log_softmax(x, dim=1)
            p = log_p.exp()
            for c in range(k):
                inner = inner + p[:, c] * _slope(y == c, c, by_overlap, by_predicted)
                by_class = by_entropy[:, c, None, None, None]
                if smoothing:
                    ce_scale += by_class * _smooth(y == c, smoothing, k, p.dtype)
                else:
                    ce_scale = torch.where(y == c, by_class, ce_scale)
            if gamma or threshold is not None:
                ce_scale *= _weigh_slope(_get_log_q(log_p, y), gamma, threshold)
            del log_p
        else:
            p = x.sigmoid()
        for c in range(k):
            is_class = y == c if table is None else table[c][y.long()]
            p_c, slope = p[:, c], _slope(is_class, c, by_overlap, by_predicted)
            if table is not None:
                inner = slope * p_c
                ce_scale = by_entropy[:, c, None, None, None].expand_as(p_c)
                if gamma:
                    log_q = F.logsigmoid(torch.where(is_class, x[:, c], -x[:, c]))
                    ce_scale = ce_scale * _weigh_slope(log_q, gamma, None)
            if smoothing and table is None:
                by_class = by_entropy[:, c, None, None, None]
                target = _smooth(is_class, smoothing, k, p.dtype)
                entropy = p_c * ce_scale - by_class * target
            else:
                target = _smooth(is_class, smoothing, 2, p.dtype)
                entropy = (p_c - target) * ce_scale
            g = p_c * (slope - inner) + entropy
            result[:, c, rows] = torch.where(valid, g, 0)
        del x, p, p_c, g, inner, slope, ce_scale, entropy
    return result


@custom_op("unet3d::dice_ce_sums")
def sum_terms_cuda(
    logits: Tensor, labels: Tensor, table: Tensor | None, gamma: float, smoothing: float
) -> Tensor:
    """Run sum_terms in one kernel."""
    from unet3d.loss.kernels import cuda

    return cuda.sum_terms(logits, labels, table, gamma, smoothing)


@sum_terms_cuda.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return logits.new_empty(5, *logits.shape[:2], dtype=torch.float32)


@custom_op("unet3d::dice_ce_gradient")
def compute_gradient_cuda(
    logits: Tensor,
    labels: Tensor,
    table: Tensor | None,
    grad: Tensor,
    gamma: float,
    smoothing: float,
) -> Tensor:
    """Run compute_gradient in one kernel."""
    from unet3d.loss.kernels import cuda

    return cuda.compute_gradient(logits, labels, table, grad, gamma, smoothing)


@compute_gradient_cuda.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty_like(logits)


def _has_kernels(logits: Tensor) -> bool:
    return logits.dtype in KERNEL_TYPES and runs_triton(logits, "loss")


def iter_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the first spatial axis, each of at most CHUNK_ELEMENTS logits per volume."""
    _, k, rows, h, w = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(1, k * h * w))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _get_log_q(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of the label's probability (B, D, H, W); any where it is ignored."""
    index = labels.clamp(max=log_p.shape[1] - 1).long()[:, None]
    return log_p.gather(1, index)[:, 0]


def _weigh(log_q: Tensor, gamma: float, threshold: Tensor | None) -> Tensor | None:
    """Return how much each voxel's cross-entropy counts; None: all the same."""
    if threshold is not None:
        lowest, ties = threshold
        return torch.where(-log_q == lowest, ties, (-log_q > lowest).to(log_q.dtype))
    return (-torch.expm1(log_q)) ** gamma if gamma else None


def _weigh_slope(log_q: Tensor, gamma: float, threshold: Tensor | None) -> Tensor:
    """Return how much steeper each voxel's term is than its cross-entropy."""
    if threshold is not None:
        weight = _weigh(log_q, gamma, threshold)
        assert weight is not None
        return weight
    q, rest = log_q.exp(), (-torch.expm1(log_q)).clamp(min=TINY)
    return rest ** (gamma - 1) * (rest - gamma * q * log_q)


def _smooth(is_class: Tensor, smoothing: float, classes: int, dtype: torch.dtype) -> Tensor:
    """Return the probability of a class that its label stands for."""
    truth = is_class.to(dtype)
    return truth * (1 - smoothing) + smoothing / classes if smoothing else truth


def _slope(is_class: Tensor, c: int, by_overlap: Tensor, by_predicted: Tensor) -> Tensor:
    """Return the derivative by the probability of class c, at every voxel of a chunk."""
    outside = by_predicted[:, c, None, None, None]
    return torch.where(is_class, outside + by_overlap[:, c, None, None, None], outside)
