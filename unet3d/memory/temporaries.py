"""What kernels allocate and free before they return, on CUDA and CPUs."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d.memory.cuda_kernels import ATTENTION_BACKWARD
from unet3d.memory.cuda_libraries import is_dense

aten = torch.ops.aten

COPY_IF_STRIDED = {
    aten.upsample_trilinear3d_backward: is_dense,
    aten.upsample_nearest3d_backward: is_dense,
    aten.max_pool3d_with_indices_backward: is_dense,
    **dict.fromkeys(
        (
            *(aten._softmax, aten._log_softmax, aten.col2im, aten.searchsorted),
            *(aten._softmax_backward_data, aten._log_softmax_backward_data),
        ),
        Tensor.is_contiguous,
    ),
}
"""Kernels that first copy what is not dense, or not contiguous."""

RESIZED_LOSSES = {
    *(aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss)
}
"""Losses whose number keeps the memory of all its summands: kernels resize what they allocate."""
SUMMED_LOSSES = {aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss}
"""Losses that compute their summands in temporary memory (ATen/native/Loss.cpp)."""


def find_kept_bytes(operation: Any, args: tuple, out: Any) -> int | None:
    """Return the bytes that a kernel's output keeps, where it is a resized tensor; else None."""
    if operation in RESIZED_LOSSES and out.dim() == 0:
        return _get_summand_bytes(args, out)
    return max(out.nbytes, args[0].nbytes) if operation is aten.col2im else None


def list_temporaries(
    operation: Any, args: tuple, out: Any, *, cuda: bool
) -> Iterator[tuple[int, str]]:
    """Yield the bytes of each, and what it is."""
    reads = COPY_IF_STRIDED.get(operation, torch.is_tensor)
    if nbytes := sum(t.nbytes for t in args if isinstance(t, Tensor) and not reads(t)):
        yield nbytes, "contiguous copy"
    if operation in SUMMED_LOSSES and out.dim() == 0:
        yield _get_summand_bytes(args, out), "summands"
    elif operation is aten.soft_margin_loss_backward:
        yield 2 * out.nbytes, "summands"
    elif operation is aten.binary_cross_entropy_with_logits:
        yield 2 * args[0].nbytes - (out.nbytes if out.dim() else 0), "summands"
    elif operation in ATTENTION_BACKWARD:
        yield 4 * args[1].numel(), "float32 sums"
    elif operation is aten._embedding_bag_backward and not args[9]:
        grad, indices, _, numbers, bags, largest, _, _, mode, *_ = args
        if mode == 2:  # the maximum, of bags that are not empty
            yield grad.nbytes + largest.nbytes + bags.nbytes, "bags with indices"
        else:  # in ascending order, with their places and bags, which forward may have numbered
            yield (3 if len(numbers) else 4) * indices.nbytes, "sorted indices"
    elif operation is aten.count_nonzero and args[1:]:  # the sum of a mask
        yield args[0].numel() * (1 + out.element_size()), f"copy as {out.dtype}"
    elif operation is aten.sum and args[0].dtype != out.dtype:
        fused = args[0].dtype in (torch.float16, torch.bfloat16) and out.dtype == torch.float32
        if not (cuda and fused):  # labels and masks are copied as int64
            yield args[0].numel() * out.element_size(), f"copy as {out.dtype}"


def _get_summand_bytes(args: tuple, out: Tensor) -> int:
    return prod(torch.broadcast_shapes(args[0].shape, args[1].shape)) * out.element_size()
