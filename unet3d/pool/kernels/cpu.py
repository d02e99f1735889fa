"""Call the compiled kernels of cpp/."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unet3d.cpp_kernels import CppKernels, get_data_ptr
from unet3d.pool.argmax_codes import choose_code
from unet3d.pool.layout import allocate_outputs, is_channels_last, make_empty_like
from unet3d.pool.sorting_network import build_median_network
from unet3d.pool.windows import PoolWindows

POOLS = ("median", "max", "avg", "approx_median")  # in the order of cpp/grid.h
MIN_PARALLEL_ELEMENTS = 1 << 14  # a smaller tensor runs on one thread

kernels = CppKernels(Path(__file__).parent / "cpp" / "pool.cpp", "pooling")


class _Job(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_int64 * 17),
        ("pool", ctypes.c_int64),
        ("code", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("comparators", ctypes.c_int64),
        ("network", ctypes.c_void_p),
        ("tau", ctypes.c_double),
    )


def forward(x: Tensor, pool: str, windows: PoolWindows, tau: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the output and its codes."""
    y, codes = allocate_outputs(x, pool, windows)
    if y.numel():
        job = _job(x.shape, pool, windows, tau, is_channels_last(x))
        function = kernels[x.dtype].pool_forward
        function(ctypes.byref(job), get_data_ptr(x), get_data_ptr(y), get_data_ptr(codes))
    return y, codes


def backward(
    grad: Tensor,
    pool: str,
    windows: PoolWindows,
    shape: Sequence[int],
    channels_last: bool,
    codes: Tensor | None = None,
    x: Tensor | None = None,
    tau: float = 0.0,
) -> Tensor:
    """Return the gradient of the input, from codes, from the input itself, or from neither."""
    result = make_empty_like(shape, grad, channels_last)
    if result.numel():
        job = _job(shape, pool, windows, tau, channels_last)
        function = kernels[grad.dtype].pool_backward
        function(ctypes.byref(job), *map(get_data_ptr, (grad, codes, x, result)))
    return result


def _job(
    shape: Sequence[int], pool: str, windows: PoolWindows, tau: float, channels_last: bool
) -> _Job:
    b, c, *space = shape
    outer, inner = (b, c) if channels_last else (b * c, 1)
    axes = (*windows.size, *windows.stride, *windows.padding)
    elements = b * c * space[0] * space[1] * space[2]
    network, comparators = _network(windows.elements, any(windows.padding))
    return _Job(
        grid=(ctypes.c_int64 * 17)(outer, *space, inner, *windows.output_shape(shape), *axes),
        pool=POOLS.index(pool),
        code=choose_code(pool, windows),
        threads=torch.get_num_threads() if elements >= MIN_PARALLEL_ELEMENTS else 1,
        comparators=comparators,
        network=ctypes.cast(network, ctypes.c_void_p),
        tau=tau,
    )


@cache
def _network(elements: int, padded: bool) -> tuple[ctypes.Array, int]:
    network = build_median_network(elements, pair=padded or elements % 2 == 0)
    flat = [number for comparator in network for number in comparator]
    return (ctypes.c_int32 * len(flat))(*flat), len(network)
