"""Model what convolutions and matrix products take from torch's allocator on CUDA.

cuDNN's fast kernels read channels-last tensors whose channels fill vectors of 16 bytes; every
other tensor is copied to a workspace. An H100 showed these rules: tests/memory/test_h100.py.

What torch does not give to cuDNN (ConvParams::use_cudnn in its ATen/native/Convolution.cpp) unfolds
the windows of one sample into columns: C_in x kernel rows, and a column for each output voxel. For
a kernel of 3 x 3 x 3 these are 27 times as large as the input.

A CPU's kernels choose memory formats of their own, which depend on the dtype and on the CPU:
without `follow_cudnn`, half-precision outputs of fake CPU tensors are contiguous on some machines,
and the copies back to channels-last look like those of a GPU.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map_only

from unet3d.text import MIB

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
MATRIX_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot)

COLUMNS = "convolution: columns"
"""Name of the operation that allocates columns in a trace."""

INT_MAX = 2**31 - 1
"""Elements of a sample up to which 32-bit indices suffice."""
CUDNN_WITHOUT_CONV3D = range(90_800, 91_500)
"""Versions, from 9.8 to 9.14, that torch does not use for half-precision 3D convolutions."""
CUDNN_OF_LARGE_SAMPLES = 90_300

VECTOR_BYTES = 16
FEW_CHANNELS = 32
"""With at most these, cuDNN's weight gradients in float32 read no channels-last tensors."""

PARTIAL_SUMS = ((4, 4 * MIB), (11, 14 * MIB))
"""What cuDNN may take besides, for partial sums of a weight's gradient: this many times the weight
in float32, up to these bytes. An H100 showed no rule but that it depends on the channels."""

CUBLAS_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
HOPPER_CUBLAS_BYTES = 32 * MIB
CUBLASLT_BYTES = MIB

_assumed_cudnn: ContextVar[int | None] = ContextVar("cuDNN", default=None)


@contextmanager
def assume_cudnn(version: str | None) -> Generator[None]:
    """Estimate in the body for a version of cuDNN such as 9.10.2; None: the installed one."""
    number = None
    if version is not None:
        major, minor, patch = [*map(int, re.findall(r"\d+", version)), 0][:3]
        number = (10_000 if major >= 9 else 1000) * major + 100 * minor + patch
    token = _assumed_cudnn.set(number)
    try:
        yield
    finally:
        _assumed_cudnn.reset(token)


def get_column_bytes(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> int:
    """Return the bytes of the columns that a convolution allocates; 0 with cuDNN."""
    if torch.backends.cudnn.enabled:
        has_columns = x.dim() == 5 and not _uses_cudnn(x, weight, out)
    else:
        has_columns = x.dim() == 5 or not _is_one_voxel(weight)
    if not has_columns:
        return 0
    rows = x.shape[1] // groups * prod(weight.shape[2:])
    return rows * prod(out.shape[2:]) * x.element_size()


def _uses_cudnn(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    is_last = is_channels_last(x) or is_channels_last(weight)
    # As 91002 for 9.10.2; where none is installed, it is taken to be a new one.
    version = _assumed_cudnn.get() or torch.backends.cudnn.version() or 10**6
    if is_half and not _is_one_voxel(weight) and not is_last and version in CUDNN_WITHOUT_CONV3D:
        return False
    is_large = max(x.numel() // len(x), out.numel() // len(out)) > INT_MAX
    return not is_large or version >= CUDNN_OF_LARGE_SAMPLES


def follow_cudnn(func: Any, args: tuple, out: Any) -> Any:
    """Return the outputs of a convolution channels-last if its input or its weight is."""

    def make_channels_last(x: Tensor) -> Tensor:
        if x.dim() != 5 or is_channels_last(x):
            return x
        return torch.empty_like(x, memory_format=torch.channels_last_3d)

    if func.overloadpacket in CONVOLUTIONS and any(map(is_channels_last, tree_leaves(args))):
        return tree_map_only(Tensor, make_channels_last, out)
    return out


def is_channels_last(x: Any) -> bool:
    """Return whether torch takes an argument for channels-last."""
    is_map = isinstance(x, Tensor) and x.dim() == 5
    return is_map and suggest_memory_format(x) == torch.channels_last_3d


def is_dense(x: Tensor) -> bool:
    """Return whether a feature map is contiguous or channels-last."""
    return x.is_contiguous() or has_channels_last_memory(x)


def has_channels_last_memory(x: Tensor) -> bool:
    """Return whether the values of a tensor are in channels-last order, without gaps."""
    formats: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def get_forward_workspace(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> int:
    """Return the bytes of the workspace of a convolution."""
    if _is_one_voxel(weight) or _is_depthwise(x, groups):
        return 0
    return sum(map(_get_copy_bytes, (x, weight, out)))


def get_backward_workspaces(
    grad: Tensor, x: Tensor, weight: Tensor, groups: int, transposed: bool
) -> tuple[int, int]:
    """Return the bytes of the workspaces of the gradients of a convolution's input and weight."""
    if _is_depthwise(x, groups):
        return 0, 0
    by_tensor = [_get_copy_bytes(t) for t in (grad, x, weight)]
    for_input = 0 if _is_one_voxel(weight) else sum(by_tensor)
    is_slow = x.dtype == torch.float32 and min(weight.shape[:2]) <= FEW_CHANNELS
    if is_slow and not transposed and not _is_one_voxel(weight):
        by_tensor = [_get_padded_bytes(t) for t in (grad, x, weight)]
    return for_input, sum(by_tensor)


def get_cublas_bytes() -> int:
    """Return the bytes that cuBLAS keeps for each thread that multiplies matrices."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * 1024 * int(count) for kib, count in sizes)
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return HOPPER_CUBLAS_BYTES if is_hopper else CUBLAS_BYTES


def _is_one_voxel(weight: Tensor) -> bool:
    return all(n == 1 for n in weight.shape[2:])


def _is_depthwise(x: Tensor, groups: int) -> bool:
    """Return whether torch has a kernel of its own for the convolution."""
    return groups > 1 and groups == x.shape[1]


def _get_copy_bytes(x: Tensor) -> int:
    """Return the bytes of a channels-last copy; 0 if cuDNN reads the tensor itself."""
    padded = _get_padded_bytes(x)
    is_readable = padded == x.nbytes and has_channels_last_memory(x)
    return 0 if x.shape[1] == 1 or is_readable else padded


def _get_padded_bytes(x: Tensor) -> int:
    vector = VECTOR_BYTES // x.element_size()
    channels = -(-x.shape[1] // vector) * vector
    return len(x) * channels * prod(x.shape[2:]) * x.element_size()
