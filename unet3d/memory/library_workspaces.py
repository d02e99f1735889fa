"""Estimate the workspaces that cuDNN and cuBLAS take from torch's allocator.

cuDNN's fast kernels read channels-last tensors whose channels fill vectors of 16 bytes; every
other tensor is copied to the workspace. An H100 showed these rules: tests/memory/test_h100.py.
"""

import os
import re
from math import prod

import torch
from torch import Tensor

from unet3d.memory.assumption import Assumption
from unet3d.memory.cudnn import has_channels_last_memory
from unet3d.units import MIB

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
MATRIX_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)

VECTOR_BYTES = 16
FEW_CHANNELS = 32
"""With at most these, cuDNN's weight gradients in float32 read no channels-last tensors."""

CUBLAS_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
HOPPER_CUBLAS_BYTES = 32 * MIB
CUBLASLT_BYTES = MIB

CUBLAS_WORKSPACE = Assumption[int]("cuBLAS workspace")
"""Bytes of a workspace to estimate for instead of this machine's."""


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
    assumed = CUBLAS_WORKSPACE.get()
    if assumed is not None:
        return assumed
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
