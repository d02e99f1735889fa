"""The compiled kernels: values, gradients, compilation, cache and fallback."""

import logging
from functools import cache

import pytest
import torch

from tests.pool.helpers.volumes import DTYPES, LAYOUTS, WINDOWS, cover_pairs, make_volume
from unet3d import cpp_kernels
from unet3d.pool.kernels import cpu
from unet3d.pool.layout import is_channels_last, to_supported_layout
from unet3d.pool.median import MedianPool3d
from unet3d.pool.reference import average, average_gradient, maximum, median
from unet3d.pool.selection import scatter_gradient
from unet3d.pool.windows import PoolWindows

ANNOUNCE = cpp_kernels.announce_compilation
REFERENCES = {"median": median, "max": maximum}


@pytest.fixture
def uncompiled(monkeypatch):
    """Forget all loaded libraries, as in a new process."""
    monkeypatch.setattr(cpu.kernels, "libraries", {})
    monkeypatch.setattr(cpp_kernels, "announce_compilation", lambda folder: None)
    return monkeypatch


@pytest.mark.parametrize(("window", "layout", "dtype"), cover_pairs(WINDOWS, LAYOUTS, DTYPES))
@pytest.mark.parametrize("name", REFERENCES)
def test_compiled_selection_and_its_gradient_equal_the_reference(name, window, layout, dtype):
    windows = PoolWindows.from_args(*WINDOWS[window])
    for i, kind in enumerate(("random", "tied", "infinite", "nan", "huge", "subnormal")):
        width = (35, 19, 9, 5, 4, 16)[i]  # rows for every number of lanes
        x = to_supported_layout(LAYOUTS[layout](make_volume((1, 5, 6, 7, width), kind, dtype)))
        assert cpu.kernels.library(dtype)
        y, codes = cpu.forward(x, name, windows)
        expected, indices = REFERENCES[name](x, windows)
        assert torch.equal(y.nan_to_num(nan=7), expected.nan_to_num(nan=7))
        upper, last = torch.randn_like(y), is_channels_last(x)
        g = cpu.backward(upper, name, windows, x.shape, last, codes=codes)
        g_expected = scatter_gradient(upper, indices, windows, x.shape)
        if any(k > s for k, s in zip(windows.size, windows.stride, strict=True)):
            # Windows overlap, and sums run in another order.
            tolerance = torch.finfo(dtype).eps * 8
            torch.testing.assert_close(g, g_expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(g, g_expected)


@pytest.mark.parametrize(("window", "layout", "dtype"), cover_pairs(WINDOWS, LAYOUTS, DTYPES))
def test_compiled_average_equals_the_reference(window, layout, dtype):
    windows = PoolWindows.from_args(*WINDOWS[window])
    x = to_supported_layout(LAYOUTS[layout](make_volume((1, 5, 6, 7, 19), "random", dtype)))
    assert cpu.kernels.library(dtype)
    y, _ = cpu.forward(x, "avg", windows)
    torch.testing.assert_close(y, average(x, windows))
    g = cpu.backward(y, "avg", windows, x.shape, is_channels_last(x))
    torch.testing.assert_close(g, average_gradient(y, x.shape, windows))


def test_a_small_volume_does_not_start_the_compiler(uncompiled):
    uncompiled.setattr(cpu.kernels, "compile", lambda *_: pytest.fail("compiled"))
    uncompiled.setenv("XDG_CACHE_HOME", "/nonexistent")
    assert MedianPool3d(2)(torch.randn(1, 1, 8, 8, 8)).isfinite().all()


def test_compilation_is_one_line_that_is_shown_and_cached(uncompiled, tmp_path, caplog):
    uncompiled.setattr(cpp_kernels, "announce_compilation", cache(ANNOUNCE.__wrapped__))
    uncompiled.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.randn(1, 1, 64, 64, 64)
    with caplog.at_level(logging.WARNING, logger="unet3d"):  # the level of Python's default
        MedianPool3d(2)(x)
        MedianPool3d(2)(x.bfloat16())
        cpu.kernels.libraries.clear()
        MedianPool3d(2)(x)
    (record,) = caplog.records
    assert "compiling C++ kernels for this machine" in record.getMessage()
    assert len(list(tmp_path.glob("unet3d/cpp/*.so"))) == 2


@pytest.mark.parametrize("fault", ["compiler", "library"])
def test_without_a_compiler_or_library_that_works_pooling_falls_back_to_plain_pytorch(
    uncompiled, tmp_path, caplog, fault
):
    x = torch.randn(1, 1, 64, 64, 64)
    uncompiled.setenv("XDG_CACHE_HOME", str(tmp_path))
    if fault == "compiler":
        uncompiled.setenv("CXX", "false")
        expected = "plain PyTorch"
    else:
        uncompiled.setattr(cpu.kernels, "compile", lambda *arguments: arguments[-1].touch())
        expected = "file too short (XDG_CACHE_HOME names another folder"
    assert torch.equal(MedianPool3d(2)(x), median(x, PoolWindows.from_args(2, None, 0))[0])
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert expected in record.getMessage()


def test_a_compiler_without_openmp_makes_kernels_of_one_thread_and_says_so(
    uncompiled, tmp_path, caplog
):
    compiler = tmp_path / "clang++"  # Apple's
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    uncompiled.setenv("XDG_CACHE_HOME", str(tmp_path))
    uncompiled.setenv("CXX", str(compiler))
    x = torch.randn(1, 1, 64, 64, 64)
    assert torch.equal(MedianPool3d(2)(x), median(x, PoolWindows.from_args(2, None, 0))[0])
    assert cpu.kernels.libraries[torch.float32]
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert record.getMessage() == (
        f"{compiler} has no OpenMP: the pooling kernels use one thread; install g++ and set CXX"
    )
