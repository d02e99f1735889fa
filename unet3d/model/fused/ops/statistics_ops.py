"""Operators that fold a norm's statistics into a scale and a shift, and their backward, on CUDA.

Each replaces some twenty operations on (B, C) tensors, whose launches would take longer than their
work. norms.py has the same in plain PyTorch, for CPUs and for statistics of several ranks.
"""

import torch
from torch import Tensor

from unet3d.custom_ops import custom_op
from unet3d.triton_kernels import runs_triton


def has_kernels(sums: Tensor) -> bool:
    """Return whether the operators take sums like these."""
    return sums.dtype == torch.float32 and runs_triton(sums, "fused-block")


@custom_op("unet3d::fold_statistics", mutates_args=("running_mean", "running_var"))
def fold(
    total: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
    eps: float,
    weight: Tensor | None,
    shift: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> Tensor:
    """Return (4, B, C): scale, shift, mean and 1 / standard deviation; update running statistics.

    `total` are the moments of `count` values per volume and channel, without the convolution's
    `bias`; `weight` and `shift` are those of the norm.
    """
    from unet3d.model.fused.kernels import cuda

    out = total.new_empty(4, *total.shape[1:])
    optional = (weight, shift, bias, running_mean, running_var)
    arguments = (total, count, groups, over_batch, eps, *optional)
    cuda.fold_statistics(*arguments, momentum=momentum, out=out)
    return out


@custom_op("unet3d::fold_gradient")
def fold_gradient(
    sums: Tensor,
    scale: Tensor,
    mean: Tensor,
    inverse: Tensor,
    count: int,
    groups: int,
    over_batch: bool,
) -> Tensor:
    """Return (2, B, C): `constant` and `linear` of NormGradient, from the sums of m and m * x."""
    from unet3d.model.fused.kernels import cuda

    out = torch.empty_like(sums)
    cuda.fold_gradient(sums, scale, mean, inverse, count, groups, over_batch, out)
    return out


@fold.register_fake
def _(total: Tensor, *others: object) -> Tensor:
    return total.new_empty(4, *total.shape[1:])


@fold_gradient.register_fake
def _(sums: Tensor, *others: object) -> Tensor:
    return torch.empty_like(sums)
