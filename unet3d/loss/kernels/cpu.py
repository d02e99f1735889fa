"""Call the compiled kernels of cpp/, for softmax with plain cross-entropy."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from unet3d.cpp_kernels import CppKernels, count_threads, get_data_ptr

kernels = CppKernels(Path(__file__).parent / "cpp" / "loss.cpp", "loss")


class _Logits(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 3),
        ("strides", ctypes.c_int64 * 2),
        ("label_bytes", ctypes.c_int64),
    )


def sum_terms(logits: Tensor, labels: Tensor) -> Tensor:
    """Run dice_terms.sum_terms in one pass."""
    sums = torch.empty(5, *logits.shape[:2], dtype=torch.float32, device=logits.device)
    _run("sums", logits, labels, sums)
    return sums


def compute_gradient(logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    """Run dice_terms.compute_gradient in one pass."""
    out = torch.empty_like(logits)
    _run("gradient", logits, labels, grad, out)
    return out


def _run(name: str, logits: Tensor, labels: Tensor, *tensors: Tensor) -> None:
    labels = labels.contiguous()
    shape = len(logits), logits.shape[1], labels[0].numel()
    strides = (shape[2], 1) if logits.is_contiguous() else (1, shape[1])
    sizes = (ctypes.c_int64 * 3)(*shape), (ctypes.c_int64 * 2)(*strides)
    given = _Logits(logits.data_ptr(), *sizes, labels.itemsize)
    pointers = map(get_data_ptr, (labels, *tensors))
    getattr(kernels[logits.dtype], name)(ctypes.byref(given), *pointers, count_threads(logits))
