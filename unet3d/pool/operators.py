"""Define the operators of all pooling layers, and the module that calls them.

Max and median pooling select elements of each window, and backward needs only their codes. Average
pooling needs nothing, and the approximate median its input.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from unet3d.custom_ops import custom_op, is_transformed
from unet3d.errors import UsageError
from unet3d.pool.argmax_codes import allocate_outputs
from unet3d.pool.kernels import plain, select_kernels
from unet3d.pool.windows import (
    PoolWindows,
    get_memory_format,
    has_channels_last_strides,
    is_channels_last,
)
from unet3d.types import Size


class Pool3d(nn.Module):
    """A pooling layer with the arguments of nn.MaxPool3d; `pool` is its name in the kernels."""

    pool: ClassVar[str]
    tau = 0.0

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0):
        super().__init__()
        self.windows = PoolWindows.from_args(kernel_size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, C, D', H', W'), or both without B, as in torch."""
        if x.dim() == 4:
            return self.forward(x[None])[0]
        if torch.compiler.is_exporting() or is_transformed():
            return self.pool_by_standard_operators(x)
        return pool3d(to_supported_layout(x), self.pool, self.windows.numbers, self.tau)[0]

    def compute_input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, given that of the output, without an autograd graph."""
        arguments = self.pool, self.windows.numbers, self.tau
        last = has_channels_last_strides(x)
        if self.pool != "avg":
            x = to_supported_layout(x)
        selects = self.pool in ("max", "median")
        _, codes = pool3d(x, *arguments) if selects else (None, None)
        grad = grad.contiguous(memory_format=get_memory_format(last))
        return pool3d_backward(grad, choose_saved(self.pool, x, codes), x.shape, *arguments, last)

    def pool_by_standard_operators(self, x: Tensor) -> Tensor:
        """Run `forward` without kernels and codes, for export and transforms of torch.func.

        Values are equal for finite input.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return str(self.windows)


def to_supported_layout(x: Tensor) -> Tensor:
    """Return x in a layout that the kernels take; copy it only if it has neither."""
    if x.dim() != 5 or not x.is_floating_point():
        raise UsageError(
            f"pooling needs a floating-point (B, C, D, H, W), got {x.dtype} {tuple(x.shape)}"
        )
    # Under forward-mode differentiation, a custom op would silently return a zero tangent.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError("pooling has no forward-mode derivative: use backward")
    return x.contiguous(memory_format=get_memory_format(has_channels_last_strides(x)))


def choose_saved(pool: str, x: Tensor, codes: Tensor | None) -> Tensor | None:
    """Return what the backward of a pooling layer needs."""
    return {"avg": None, "approx_median": x}.get(pool, codes)


@custom_op("unet3d::pool3d")
def pool3d(x: Tensor, pool: str, windows: Sequence[int], tau: float) -> tuple[Tensor, Tensor]:
    """Return the output, and the codes of the selected elements, empty if none are."""
    parsed = PoolWindows.from_numbers(windows)
    y, codes = allocate_outputs(x, pool, parsed)
    if y.numel():
        select_kernels(x).forward(x, y, codes, pool, parsed, tau)
    return y, codes


@pool3d.register_fake
def _(x: Tensor, pool: str, windows: Sequence[int], tau: float) -> tuple[Tensor, Tensor]:
    return allocate_outputs(x, pool, PoolWindows.from_numbers(windows))


@custom_op("unet3d::pool3d_backward")
def pool3d_backward(
    grad: Tensor,
    saved: Tensor | None,
    shape: Sequence[int],
    pool: str,
    windows: Sequence[int],
    tau: float,
    channels_last: bool,
) -> Tensor:
    """Return the gradient of an input of this shape and layout."""
    result = allocate_gradient(grad, shape, channels_last)
    if result.numel():
        kernels = select_kernels(grad)
        kernels.backward(grad, saved, result, pool, PoolWindows.from_numbers(windows), tau)
    return result


@pool3d_backward.register_fake
def _(grad: Tensor, saved: Tensor | None, shape: Sequence[int], *options: Any) -> Tensor:
    return allocate_gradient(grad, shape, options[-1])


def allocate_gradient(grad: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    """Allocate the gradient of an input, of the dtype and device of the output's."""
    format = get_memory_format(channels_last)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=format)


def _forward_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.arguments = inputs
    ctx.shape, ctx.channels_last = x.shape, is_channels_last(x)
    ctx.save_for_backward(choose_saved(ctx.arguments[0], x, output[1]))
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: Tensor | None, _: None) -> tuple:
    if grad is None:
        return None, None, None, None
    grad = grad.contiguous(memory_format=get_memory_format(ctx.channels_last))
    (saved,) = ctx.saved_tensors
    to_x = pool3d_backward(grad, saved, ctx.shape, *ctx.arguments, ctx.channels_last)
    return to_x, None, None, None


def _backward_context(ctx, inputs: tuple, output: Tensor) -> None:
    grad, saved, ctx.shape, *ctx.arguments, _ = inputs
    ctx.save_for_backward(grad, saved)


def _second_backward(ctx, upper: Tensor) -> tuple:
    """Differentiate the plain backward: second derivatives are too rare for kernels."""
    pool, numbers, tau = ctx.arguments
    windows = PoolWindows.from_numbers(numbers)
    grad, saved = ctx.saved_tensors
    with torch.enable_grad():
        grad = grad.view_as(grad)  # a node of its own, as the gradient may depend on the input
        saved = None if saved is None else saved.view_as(saved)
        result = plain.compute_gradient(grad, saved, pool, windows, ctx.shape, tau)
    inputs = [t for t in (grad, saved) if t is not None and t.requires_grad]
    found = torch.autograd.grad(
        result, inputs, upper.to(result.dtype), create_graph=torch.is_grad_enabled()
    )
    gradients = dict(zip(map(id, inputs), found, strict=True))
    return gradients.get(id(grad)), gradients.get(id(saved)), *[None] * 5


pool3d.register_autograd(_backward, setup_context=_forward_context)
pool3d_backward.register_autograd(_second_backward, setup_context=_backward_context)
