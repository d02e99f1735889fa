"""Operators of max and median pooling, which select elements of each window, and their gradients.

Backward needs only the codes of these elements. Two operators, each the derivative of the other,
give derivatives of any order: `pool_scatter` sends an output's gradient to its selected elements,
`pool_gather` reads the values at them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.custom_ops import CustomOp, custom_op
from unet3d.pool.argmax_codes import SelectedIndices, choose_code, decode, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import (
    allocate_outputs,
    get_memory_format,
    is_channels_last,
    make_empty_like,
    to_supported_layout,
)
from unet3d.pool.windows import PoolWindows


@custom_op("unet3d::pool_scatter")
def pool_scatter(
    grad: Tensor,
    codes: Tensor,
    pool: str,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    channels_last: bool,
) -> Tensor:
    """Return the input's gradient: all of an output's to one element, or half to each of two."""
    windows = PoolWindows.from_args(size, stride, padding)
    if kernels := dispatch.select_kernels(grad):
        return kernels.backward(grad, pool, windows, shape, channels_last, codes=codes)
    indices = decode(codes, choose_code(pool, windows), windows, shape)
    return scatter_gradient(grad, indices, windows, shape).contiguous(
        memory_format=get_memory_format(channels_last)
    )


@pool_scatter.register_fake
def _(grad: Tensor, codes: Tensor, pool: str, shape: Sequence[int], *options: Any) -> Tensor:
    return make_empty_like(shape, grad, options[-1])  # channels_last


@custom_op("unet3d::pool_gather")
def pool_gather(
    x: Tensor,
    codes: Tensor,
    pool: str,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return the mean of x over each window's selected elements: the derivative of pool_scatter."""
    windows = PoolWindows.from_args(size, stride, padding)
    indices = decode(codes, choose_code(pool, windows), windows, x.shape)
    return gather_selected(x, indices, windows).contiguous(
        memory_format=get_memory_format(is_channels_last(x))
    )


@pool_gather.register_fake
def _(x: Tensor, codes: Tensor, pool: str, *axes: Sequence[int]) -> Tensor:
    space = PoolWindows.from_args(*axes).output_shape(x.shape)
    return make_empty_like((*x.shape[:2], *space), x, is_channels_last(x))


def scatter_gradient(
    grad: Tensor, indices: SelectedIndices, windows: PoolWindows, shape: Sequence[int]
) -> Tensor:
    """Compute pool_scatter in plain PyTorch."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    share = torch.where(indices.low == indices.high, wide, wide / 2)
    selected = ((indices.low == i) | (indices.high == i) for i in range(windows.elements))
    parts = (torch.where(s, share, torch.zeros_like(share)) for s in selected)
    return windows.scatter_add(shape, parts).to(grad.dtype)


def gather_selected(x: Tensor, indices: SelectedIndices, windows: PoolWindows) -> Tensor:
    """Compute pool_gather in plain PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    total = torch.zeros((), dtype=wide.dtype, device=x.device)
    for i, view in enumerate(windows.views(wide, fill=0)):
        count = (indices.low == i).to(wide.dtype) + (indices.high == i).to(wide.dtype)
        total = total + torch.where(count > 0, view * count / 2, torch.zeros_like(view))
    return total.to(x.dtype)


def _scatter_context(ctx, inputs: tuple, output: Tensor) -> None:
    _, codes, pool, _, *windows, _ = inputs
    ctx.save_for_backward(codes)
    ctx.pool, ctx.windows = pool, windows


def _scatter_backward(ctx, grad: Tensor) -> tuple:
    (codes,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=get_memory_format(is_channels_last(codes)))
    return pool_gather(grad, codes, ctx.pool, *ctx.windows), *[None] * 7


def _gather_context(ctx, inputs: tuple, output: Tensor) -> None:
    x, codes, pool, *windows = inputs
    ctx.save_for_backward(codes)
    ctx.pool, ctx.windows = pool, windows
    ctx.shape, ctx.channels_last = x.shape, is_channels_last(x)


def _gather_backward(ctx, grad: Tensor) -> tuple:
    (codes,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=get_memory_format(ctx.channels_last))
    to_x = pool_scatter(grad, codes, ctx.pool, ctx.shape, *ctx.windows, ctx.channels_last)
    return to_x, *[None] * 5


pool_scatter.register_autograd(_scatter_backward, setup_context=_scatter_context)
pool_gather.register_autograd(_gather_backward, setup_context=_gather_context)


def define_selection_op(
    pool: str, select: Callable[[Tensor, PoolWindows], tuple[Tensor, SelectedIndices]]
) -> CustomOp:
    """Return unet3d::{pool}_pool3d: the outputs, and the codes of the elements that they select.

    `select` is its reference implementation in plain PyTorch.
    """

    def forward(
        x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        windows = PoolWindows.from_args(size, stride, padding)
        if kernels := dispatch.select_kernels(x):
            return kernels.forward(x, pool, windows)
        y, indices = select(x, windows)
        format = get_memory_format(is_channels_last(x))
        codes = encode(indices, choose_code(pool, windows), windows, x.shape)
        return y.contiguous(memory_format=format), codes.contiguous(memory_format=format)

    def allocate(x: Tensor, *axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        return allocate_outputs(x, pool, PoolWindows.from_args(*axes))

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        """Save the codes for backward, not the input."""
        x, *ctx.windows = inputs
        ctx.save_for_backward(output[1])
        ctx.shape, ctx.channels_last = x.shape, is_channels_last(x)
        ctx.set_materialize_grads(False)

    def backward(ctx, grad: Tensor | None, _: None) -> tuple:
        if grad is None:
            return None, None, None, None
        (codes,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=get_memory_format(ctx.channels_last))
        to_x = pool_scatter(grad, codes, pool, ctx.shape, *ctx.windows, ctx.channels_last)
        return to_x, None, None, None

    op = CustomOp(f"unet3d::{pool}_pool3d", forward)
    op.register_fake(allocate)
    op.register_autograd(backward, setup_context=setup_context)
    return op


def recompute_gradient(
    op: CustomOp, pool: str, x: Tensor, grad: Tensor, windows: PoolWindows
) -> Tensor:
    """Return the input's gradient of a selection operator, without an autograd graph."""
    x = to_supported_layout(x)
    last = is_channels_last(x)
    _, codes = op(x, *windows.axes)
    grad = grad.contiguous(memory_format=get_memory_format(last))
    return pool_scatter(grad, codes, pool, x.shape, *windows.axes, last)
