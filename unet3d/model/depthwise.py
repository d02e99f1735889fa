"""Depthwise convolutions whose backward is as fast on a CPU as their forward.

torch computes their gradients without oneDNN's depthwise kernels: benchmarks/cpu-depthwise.json.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.cpp_kernels import HEADERS, CppKernels, count_threads, get_data_ptr
from unet3d.custom_ops import custom_op, get_device_type, is_transformed, keep_metadata

kernels = CppKernels(HEADERS / "depthwise.cpp", "depthwise")
LAYOUT = torch.channels_last_3d
SHORT = 8
"""Maps of fewer rows may be shorter than the kernel of the next convolution."""


def use_fast_depthwise(network: nn.Module) -> int:
    """Make the 3D depthwise convolutions of any network fast on a CPU, in place.

    Parameters, their names and hooks stay; results differ by rounding. Maps become channels-last.
    On a GPU, in float64, and where no C++ compiler is found, they are computed by torch.

    Returns:
        The number of convolutions.

    Example::

        >>> use_fast_depthwise(nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, groups=8)))
        1
    """
    found = [module for module in network.modules() if is_depthwise(module)]
    for module in found:
        is_transposed = isinstance(module, nn.ConvTranspose3d)
        module.__class__ = DepthwiseConvTranspose3d if is_transposed else DepthwiseConv3d
    return len(found)


def is_depthwise(module: Any) -> bool:
    """Return whether a module is a convolution of torch of each channel by itself."""
    return (
        type(module) in (nn.Conv3d, nn.ConvTranspose3d)
        and module.groups == module.in_channels == module.out_channels > 1
        and module.padding_mode == "zeros"
        and max(module.dilation) == 1
        and not isinstance(module.padding, str)
        and all(p < k for p, k in zip(module.padding, module.kernel_size, strict=True))
    )


class DepthwiseConv3d(nn.Conv3d):
    """A depthwise nn.Conv3d with a fast backward."""

    def forward(self, input: Tensor) -> Tensor:
        """Run nn.Conv3d."""
        if not is_supported(input):
            return super().forward(input)
        return convolve(self, input, None)


class DepthwiseConvTranspose3d(nn.ConvTranspose3d):
    """A depthwise nn.ConvTranspose3d with a fast forward and backward."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Run nn.ConvTranspose3d."""
        if not is_supported(input) or output_size is not None:
            return super().forward(input, output_size)
        return convolve(self, input, self.output_padding)


def convolve(module: Any, x: Tensor, output_padding: Any) -> Tensor:
    """Run a module; it is transposed if there is an output padding."""

    def run(x: Tensor) -> Tensor:
        tensors = prepare(x, module.weight, module.bias)
        return finish(Convolve.apply(*tensors, module.stride, module.padding, output_padding))

    return keep_metadata(run, x)


def is_supported(x: Tensor) -> bool:
    """Return whether x is a batch on a CPU, of a dtype that the kernel takes."""
    if get_device_type(x) != "cpu" or x.dim() != 5 or not x.numel():
        return False
    is_recorded = torch.compiler.is_compiling() or is_transformed()
    return not is_recorded and kernels.supports(x)


def prepare(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """Return a channels-last map and weights, cast as torch does for convolutions under autocast.

    Out here, autograd follows the conversion, which second derivatives go through.
    """
    tensors = [x.contiguous(memory_format=LAYOUT), *weights]
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def finish(y: Tensor) -> Tensor:
    """Return short maps in torch's own memory format.

    In channels-last memory, torch's gradients of grouped convolutions are wrong where maps are
    shorter than the kernel (torch 2.14, oneDNN).
    """
    return y.contiguous() if y.shape[2] < SHORT else y


class Convolve(torch.autograd.Function):
    """A depthwise convolution of channels-last maps; transposed if there is an output padding."""

    @staticmethod
    def forward(ctx, x, weight, bias, stride, padding, output_padding):
        ctx.save_for_backward(x, weight)
        ctx.geometry = stride, padding, output_padding
        if output_padding is None:
            return F.conv3d(x, weight, bias, stride, padding, groups=len(weight))
        axes = zip(x.shape[2:], weight.shape[2:], *ctx.geometry, strict=True)
        size = [(n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in axes]
        return convolve_transposed(x, weight, bias, stride, padding, size)

    @staticmethod
    def backward(ctx, g):
        with torch.autocast("cpu", enabled=False):  # as torch, in the type of forward
            return Convolve._backward(ctx, g)

    @staticmethod
    def _backward(ctx, g):
        x, weight = ctx.saved_tensors
        stride, padding, output_padding = ctx.geometry
        needed, is_transposed = ctx.needs_input_grad[:3], output_padding is not None
        if torch.is_grad_enabled():  # torch's operator has a derivative
            geometry = stride, padding, (1, 1, 1), is_transposed, output_padding or (0, 0, 0)
            operator = torch.ops.aten.convolution_backward
            found = operator(
                g, x.contiguous(), weight, [len(weight)], *geometry, len(weight), needed
            )
            return *found, None, None, None
        g = g.contiguous(memory_format=LAYOUT)
        to_x = to_weight = None
        if needed[0] and is_transposed:
            to_x = F.conv3d(g, weight, None, stride, padding, groups=len(weight))
        elif needed[0]:
            to_x = convolve_transposed(g, weight, None, stride, padding, x.shape[2:])
        if needed[1]:
            maps = (g, x) if is_transposed else (x, g)
            to_weight = compute_weight_gradient(*maps, weight.shape[2:], stride, padding)
        to_bias = g.sum((0, 2, 3, 4)) if needed[2] else None
        return to_x, to_weight, to_bias, None, None, None


def convolve_transposed(
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """Convolve with the flipped kernel, after zeros in place of outputs that a stride skipped."""
    kernel = weight.shape[2:]
    if max(stride) > 1:
        whole = [n + 2 * p - k + 1 for n, p, k in zip(size, padding, kernel, strict=True)]
        given = g
        g = g.new_empty((*g.shape[:2], *whole)).contiguous(memory_format=LAYOUT).zero_()
        g[:, :, :: stride[0], :: stride[1], :: stride[2]] = given
    padding = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    return F.conv3d(g, weight.flip(2, 3, 4), bias, 1, padding, groups=len(weight))


class _Job(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.c_int64 * 17),  # batch, channels; input, output, kernel, stride, padding
        ("threads", ctypes.c_int64),
    )


@custom_op("unet3d::depthwise_weight_gradient")
def compute_weight_gradient(
    x: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient (C, 1, D, H, W) of a convolution's weight, of channels-last maps."""
    sums = x.new_zeros((*kernel, x.shape[1]), dtype=torch.float32)
    sizes = (*x.shape, *g.shape[2:], *kernel, *stride, *padding)
    job = _Job((ctypes.c_int64 * 17)(*sizes), count_threads(x))
    kernels[x.dtype].weight_gradient(ctypes.byref(job), *map(get_data_ptr, (x, g, sums)))
    return sums.permute(3, 0, 1, 2)[:, None].to(x.dtype)


@compute_weight_gradient.register_fake
def _(x: Tensor, g: Tensor, kernel: Sequence[int], *geometry: Any) -> Tensor:
    sums = x.new_empty(*kernel, x.shape[1], dtype=torch.float32)
    return sums.permute(3, 0, 1, 2)[:, None].to(x.dtype)
