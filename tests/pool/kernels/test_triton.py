"""The Triton kernels without a GPU: interpreted, and compiled for sm_90."""

import pytest
import torch

from scripts.gpu.kernels import run_kernels
from unet3d.pool.kernels import cuda
from unet3d.pool.windows import PoolWindows
from unet3d.triton_kernels import collect_launches


@pytest.mark.slow
def test_interpreted_kernels_equal_the_references(run_interpreted):
    run_interpreted("tests.pool.helpers.interpreted")


def count_instructions(shape, dtype, layout, window):
    """Return the instructions per lane of the forward and the backward kernel of a median."""
    from tests.pool.helpers.sass import count_instructions_per_lane

    x = torch.empty(shape, dtype=dtype, memory_format=layout)
    windows = PoolWindows.from_args(*window)
    upper = x.new_empty(*shape[:2], *windows.output_shape(shape))
    with collect_launches() as launches:
        run_kernels(cuda, x, upper, "median", windows, 0.0)
    return [count_instructions_per_lane(one.kernel, one.constants) for one in launches]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "shape", "layout", "max_forward", "max_backward"),
    [
        (torch.bfloat16, (1, 2, 320, 150, 26), torch.contiguous_format, 130, 75),
        (torch.float32, (1, 2, 320, 150, 26), torch.contiguous_format, 220, 75),
        (torch.bfloat16, (1, 64, 20, 16, 12), torch.channels_last_3d, 160, 90),
        (torch.bfloat16, (1, 2, 31, 15, 25), torch.contiguous_format, 195, 145),
    ],
)
def test_a_median_costs_few_instructions(dtype, shape, layout, max_forward, max_backward):
    forward, backward = count_instructions(shape, dtype, layout, (2, None, 0))
    assert forward <= max_forward
    assert backward <= max_backward


def test_the_kernels_for_overlapping_windows_compile():
    size = (1, 2, 20, 24, 32)
    forward, backward = count_instructions(size, torch.float16, torch.contiguous_format, (3, 2, 1))
    assert 0 < forward < 1500
    assert 0 < backward < 600
