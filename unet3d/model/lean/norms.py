"""Batch (of one rank or all), instance and group norm as one algebra, from sums over slabs.

Each is a scale and a shift per volume and channel, from the mean and the variance of a set of
values: those of a channel in the whole batch, of a channel in one volume, of a group of channels in
one volume. The gradient is as simple: with m = g * act'(n), and x the normalised value,

    dy = scale * m - inv * (mean(gamma * m) + x * mean(gamma * m * x))

where the means are over the same sets. So two sums per volume and channel are all that it needs.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.model.lean.ops import norm_ops


class Moments:
    """Mean and squared deviations per volume and channel, exact, of a map seen in slabs."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.found: list[Tensor] = []  # (2, B, C) of each slab

    def add(self, rows: Tensor) -> None:
        """See some rows more."""
        self.counts.append(prod(rows.shape[2:]))
        self.found.append(norm_ops.moments(rows))

    @cached_property
    def count(self) -> int:
        """Values per volume and channel."""
        return sum(self.counts)

    @cached_property
    def total(self) -> Tensor:
        """(2, B, C): mean, and squared deviations from it, without a difference of large sums."""
        if len(self.found) == 1:
            return self.found[0]
        means, squares = torch.stack(self.found, dim=1)
        counts = means.new_tensor(self.counts)[:, None, None]
        mean = (means * counts).sum(0) / self.count
        apart = (means - mean).square_() * counts
        return torch.stack([mean, squares.sum(0) + apart.sum(0)])


@dataclass(frozen=True)
class FoldedNorm:
    """A norm with its activation, once the statistics are known; all tensors are (B, C)."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    inverse: Tensor  # 1 / standard deviation
    slope: float  # of the activation below zero
    stat_groups: (
        "StatGroups | None"  # whose statistics they are; None: they do not depend on the input
    )
    moments: Moments | None

    def gradient(self, sums: Tensor) -> "Gradient":
        """From the sums of m and of m * x over a map."""
        a, b = sums
        gamma_a, gamma_b = (a * self.scale / self.inverse, b * self.scale / self.inverse)
        constant = linear = torch.zeros_like(self.scale)
        bias = self.scale * a
        if self.stat_groups is not None and self.moments is not None:
            n = self.moments.count
            p = self.inverse * self.stat_groups.mean(gamma_a) / n
            q = self.inverse * self.stat_groups.mean(gamma_b) / n
            linear = -q * self.inverse
            constant = -p - linear * self.mean
            bias = bias + n * (constant + linear * self.moments.total[0])
        return Gradient(
            self.scale, constant, linear, weight=b.sum(0), shift=a.sum(0), bias=bias.sum(0)
        )


@dataclass(frozen=True)
class Gradient:
    """dy = scale * m + constant + linear * y, and the gradients of what is learned."""

    scale: Tensor  # (B, C)
    constant: Tensor
    linear: Tensor
    weight: Tensor  # (C): of the norm's weight
    shift: Tensor  # of its bias
    bias: Tensor  # of the convolution's


@dataclass(frozen=True)
class StatGroups:
    """Values that share their statistics: `groups` of channels, in a volume or in the batch."""

    groups: int
    batch: bool
    ranks: int = 1  # whose batches are one, all as large

    def mean(self, x: Tensor) -> Tensor:
        """(B, C) -> (B, C): the mean over each one's set."""
        b, c = x.shape
        dims = (0, 2) if self.batch else (2,)
        grouped = x.view(b, self.groups, c // self.groups)
        mean = grouped.mean(dims, keepdim=True)
        if self.ranks > 1:
            torch.distributed.all_reduce(mean.div_(self.ranks))
        return mean.expand_as(grouped).reshape(b, c).contiguous()


def make_stat_groups(norm: nn.Module, channels: int) -> StatGroups | None:
    """Whose statistics a norm takes from its input; None: it takes none."""
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) in (nn.BatchNorm3d, nn.SyncBatchNorm):
        fixed = norm.running_mean is not None and not norm.training
        together = norm.training and isinstance(norm, nn.SyncBatchNorm)
        ranks = torch.distributed.get_world_size() if together else 1
        return None if fixed else StatGroups(channels, batch=True, ranks=ranks)
    if type(norm) is nn.InstanceNorm3d and norm.running_mean is None:
        return StatGroups(channels, batch=False)
    if type(norm) is nn.GroupNorm:
        return StatGroups(norm.num_groups, batch=False)
    raise UsageError(f"lean blocks know batch, instance and group norm, got {norm}")


def fold_norm(
    norm: Any, activation: nn.Module, moments: Moments | None, like: Tensor
) -> FoldedNorm:
    """The norm of a map with these moments; `like` is (B, C) in the type of sums."""
    slope = float(getattr(activation, "negative_slope", 0.0))
    if isinstance(norm, nn.Identity):
        one, zero = torch.ones_like(like), torch.zeros_like(like)
        return FoldedNorm(one, zero, zero, one, slope, None, None)
    sets = make_stat_groups(norm, like.shape[1])
    if sets is None:
        mean, variance = (
            t.to(like.dtype).expand_as(like).contiguous()
            for t in (norm.running_mean, norm.running_var)
        )
    else:
        assert moments is not None
        means, squares = moments.total
        mean = sets.mean(means)
        variance = sets.mean(squares / moments.count + (means - mean).square())
        if isinstance(norm, nn.BatchNorm3d | nn.SyncBatchNorm):
            _remember(norm, mean[0], variance[0], len(like) * moments.count * sets.ranks)
    inverse = torch.rsqrt(variance + norm.eps)
    weight, bias = (1.0, 0.0) if norm.weight is None else (norm.weight.detach(), norm.bias.detach())
    scale = inverse * weight
    return FoldedNorm(scale, bias - mean * scale, mean, inverse, slope, sets, moments)


@torch.no_grad()
def _remember(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """The running statistics, as nn.BatchNorm3d moves them."""
    if norm.running_mean is None or not norm.training:
        return
    norm.num_batches_tracked.add_(1)
    share = 1.0 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
    unbiased = variance * (count / (count - 1))
    for running, now in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        running.mul_(1 - share).add_(now.to(running.dtype) * share)
