"""Kernels for the CPU: cpp/ compiled for this machine when first needed, and kept.

They are C++ and not left to torch.compile: one compilation of 3 s serves every pooling, window,
layout and size of a type of element, and odd sizes and channels-last are as fast as the rest.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unet3d.pool.codes import code_of
from unet3d.pool.layout import empty, is_channels_last, outputs
from unet3d.pool.network import middle_network
from unet3d.pool.windows import Windows

log = logging.getLogger(__name__)

ELEMENTS = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "_Float16"}
POOLS = ("median", "max", "avg", "approx_median")  # in the order of cpp/grid.h
SOURCES = Path(__file__).parent / "cpp"
WORTH_COMPILING = 1 << 16  # elements: 2 ms in plain torch, against 3 s of compiling
WORTH_A_THREAD = 1 << 14  # elements

_built: set[torch.dtype] = set()


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


def serves(x: Tensor) -> bool:
    """Whether the compiled kernels take x: small tensors do not start a compiler."""
    if x.device.type != "cpu" or x.dtype not in ELEMENTS:
        return False
    if x.numel() < WORTH_COMPILING and x.dtype not in _built:
        return False
    return library(x.dtype) is not None


def forward(x: Tensor, pool: str, windows: Windows, tau: float = 0.0) -> tuple[Tensor, Tensor]:
    """The output and the recorded places."""
    y, recorded = outputs(x, pool, windows)
    if y.numel():
        job = _job(x.shape, pool, windows, tau, is_channels_last(x))
        door = _library(x.dtype).pool_forward
        door(ctypes.byref(job), _address(x), _address(y), _address(recorded))
    return y, recorded


def backward(
    grad: Tensor,
    pool: str,
    windows: Windows,
    shape: Sequence[int],
    channels_last: bool,
    recorded: Tensor | None = None,
    x: Tensor | None = None,
    tau: float = 0.0,
) -> Tensor:
    """The gradient by the input: from recorded places, from the input itself, or from neither."""
    result = empty(shape, grad, channels_last)
    if result.numel():
        job = _job(shape, pool, windows, tau, channels_last)
        door = _library(grad.dtype).pool_backward
        door(ctypes.byref(job), *map(_address, (grad, recorded, x, result)))
    return result


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for one type of element, compiled if they are not yet; None: they cannot be."""
    found = _load(dtype)
    if found is not None:
        _built.add(dtype)
    return found


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    found = library(dtype)
    assert found is not None
    return found


def _address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _job(
    shape: Sequence[int], pool: str, windows: Windows, tau: float, channels_last: bool
) -> _Job:
    b, c, *space = shape
    outer, inner = (b, c) if channels_last else (b * c, 1)
    axes = (*windows.size, *windows.stride, *windows.padding)
    elements = b * c * space[0] * space[1] * space[2]
    network, comparators = _network(windows.elements, any(windows.padding))
    return _Job(
        grid=(ctypes.c_int64 * 17)(outer, *space, inner, *windows.output_shape(shape), *axes),
        pool=POOLS.index(pool),
        code=code_of(pool, windows),
        threads=torch.get_num_threads() if elements >= WORTH_A_THREAD else 1,
        comparators=comparators,
        network=ctypes.cast(network, ctypes.c_void_p),
        tau=tau,
    )


@cache
def _network(elements: int, padded: bool) -> tuple[ctypes.Array, int]:
    network = middle_network(elements, pair=padded or elements % 2 == 0)
    flat = [number for comparator in network for number in comparator]
    return (ctypes.c_int32 * len(flat))(*flat), len(network)


@cache
def _load(dtype: torch.dtype) -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        log.warning("no C++ compiler found: poolings run in plain torch, several times slower")
        return None
    name = f"pool-{ELEMENTS[dtype].strip('_').lower()}-{_fingerprint(compiler)}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unet3d"
    if not (folder / name).exists():
        log.info("compiling the pooling kernels for %s: about 5 s, once, kept in %s", dtype, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile(compiler, ELEMENTS[dtype], folder / name)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            log.warning("the pooling kernels do not compile, plain torch instead: %.300s", reason)
            return None
    return ctypes.CDLL(str(folder / name))


def _compile(compiler: str, element: str, target: Path) -> None:
    """Compile beside the target and move it there: another process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, "-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC"]
        command += [f"-DELEMENT={element}", "-w", str(SOURCES / "pool.cpp"), "-o", str(made)]
        for extra in (["-march=native", "-fopenmp"], ["-fopenmp"], []):
            try:
                subprocess.run([*command, *extra], check=True, capture_output=True, text=True)
                break
            except subprocess.CalledProcessError:
                if not extra:
                    raise
        made.replace(target)


def _fingerprint(compiler: str) -> str:
    """What a library depends on: a home folder is shared by machines with other processors."""
    parts = [compiler.encode(), platform.machine().encode()]
    parts += [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = processor.read_text().splitlines()
        parts += [next((line for line in lines if line.startswith("flags")), "").encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
