"""What kernels allocate and free before they return, on CUDA and CPUs."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from unet3d.memory.cuda_kernels import ATTENTION_BACKWARD
from unet3d.memory.cuda_libraries import is_dense

aten = torch.ops.aten

UPSAMPLINGS = {
    getattr(aten, f"{name}_backward")
    for name in """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa""".split()
}

COPY_IF_STRIDED = {
    **dict.fromkeys((*UPSAMPLINGS, aten.max_pool3d_with_indices_backward), is_dense),
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


POOLINGS = {
    *(aten.max_pool2d_with_indices_backward, aten.avg_pool2d_backward),
    aten._adaptive_avg_pool2d_backward,
}
"""Gradients that a CPU computes in the format of what they are given, channels-last or not."""
SMALL_UPSAMPLINGS = {
    *(aten.upsample_nearest2d, aten._upsample_nearest_exact2d, aten.upsample_bilinear2d)
}
SMALL = 128
"""A CPU computes them channels-last where height and width together are at most this."""
TWO_PASSES = {aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa}
FOURIER = {aten._fft_r2c, aten._fft_c2c}


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
    if not cuda:
        yield from _list_on_cpu(operation, args, out)
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
    elif operation is aten.t and args[0].layout == torch.sparse_coo:
        yield args[0]._indices()[0].nbytes, "rows"
    elif operation is aten.count_nonzero and args[1:]:  # the sum of a mask
        yield args[0].numel() * (1 + out.element_size()), f"copy as {out.dtype}"
    elif operation is aten.sum and args[0].dtype != out.dtype:
        fused = args[0].dtype in (torch.float16, torch.bfloat16) and out.dtype == torch.float32
        if not (cuda and fused):  # labels and masks are copied as int64
            yield args[0].numel() * out.element_size(), f"copy as {out.dtype}"


def _get_summand_bytes(args: tuple, out: Tensor) -> int:
    return prod(torch.broadcast_shapes(args[0].shape, args[1].shape)) * out.element_size()


def _list_on_cpu(operation: Any, args: tuple, out: Any) -> Iterator[tuple[int, str]]:
    """Yield what a CPU's kernels copy, or sort, where a GPU's need not."""
    last = torch.channels_last
    if operation in POOLINGS and args[1].dim() == 4:
        grad, _, *others = filter(torch.is_tensor, args)
        is_last = grad.is_contiguous(memory_format=last) and not grad.is_contiguous()
        kind = last if is_last else torch.contiguous_format
        copied = [t for t in (grad, *others, out) if not t.is_contiguous(memory_format=kind)]
        yield sum(t.nbytes for t in copied), "copies in the format of the gradient"
    elif operation in SMALL_UPSAMPLINGS and sum(out.shape[2:]) <= SMALL:
        copied = [t for t in (args[0], out) if not t.is_contiguous(memory_format=last)]
        yield sum(t.nbytes for t in copied), "channels-last copies"
    elif operation in TWO_PASSES and all(map(int.__ne__, args[0].shape[2:], out.shape[2:])):
        yield args[0][..., 0].numel() * out.shape[3] * out.element_size(), "first pass"
    elif operation in FOURIER and torch.backends.mkl.is_available():
        yield (0 if _can_flatten(args[0], args[1]) else args[0].nbytes), "contiguous copy"
    elif operation in (aten.median, aten.nanmedian) and len(args) > 1 and args[0].dim():
        is_last = args[0].is_contiguous() and args[0].movedim(args[1], -1).stride()[-1] == 1
        yield (0 if is_last else args[0].nbytes), "contiguous copy"
    elif operation in (aten.bmm, aten.baddbmm):
        yield sum(t.nbytes for t in args if torch.is_tensor(t) and t.is_conj()), "conjugated copies"
    elif operation is aten._linalg_eigh:
        n = args[0].shape[-1]  # eigenvectors, which torch computes of fake tensors in any case
        numbers, integers = 1 + 6 * n + 2 * n * n, 3 + 5 * n
        yield numbers * args[0].element_size() + 4 * integers, "workspace of LAPACK's syevd"
    elif operation is aten.kthvalue:
        yield args[0].numel() * (args[0].element_size() + 8), "values and indices"
    elif operation is aten.isin and all(map(torch.is_tensor, args[:2])):
        if args[1].numel() < 10 * args[0].numel() ** 0.145:  # compares with one after the other
            return
        x = max(args[:2], key=Tensor.numel)
        copied = 0 if x.is_contiguous() else x.nbytes
        yield copied + x.nbytes + 16 * x.numel(), "sorted values and indices"


def _can_flatten(x: Tensor, dims: Sequence[int]) -> bool:
    """Return whether the axes that are not transformed are one in memory, longest steps first."""
    others = {*range(x.dim())} - {dim % x.dim() for dim in dims}
    order = sorted(others, key=x.stride, reverse=True)
    pairs = pairwise(axis for axis in order if x.shape[axis] > 1)
    return all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in pairs)
