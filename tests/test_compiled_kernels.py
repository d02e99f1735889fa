"""The Triton kernels, compiled for GPUs that this machine does not have."""

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.gpu.kernels import run_kernels
from unet3d.loss.dice_terms import make_region_table
from unet3d.loss.kernels import cuda as loss_kernels
from unet3d.model.fused.kernels import cuda as block_kernels
from unet3d.pool.kernels import cuda as pool_kernels
from unet3d.pool.windows import PoolWindows
from unet3d.triton_kernels import OPTIONS

triton = pytest.importorskip("triton")
CHANNELS_LAST = {"memory_format": torch.channels_last_3d}


class Driver:
    """Stand for the driver of a GPU, for which kernels are compiled and not loaded."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.capability, self.target = capability, GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def compiled(request, monkeypatch, tmp_path) -> dict[str, int]:
    """Compile kernels instead of launching them; bytes of registers that each spills."""
    from triton.runtime import driver

    spills = {}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def compile_kernel(kernel, device, grid, *arguments, **constants):
        result = kernel.warmup(*arguments, grid=grid, **constants, **OPTIONS)
        cubin = tmp_path / f"{result.hash}.cubin"
        cubin.write_bytes(result.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True)
        shown = {name: x for name, x in constants.items() if isinstance(x, int | str)}
        stack = re.search(r"STACK:(\d+)", usage.stdout)
        assert stack, usage.stderr
        spills[f"{kernel.fn.__name__} {shown}"] = int(stack[1])

    monkeypatch.setattr(driver, "_active", Driver(request.param))
    for kernels in (block_kernels, loss_kernels, pool_kernels):
        monkeypatch.setattr(kernels, "launch", compile_kernel)
    return spills


def make_map(channels: int, size: int) -> Tensor:
    return torch.empty(2, channels, *[size] * 3, dtype=torch.bfloat16).contiguous(**CHANNELS_LAST)


def assert_none_spill(compiled: dict[str, int], *names: str) -> None:
    assert {name.partition(" ")[0] for name in compiled} == set(names)
    assert {name: size for name, size in compiled.items() if size} == {}


@pytest.mark.slow
def test_kernels_of_blocks_keep_their_values_in_registers(compiled):
    numbers = [torch.empty(2, 64) for _ in range(4)]
    scale, shift, mean, rstd = numbers
    y, low = make_map(64, 16), make_map(64, 8)
    total, sums = torch.empty(8, 2, 2, 64), torch.empty(1, 2, 2, 64)
    for count in (1, 2, 6):
        terms = [y] * count, [scale] * count, [shift] * count, [0.01] * count
        block_kernels.normalize(*terms, add=False, out=y)
    block_kernels.norm_gradient(y, y, *numbers, slope=0.01, out=y)
    block_kernels.add_moments(y, 0, sums)
    block_kernels.add_norm_gradient_sums(y, y, *numbers, slope=0.01, first=True, sums=sums)
    fixed = (None,) * 6
    block_kernels.fold_statistics(total, 4096, 64, False, 1e-5, *fixed, 0.1)
    block_kernels.fold_gradient(total, scale, mean, rstd, total, 4096, 64, False)
    for linear in (False, True):
        axes = [0, 16, 0, 8] * 3
        block_kernels.interpolate(low, axes, linear, y)
        block_kernels.interpolate_gradient(y, axes, linear, low.float())
    norm = ("normalize_kernel", "gradient_kernel", "gradient_sums_kernel", "moments_kernel")
    parts = ("merge_moments_kernel", "add_parts_kernel", "fold_statistics_kernel")
    sampling = ("fold_gradient_kernel", "interpolate_kernel", "downsample_kernel")
    assert_none_spill(compiled, *norm, *parts, *sampling)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 118, 2000])
def test_kernels_of_the_loss_keep_their_values_in_registers(compiled, classes):
    labels = torch.empty(2, 4, 4, 4, dtype=torch.int16)
    logits, grad = make_map(classes, 4), torch.empty(3, 2, classes)
    table = make_region_table([1] * classes)
    options = [(None, 0.0, 0.0), (None, 2.0, 0.0), (None, 0.0, 0.1), (table, 0.0, 0.0)]
    for regions, gamma, smoothing in options if classes == 2 else options[:1]:
        loss_kernels.sum_terms(logits, labels, regions, gamma, smoothing)
        loss_kernels.compute_gradient(logits, labels, regions, grad, gamma, smoothing)
    assert_none_spill(compiled, "sum_terms_kernel", "gradient_kernel")


@pytest.mark.slow
def test_kernels_of_poolings_keep_their_values_in_registers(compiled):
    for pool, last in product(("max", "avg", "median", "approx_median"), (False, True)):
        x = make_map(64, 8)
        x = x if last else x.contiguous()
        upper = make_map(64, 4) if last else make_map(64, 4).contiguous()
        run_kernels(pool_kernels, x, upper, pool, PoolWindows.from_args(2, None, 0), 0.1)
    run_kernels(pool_kernels, x, upper, "max", PoolWindows.from_args(3, 2, 1), 0.1)
    assert_none_spill(compiled, "forward_kernel", "tiled_kernel", "covering_kernel")
