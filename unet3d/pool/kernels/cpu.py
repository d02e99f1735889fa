"""Call the compiled kernels of cpp/."""

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from unet3d.cpp_kernels import CppKernels, count_threads, get_data_ptr
from unet3d.pool.argmax_codes import choose_code
from unet3d.pool.sorting_network import build_median_network
from unet3d.pool.windows import PoolWindows, is_channels_last

POOLS = ("median", "max", "avg", "approx_median")  # in the order of cpp/grid.h

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


def forward(
    x: Tensor, y: Tensor, codes: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the output and the codes of the selected elements."""
    job = _make_job(x, pool, windows, tau)
    kernels[x.dtype].pool_forward(ctypes.byref(job), *map(get_data_ptr, (x, y, codes)))


def backward(
    grad: Tensor, saved: Tensor | None, result: Tensor, pool: str, windows: PoolWindows, tau: float
) -> None:
    """Write the gradient of the input."""
    job = _make_job(result, pool, windows, tau)
    codes, x = (None, saved) if pool == "approx_median" else (saved, None)
    function = kernels[grad.dtype].pool_backward
    function(ctypes.byref(job), *map(get_data_ptr, (grad, codes, x, result)))


def _make_job(x: Tensor, pool: str, windows: PoolWindows, tau: float) -> _Job:
    b, c, *space = x.shape
    outer, inner = (b, c) if is_channels_last(x) else (b * c, 1)
    grid = outer, *space, inner, *windows.output_shape(x.shape), *windows.numbers
    network, comparators = _get_network(windows.elements, any(windows.padding))
    return _Job(
        grid=(ctypes.c_int64 * 17)(*grid),
        pool=POOLS.index(pool),
        code=choose_code(pool, windows),
        threads=count_threads(x),
        comparators=comparators,
        network=ctypes.cast(network, ctypes.c_void_p),
        tau=tau,
    )


@cache
def _get_network(elements: int, padded: bool) -> tuple[ctypes.Array, int]:
    network = build_median_network(elements, padded=padded)
    flat = [number for comparator in network for number in comparator]
    return (ctypes.c_int32 * len(flat))(*flat), len(network)
