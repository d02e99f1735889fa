"""Compute batch (also synchronized), instance and group norm from sums over tiles.

Each norm is a scale and a shift per volume and channel, from the mean and variance of a group of
values: a channel of the whole batch, a channel of one volume, or several channels of one volume.
With m = g * act'(n) and x the normalized value, the gradient is

    dy = scale * m - inv * (mean(gamma * m) + x * mean(gamma * m * x))

with means over the same groups, so backward needs two sums per volume and channel.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.model.fused.ops import norm_ops


class Moments:
    """Exact mean and squared deviations per volume and channel of a map that is read in tiles."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.parts: list[Tensor] = []  # (2, B, C) per tile

    def add(self, rows: Tensor) -> None:
        """Add the rows of a tile."""
        self.counts.append(prod(rows.shape[2:]))
        self.parts.append(norm_ops.moments(rows))

    @cached_property
    def count(self) -> int:
        """Return the number of values per volume and channel."""
        return sum(self.counts)

    @cached_property
    def total(self) -> Tensor:
        """Return (2, B, C): the mean, and the sum of squared deviations, without cancellation."""
        if len(self.parts) == 1:
            return self.parts[0]
        means, squares = torch.stack(self.parts, dim=1)
        counts = means.new_tensor(self.counts)[:, None, None]
        mean = (means * counts).sum(0) / self.count
        between = (means - mean).square_() * counts
        return torch.stack([mean, squares.sum(0) + between.sum(0)])


@dataclass(frozen=True)
class FoldedNorm:
    """A norm with its activation and known statistics; all tensors are (B, C)."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    inverse: Tensor  # 1 / standard deviation
    slope: float  # negative slope of the activation
    stat_groups: "StatGroups | None"  # None: the statistics do not depend on the input
    moments: Moments | None

    def gradient(self, sums: Tensor) -> "NormGradient":
        """Return the gradient, given the sums (2, B, C) of m and of m * x over a map."""
        a, b = sums
        gamma_a, gamma_b = (s * self.scale / self.inverse for s in (a, b))
        constant = linear = torch.zeros_like(self.scale)
        bias = self.scale * a
        if self.stat_groups is not None and self.moments is not None:
            n = self.moments.count
            p = self.inverse * self.stat_groups.mean(gamma_a) / n
            q = self.inverse * self.stat_groups.mean(gamma_b) / n
            linear = -q * self.inverse
            constant = -p - linear * self.mean
            bias = bias + n * (constant + linear * self.moments.total[0])
        return NormGradient(
            self.scale, constant, linear, weight=b.sum(0), shift=a.sum(0), bias=bias.sum(0)
        )


@dataclass(frozen=True)
class NormGradient:
    """The gradient of a norm's input, dy = scale * m + constant + linear * y, and of parameters."""

    scale: Tensor  # (B, C)
    constant: Tensor
    linear: Tensor
    weight: Tensor  # (C): gradient of the norm's weight
    shift: Tensor  # gradient of the norm's bias
    bias: Tensor  # gradient of the convolution's bias


@dataclass(frozen=True)
class StatGroups:
    """Which values share statistics: `groups` of channels, per volume or over the batch."""

    groups: int
    over_batch: bool
    world_size: int = 1  # ranks that share statistics; their batches have one size

    def mean(self, x: Tensor) -> Tensor:
        """(B, C) -> (B, C): replace each value by the mean of its group."""
        b, c = x.shape
        dims = (0, 2) if self.over_batch else (2,)
        grouped = x.view(b, self.groups, c // self.groups)
        mean = grouped.mean(dims, keepdim=True)
        if self.world_size > 1:
            torch.distributed.all_reduce(mean.div_(self.world_size))
        return mean.expand_as(grouped).reshape(b, c).contiguous()


def make_stat_groups(norm: nn.Module, channels: int) -> StatGroups | None:
    """Return the groups over which a norm computes statistics; None: it does not compute any."""
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) in (nn.BatchNorm3d, nn.SyncBatchNorm):
        fixed = norm.running_mean is not None and not norm.training
        synchronized = norm.training and isinstance(norm, nn.SyncBatchNorm)
        world_size = torch.distributed.get_world_size() if synchronized else 1
        return None if fixed else StatGroups(channels, over_batch=True, world_size=world_size)
    if type(norm) is nn.InstanceNorm3d and norm.running_mean is None:
        return StatGroups(channels, over_batch=False)
    if type(norm) is nn.GroupNorm:
        return StatGroups(norm.num_groups, over_batch=False)
    raise UsageError(
        f"fused blocks support batch, instance and group norm, got {norm}: use checkpointing=none"
    )


def fold_norm(
    norm: Any, activation: nn.Module, moments: Moments | None, like: Tensor
) -> FoldedNorm:
    """Fold the norm of a map with these moments; `like` is (B, C) in the dtype of sums."""
    slope = float(getattr(activation, "negative_slope", 0.0))
    if isinstance(norm, nn.Identity):
        one, zero = torch.ones_like(like), torch.zeros_like(like)
        return FoldedNorm(one, zero, zero, one, slope, None, None)
    groups = make_stat_groups(norm, like.shape[1])
    if groups is None:
        mean, variance = (
            t.to(like.dtype).expand_as(like).contiguous()
            for t in (norm.running_mean, norm.running_var)
        )
    else:
        assert moments is not None
        means, squares = moments.total
        mean = groups.mean(means)
        variance = groups.mean(squares / moments.count + (means - mean).square())
        if isinstance(norm, nn.BatchNorm3d | nn.SyncBatchNorm):
            _update_running_stats(
                norm, mean[0], variance[0], len(like) * moments.count * groups.world_size
            )
    inverse = torch.rsqrt(variance + norm.eps)
    weight, bias = (1.0, 0.0) if norm.weight is None else (norm.weight.detach(), norm.bias.detach())
    scale = inverse * weight
    return FoldedNorm(scale, bias - mean * scale, mean, inverse, slope, groups, moments)


@torch.no_grad()
def _update_running_stats(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics as nn.BatchNorm3d does."""
    if norm.running_mean is None or not norm.training:
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1.0 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
    unbiased = variance * (count / (count - 1))
    for running, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        running.mul_(1 - momentum).add_(new.to(running.dtype) * momentum)
