"""The Triton kernels without a GPU: interpreted, and compiled for sm_90."""

import pytest
import torch

from unet3d.pool.kernels import cuda
from unet3d.pool.layout import allocate_outputs
from unet3d.pool.windows import PoolWindows


@pytest.mark.slow
def test_interpreted_kernels_equal_the_references(run_interpreted):
    run_interpreted("tests.pool.helpers.interpreted")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "shape", "channels_last", "max_forward", "max_backward"),
    [
        (torch.bfloat16, (1, 2, 320, 150, 26), False, 130, 75),
        (torch.float32, (1, 2, 320, 150, 26), False, 220, 75),
        (torch.bfloat16, (1, 64, 20, 16, 12), True, 160, 90),
        (torch.bfloat16, (1, 2, 31, 15, 25), False, 195, 145),
    ],
)
def test_a_median_costs_few_instructions(dtype, shape, channels_last, max_forward, max_backward):
    from tests.pool.helpers.sass import count_instructions_per_lane
    from unet3d.pool.kernels.backward_triton import tiled_kernel
    from unet3d.pool.kernels.forward_triton import forward_kernel

    windows = PoolWindows.from_args(2, None, 0)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, memory_format=layout)
    y, codes = allocate_outputs(x, "median", windows)
    _, forward = cuda.forward_launch(x, y, codes, "median", windows, 0.0)
    _, backward = cuda.tiled_launch(y, codes, None, x, "median", windows, 0.0)
    assert count_instructions_per_lane(forward_kernel, forward) <= max_forward
    assert count_instructions_per_lane(tiled_kernel, backward) <= max_backward


def test_every_kernel_compiles_for_a_padded_window():
    from tests.pool.helpers.sass import count_instructions_per_lane
    from unet3d.pool.kernels.backward_triton import covering_kernel
    from unet3d.pool.kernels.forward_triton import forward_kernel

    windows, x = PoolWindows.from_args(3, 2, 1), torch.empty(1, 2, 20, 24, 32, dtype=torch.bfloat16)
    for pool in ("median", "max"):
        y, codes = allocate_outputs(x, pool, windows)
        _, forward = cuda.forward_launch(x, y, codes, pool, windows, 0.0)
        _, backward = cuda.covering_launch(y, codes, x, pool, windows)
        assert 0 < count_instructions_per_lane(forward_kernel, forward) < 1500
        assert 0 < count_instructions_per_lane(covering_kernel, backward) < 600
