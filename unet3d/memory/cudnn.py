"""Give convolutions on fake CPU tensors the memory format that cuDNN gives them.

A CPU's kernels choose formats of their own, which depend on the dtype and on the CPU: without this,
half-precision outputs are contiguous on some machines, and the copies back to channels-last look
like those of a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


def follow_cudnn(func: Any, args: tuple, out: Any) -> Any:
    """Return the outputs of a convolution channels-last if its input or its weight is."""
    if func.overloadpacket not in (aten.convolution, aten.convolution_backward):
        return out
    if any(is_channels_last(x) for x in tree_leaves(args) if isinstance(x, Tensor)):
        return tree_map_only(Tensor, _make_channels_last, out)
    return out


def is_channels_last(x: Tensor) -> bool:
    """Return whether torch takes a tensor for channels-last."""
    return x.dim() == 5 and suggest_memory_format(x) == torch.channels_last_3d


def has_channels_last_memory(x: Tensor) -> bool:
    """Return whether the values of a tensor are in channels-last order, without gaps."""
    formats: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _make_channels_last(x: Tensor) -> Tensor:
    if x.dim() != 5 or is_channels_last(x):
        return x
    return torch.empty_like(x, memory_format=torch.channels_last_3d)
