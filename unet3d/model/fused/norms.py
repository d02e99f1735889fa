"""Compute batch (also synchronized), instance and group norm from sums over tiles.

Each norm is a scale and a shift per volume and channel, from the mean and variance of a group of
values: a channel of the whole batch, a channel of one volume, or several channels of one volume.
With m = g * act'(n) and x the normalized value, the gradient is

    dy = scale * m - inv * (mean(gamma * m) + x * mean(gamma * m * x))

with means over the same groups, so backward needs two sums per volume and channel.

y is the output of a convolution without its bias: a norm that computes statistics subtracts the
bias again, and any other one adds it to its shift.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.model.fused import operators
from unet3d.model.fused.kernels import cuda
from unet3d.model.fused.tiling import MapLayout
from unet3d.triton_kernels import runs_triton


class Moments:
    """Mean and squared deviations per volume and channel of a map that is read in tiles.

    A tile of `unmerged` voxels is the whole map, whose sums on a GPU stay those of each program:
    the kernels that fold them merge them, too, which saves a launch.
    """

    def __init__(self, unmerged: int = 0) -> None:
        self.unmerged = unmerged
        self.count = 0  # values per volume and channel
        self.total = torch.empty(0)  # (P, 2, B, C): the mean, and the sum of squared deviations

    def add(self, rows: Tensor) -> None:
        """Add the rows of a tile."""
        if not self.count:
            self.total = self.make_sums(rows)
        operators.add_moments(rows, self.count, self.total)
        self.count += prod(rows.shape[2:])

    def make_sums(self, rows: Tensor) -> Tensor:
        """Allocate sums over rows, (P, 2, B, C); P is 1 where those of programs are merged."""
        return operators.make_sums(rows, merged=prod(rows.shape[2:]) != self.unmerged)


@dataclass(frozen=True)
class FoldedNorm:
    """A norm with its activation and known statistics; all tensors are (B, C)."""

    scale: Tensor
    shift: Tensor
    mean: Tensor  # of y, so without the convolution's bias
    rstd: Tensor  # 1 / standard deviation
    slope: float  # negative slope of the activation
    stat_groups: "StatGroups | None"  # None: the statistics do not depend on the input
    moments: Moments | None

    def add_gradient_sums(self, g: Tensor, y: Tensor, sums: Tensor | None) -> Tensor:
        """Add what `gradient` needs of some rows, (P, 2, B, C), to `sums`, if any.

        `y` are raw rows, `g` the gradient of their activation.
        """
        first, numbers = sums is None, (self.scale, self.shift, self.mean, self.rstd)
        if sums is None:
            make_sums = operators.make_sums if self.moments is None else self.moments.make_sums
            sums = make_sums(y)
        operators.add_norm_gradient_sums(g, y, *numbers, self.slope, first, sums)
        return sums

    def gradient(self, sums: Tensor) -> "NormGradient":
        """Return the gradient, given the sums (P, 2, B, C) of m and of m * x over a map."""
        if self.stat_groups is None or self.moments is None:
            (sums,) = sums
            (shift, weight), zero = sums.sum(1), torch.zeros_like(self.scale)
            bias = (self.scale * sums[0]).sum(0)
            return NormGradient(self, self.scale, zero, zero, weight=weight, shift=shift, bias=bias)
        groups, count = self.stat_groups, self.moments.count
        if groups.world_size == 1 and runs_triton(sums, "fused-block"):
            (constant, linear), (shift, weight, bias) = cuda.fold_gradient(
                *(sums, self.scale, self.mean, self.rstd, self.moments.total),
                *(count, groups.groups, groups.over_batch),
            )
        else:
            (sums,), (total,) = sums, self.moments.total
            p, q = (groups.mean_sums(s * self.scale / self.rstd, count) * self.rstd for s in sums)
            linear = q * self.rstd / -count
            constant = p / -count - linear * self.mean
            linear, (shift, weight) = linear.expand_as(constant).contiguous(), sums.sum(1)
            bias = torch.zeros_like(shift)  # a norm of each channel subtracts it again
            if groups.groups < sums.shape[2]:
                change = constant + linear * total[0]
                bias = (self.scale * sums[0] + count * change).sum(0)
        return NormGradient(
            self, self.scale, constant, linear, weight=weight, shift=shift, bias=bias
        )


@dataclass(frozen=True)
class NormGradient:
    """The gradient of a norm's input, dy = scale * m + constant + linear * y, and of parameters."""

    norm: FoldedNorm
    scale: Tensor  # (B, C)
    constant: Tensor
    linear: Tensor
    weight: Tensor  # (C): gradient of the norm's weight
    shift: Tensor  # gradient of the norm's bias
    bias: Tensor  # gradient of the convolution's bias

    def apply(self, g: Tensor, y: Tensor, *, out: Tensor) -> None:
        """Write the gradient of raw rows `y` to `out`, which may be `g` or `y`.

        `g` is that of their activation.
        """
        shift, slope = self.norm.shift, self.norm.slope
        operators.norm_gradient(g, y, self.scale, shift, self.constant, self.linear, slope, out)


