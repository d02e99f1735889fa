"""The compiled kernels: values, gradients, compilation, cache and fallback."""

import ctypes
import logging
from functools import cache

import pytest
import torch

from scripts.gpu.kernels import run_kernels
from tests.pool.helpers.volumes import DTYPES, LAYOUTS, WINDOWS, cover_pairs, make_volume
from unet3d import cpp_kernels
from unet3d.pool.kernels import cpu, plain
from unet3d.pool.median import MedianPool3d
from unet3d.pool.operators import to_supported_layout
from unet3d.pool.windows import PoolWindows

QUICK = ("2x2x2", "3x3x3 stride 2 padding 1")
ANNOUNCE = cpp_kernels.announce_compilation


@pytest.mark.parametrize(
    ("window", "layout", "dtype"),
    [
        pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow)
        for case in cover_pairs(WINDOWS, LAYOUTS, DTYPES)
    ],
)
@pytest.mark.parametrize("pool", ["median", "max", "avg", "approx_median"])
def test_compiled_kernels_equal_plain_pytorch(pool, window, layout, dtype):
    windows = PoolWindows.from_args(*WINDOWS[window])
    selects = pool in ("median", "max")
    kinds = ("random", "tied", "infinite", "nan", "huge", "subnormal")
    assert cpu.kernels.library(dtype)
    for i, kind in enumerate(kinds if selects else ("random", "post-ReLU")):
        width = (35, 19, 9, 5, 4, 16)[i]  # rows for every number of lanes
        x = to_supported_layout(LAYOUTS[layout](make_volume((1, 5, 6, 7, width), kind, dtype)))
        upper = torch.randn(1, 5, *windows.output_shape(x.shape)).to(dtype)
        if not x.is_contiguous():
            upper = upper.contiguous(memory_format=torch.channels_last_3d)
        y, codes, g = run_kernels(cpu, x, upper, pool, windows, 0.3)
        expected, codes_expected, g_expected = run_kernels(plain, x, upper, pool, windows, 0.3)
        assert torch.equal(codes, codes_expected)
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(y, expected, **(exact if selects else {}))
        # Where windows overlap, sums run in another order.
        tiles = all(k <= s for k, s in zip(windows.size, windows.stride, strict=True))
        tolerance = 0 if selects and tiles else torch.finfo(dtype).eps * 8
        torch.testing.assert_close(g, g_expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """Forget the library of the poolings, as in a new process with an empty cache."""
    monkeypatch.setattr(cpu.kernels, "libraries", {})
    monkeypatch.setattr(cpp_kernels, "announce_compilation", lambda folder: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize("fault", ["plain PyTorch", "file too short (XDG_CACHE_HOME names another"])
def test_a_compiler_or_library_that_does_not_work_is_named(uncompiled, caplog, fault):
    """That plain PyTorch gives the same step is tested in tests/test_platforms.py."""
    uncompiled.setenv("CXX", "false")
    if fault.startswith("file"):
        uncompiled.setattr(cpu.kernels, "compile", lambda *arguments: arguments[-1].touch())
    assert MedianPool3d(2)(torch.randn(1, 1, 64, 64, 64)).isfinite().all()
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert fault in record.getMessage()


@pytest.fixture
def small_kernels(uncompiled, tmp_path):
    """Return kernels that compile at once."""
    source = tmp_path / "source" / "size.cpp"
    source.parent.mkdir()
    source.write_text(
        'struct Bf16 { short bits; };\nextern "C" int size() { return sizeof(ELEMENT); }\n'
    )
    return cpp_kernels.CppKernels(source, "small")


def test_compilation_is_one_line_that_is_shown_and_cached(
    uncompiled, small_kernels, tmp_path, caplog
):
    uncompiled.setattr(cpp_kernels, "announce_compilation", cache(ANNOUNCE.__wrapped__))
    with caplog.at_level(logging.WARNING, logger="unet3d"):  # the level of Python's default
        assert small_kernels[torch.float32].size() == 4
        assert small_kernels[torch.bfloat16].size() == 2
        small_kernels.libraries.clear()
        uncompiled.setattr(small_kernels, "compile", lambda *_: pytest.fail("compiled again"))
        assert isinstance(small_kernels.library(torch.float32), ctypes.CDLL)
    (record,) = caplog.records
    assert "compiling C++ kernels for this machine" in record.getMessage()


def test_a_compiler_without_openmp_makes_kernels_of_one_thread_and_says_so(
    uncompiled, small_kernels, tmp_path, caplog
):
    compiler = tmp_path / "clang++"  # Apple's
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    uncompiled.setenv("CXX", str(compiler))
    assert small_kernels[torch.float32].size() == 4
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert record.getMessage() == (
        f"{compiler} has no OpenMP: the small kernels use one thread; install g++ and set CXX"
    )
