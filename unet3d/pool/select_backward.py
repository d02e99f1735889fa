"""The gradient of a pooling that selects: to the elements whose places were recorded.

Two operators, each the other's derivative: `pool_spread` sends an output's gradient to its
elements, `pool_collect` brings back what lies at them, so that derivatives of any order exist.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.pool.argmax_codes import SelectedIndices, choose_code, decode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import is_channels_last, make_empty_like, memory_format
from unet3d.pool.windows import Windows


@torch.library.custom_op("unet3d::pool_spread", mutates_args=())
def pool_spread(
    grad: Tensor,
    recorded: Tensor,
    pool: str,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    channels_last: bool,
) -> Tensor:
    """The input's gradient: an output's goes to the one element it took, or half to each of two."""
    windows = Windows.from_args(size, stride, padding)
    if fast := dispatch.select_kernels(grad):
        return fast.backward(grad, pool, windows, shape, channels_last, recorded=recorded)
    places = decode(recorded, choose_code(pool, windows), windows, shape)
    return scatter_gradient(grad, places, windows, shape).contiguous(
        memory_format=memory_format(channels_last)
    )


@pool_spread.register_fake
def _(
    grad: Tensor,
    recorded: Tensor,
    pool: str,
    shape: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    channels_last: bool,
) -> Tensor:
    return make_empty_like(shape, grad, channels_last)


@torch.library.custom_op("unet3d::pool_collect", mutates_args=())
def pool_collect(
    x: Tensor,
    recorded: Tensor,
    pool: str,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The mean of x over the elements that each window took: the derivative of pool_spread."""
    windows = Windows.from_args(size, stride, padding)
    places = decode(recorded, choose_code(pool, windows), windows, x.shape)
    return gather_selected(x, places, windows).contiguous(
        memory_format=memory_format(is_channels_last(x))
    )


@pool_collect.register_fake
def _(
    x: Tensor,
    recorded: Tensor,
    pool: str,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    windows = Windows.from_args(size, stride, padding)
    return make_empty_like((*x.shape[:2], *windows.output_shape(x.shape)), x, is_channels_last(x))


def scatter_gradient(
    grad: Tensor, places: SelectedIndices, windows: Windows, shape: Sequence[int]
) -> Tensor:
    """What pool_spread is, in plain torch."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    share = torch.where(places.low == places.high, wide, wide / 2)
    taken = ((places.low == i) | (places.high == i) for i in range(windows.elements))
    parts = (torch.where(t, share, torch.zeros_like(share)) for t in taken)
    return windows.scatter_add(shape, parts).to(grad.dtype)


def gather_selected(x: Tensor, places: SelectedIndices, windows: Windows) -> Tensor:
    """What pool_collect is, in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    total = torch.zeros((), dtype=wide.dtype, device=x.device)
    for i, view in enumerate(windows.views(wide, fill=0)):
        half = (places.low == i).to(wide.dtype) + (places.high == i).to(wide.dtype)
        total = total + torch.where(half > 0, view * half / 2, torch.zeros_like(view))
    return total.to(x.dtype)


def _spread_context(ctx, inputs: tuple, output: Tensor) -> None:
    _, recorded, pool, _, *windows, _ = inputs
    ctx.save_for_backward(recorded)
    ctx.pool, ctx.windows = pool, windows


def _spread_backward(ctx, grad: Tensor) -> tuple:
    (recorded,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=memory_format(is_channels_last(recorded)))
    return pool_collect(grad, recorded, ctx.pool, *ctx.windows), *[None] * 7


def _collect_context(ctx, inputs: tuple, output: Tensor) -> None:
    x, recorded, pool, *windows = inputs
    ctx.save_for_backward(recorded)
    ctx.pool, ctx.windows, ctx.shape, ctx.last = pool, windows, x.shape, is_channels_last(x)


def _collect_backward(ctx, grad: Tensor) -> tuple:
    (recorded,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=memory_format(ctx.last))
    return pool_spread(grad, recorded, ctx.pool, ctx.shape, *ctx.windows, ctx.last), *[None] * 5


pool_spread.register_autograd(_spread_backward, setup_context=_spread_context)
pool_collect.register_autograd(_collect_backward, setup_context=_collect_context)


def selection_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Keep what the gradient of a selecting pooling needs: not the input."""
    x, *windows = inputs
    _, recorded = output
    ctx.save_for_backward(recorded)
    ctx.windows, ctx.shape, ctx.last = windows, x.shape, is_channels_last(x)
    ctx.set_materialize_grads(False)


def selection_backward(pool: str):
    """The gradient of the selecting pooling of this name."""

    def backward(ctx, grad: Tensor | None, _: None) -> tuple:
        if grad is None:
            return None, None, None, None
        (recorded,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=memory_format(ctx.last))
        to_x = pool_spread(grad, recorded, pool, ctx.shape, *ctx.windows, ctx.last)
        return to_x, None, None, None

    return backward