@dataclass
class StatGroups:
    """Which values share statistics: `groups` of channels, per volume or over the batch."""

    groups: int
    over_batch: bool
    world_size: int = 1  # ranks that share statistics
    process_group: Any = None  # of these ranks; None: all
    total: Tensor | None = None  # values per channel on all of them

    def mean(self, x: Tensor, count: int) -> Tensor:
        """(B, C) -> (B, C), or (1, C) over the batch: the mean of each value's group.

        The numbers are means over `count` voxels: ranks weigh by how many they have.
        """
        if self.world_size > 1:
            if self.total is None:
                self.total = x.new_full((), len(x) * count)
                torch.distributed.all_reduce(self.total, group=self.process_group)
            mean = x.sum(0, keepdim=True) * count / self.total
            torch.distributed.all_reduce(mean, group=self.process_group)
            return mean
        if self.over_batch:  # a group is one channel
            return x.mean(0, keepdim=True)
        b, c = x.shape
        if self.groups == c:
            return x
        grouped = x.view(b, self.groups, c // self.groups)
        return grouped.mean(2, keepdim=True).expand_as(grouped).reshape(b, c)

    def mean_sums(self, x: Tensor, count: int) -> Tensor:
        """Return `count` times the mean of each group, given sums over `count` voxels."""
        return self.mean(x / count, count) * count if self.world_size > 1 else self.mean(x, count)


def make_stat_groups(norm: nn.Module, channels: int) -> StatGroups | None:
    """Return the groups over which a norm computes statistics; None: it does not compute any."""
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) in (nn.BatchNorm3d, nn.SyncBatchNorm):
        fixed = norm.running_mean is not None and not norm.training
        if fixed:
            return None
        world_size, process_group = 1, getattr(norm, "process_group", None)
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if has_ranks and norm.training and isinstance(norm, nn.SyncBatchNorm):
            world_size = torch.distributed.get_world_size(process_group)
        return StatGroups(
            channels, over_batch=True, world_size=world_size, process_group=process_group
        )
    if isinstance(norm, nn.InstanceNorm3d):
        return StatGroups(channels, over_batch=False)
    assert isinstance(norm, nn.GroupNorm)  # support.py refuses any other norm
    return StatGroups(norm.num_groups, over_batch=False)


def make_moments(norm: nn.Module, groups: StatGroups | None, layout: MapLayout) -> Moments | None:
    """Return what collects the moments of a norm's input; None if it needs none."""
    if groups is None:
        return None
    is_folded = groups.world_size == 1 and getattr(norm, "momentum", 0.0) is not None
    merges = is_folded and layout.is_whole and not isinstance(norm, nn.GroupNorm)
    return Moments(prod(layout.size) if merges else 0)


def get_negative_slope(activation: nn.Module) -> float:
    """Return the slope of an activation below zero."""
    if isinstance(activation, nn.Identity):
        return 1.0
    return activation.negative_slope if isinstance(activation, nn.LeakyReLU) else 0.0


def fold_norm(
    norm: Any,
    activation: nn.Module,
    bias: Tensor | None,
    groups: StatGroups | None,
    moments: Moments | None,
    like: Tensor,
) -> FoldedNorm:
    """Fold the norm of a convolution's output, which is to be understood as `y + bias`.

    `moments` are those of y, over the norm's `groups`; `like` is (B, C) in the dtype of sums.
    """
    slope = get_negative_slope(activation)
    bias = None if bias is None else bias.detach().to(like.dtype)
    if isinstance(norm, nn.Identity):
        one, zero = torch.ones_like(like), torch.zeros_like(like)
        shift = zero if bias is None else bias.expand_as(like).contiguous()
        return FoldedNorm(one, shift, zero - shift, one, slope, None, None)
    if groups is None or moments is None:
        mean, variance = (t.to(like.dtype) for t in (norm.running_mean, norm.running_var))
        return FoldedNorm(*_fold(norm, mean, variance, bias, like), slope, None, None)
    is_batch_norm = isinstance(norm, nn.BatchNorm3d | nn.SyncBatchNorm)
    updates = is_batch_norm and norm.training and norm.track_running_stats
    momentum = getattr(norm, "momentum", 0.0)  # None: a cumulative average
    fold_at_once = groups.world_size == 1 and momentum is not None
    if fold_at_once and runs_triton(like, "fused-block"):
        running = (None, None, None)
        if updates:
            running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        affine = [t if t is None else t.detach() for t in (norm.weight, norm.bias)]
        folded = cuda.fold_statistics(
            *(moments.total, moments.count, groups.groups, groups.over_batch, norm.eps),
            *(*affine, bias, *running, momentum),
        )
        return FoldedNorm(*folded, slope, groups, moments)
    ((means, squares),) = moments.total
    if bias is not None:
        means = means + bias
    mean = groups.mean(means, moments.count)
    variance = groups.mean(squares / moments.count + (means - mean).square(), moments.count)
    if updates:
        norm.num_batches_tracked.add_(1)
        count = len(like) * moments.count if groups.total is None else groups.total
        _update_running_stats(norm, mean[0], variance[0] * (count / (count - 1)))
    return FoldedNorm(*_fold(norm, mean, variance, bias, like), slope, groups, moments)


def _fold(
    norm: Any, mean: Tensor, variance: Tensor, bias: Tensor | None, like: Tensor
) -> list[Tensor]:
    """Return scale, shift, mean and rstd of y, given mean and variance of y + bias."""
    rstd = torch.rsqrt(variance + norm.eps)
    weight, shift = (1.0, 0.0) if norm.weight is None else (norm.weight, norm.bias)
    if bias is not None:
        mean = mean - bias
    scale = rstd * weight
    folded = (scale, shift - mean * scale, mean, rstd)
    return [t.detach().to(like.dtype).expand_as(like).contiguous() for t in folded]


@torch.no_grad()
def _update_running_stats(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as nn.BatchNorm3d does."""
    momentum = norm.momentum
    if momentum is None:
        momentum = 1.0 / norm.num_batches_tracked.double()
    statistics = norm.running_mean, norm.running_var
    with torch.autograd._unsafe_preserve_version_counter(statistics):  # as torch's own kernels
        for running, new in zip(statistics, (mean, variance), strict=True):
            running.mul_(1 - momentum).add_(new.to(running.dtype) * momentum)
