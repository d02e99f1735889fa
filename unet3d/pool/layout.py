"""Handle the two memory layouts that the kernels take: contiguous and channels-last."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unet3d.errors import UsageError
from unet3d.pool.argmax_codes import IndexCode, choose_code
from unet3d.pool.windows import PoolWindows


def is_channels_last(x: Tensor) -> bool:
    """Return whether x is channels-last and not also contiguous."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def has_channels_last_strides(x: Tensor) -> bool:
    """Return whether x is channels-last, or a part of such a tensor, and not also contiguous."""
    return not x.is_contiguous() and x.shape[1] > 1 and x.stride(1) == 1


def get_memory_format(channels_last: bool) -> torch.memory_format:
    """Return torch's memory format for a layout."""
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def make_empty_like(shape: Sequence[int], like: Tensor, channels_last: bool) -> Tensor:
    """Allocate a (B, C, D, H, W) tensor of the dtype and device of `like`."""
    format = get_memory_format(channels_last)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format)


def allocate_outputs(x: Tensor, pool: str, windows: PoolWindows) -> tuple[Tensor, Tensor]:
    """Allocate a pooling layer's output and its codes, which are empty if it has none."""
    b, c = x.shape[:2]
    space = windows.output_shape(x.shape)
    format = get_memory_format(is_channels_last(x))
    copies = {IndexCode.NONE: 0, IndexCode.TWO: 2}.get(choose_code(pool, windows), 1)
    y = torch.empty((b, c, *space), dtype=x.dtype, device=x.device, memory_format=format)
    codes = torch.empty(
        (b * copies, c, *space), dtype=torch.uint8, device=x.device, memory_format=format
    )
    return y, codes


def to_supported_layout(x: Tensor) -> Tensor:
    """Return x in a layout that the kernels take; copy it only if it has neither."""
    if x.dim() != 5 or not x.is_floating_point():
        raise UsageError(
            f"pooling needs a floating-point (B, C, D, H, W), got {x.dtype} {tuple(x.shape)}"
        )
    # Under forward-mode differentiation, a custom op would silently return a zero tangent.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError("pooling has no forward-mode derivative: use backward")
    if is_channels_last(x):
        return x
    return x.contiguous(memory_format=get_memory_format(has_channels_last_strides(x)))
