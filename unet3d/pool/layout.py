"""How tensors lie in memory: the kernels take two layouts, contiguous and channels-last."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unet3d.errors import UsageError
from unet3d.pool.argmax_codes import IndexCode, choose_code
from unet3d.pool.windows import Windows


def is_channels_last(x: Tensor) -> bool:
    """Whether x is channels-last and not contiguous as well."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def memory_format(channels_last: bool) -> torch.memory_format:
    """The name that torch has for a layout."""
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def make_empty_like(shape: Sequence[int], like: Tensor, channels_last: bool) -> Tensor:
    """Memory for a (B, C, D, H, W) result of `like`'s type and device."""
    format = memory_format(channels_last)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=format)


def allocate_outputs(x: Tensor, pool: str, windows: Windows) -> tuple[Tensor, Tensor]:
    """Memory for a pooling's output and for the places that it records, which may be none."""
    b, c = x.shape[:2]
    space = windows.output_shape(x.shape)
    format = memory_format(is_channels_last(x))
    copies = {IndexCode.NONE: 0, IndexCode.TWO: 2}.get(choose_code(pool, windows), 1)
    y = torch.empty((b, c, *space), dtype=x.dtype, device=x.device, memory_format=format)
    recorded = torch.empty(
        (b * copies, c, *space), dtype=torch.uint8, device=x.device, memory_format=format
    )
    return y, recorded


def to_supported_layout(x: Tensor) -> Tensor:
    """The input as kernels take it; a copy only where it lies in neither layout."""
    if x.dim() != 5 or not x.is_floating_point():
        raise UsageError(
            f"a pooling takes floating point (B, C, D, H, W), got {x.dtype} {tuple(x.shape)}"
        )
    # A custom op would answer forward-mode differentiation with a tangent of zero, silently.
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError("the poolings have no forward-mode derivative; use backward")
    return x if is_channels_last(x) else x.contiguous()
