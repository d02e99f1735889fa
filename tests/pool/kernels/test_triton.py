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


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "shape", "window", "limits"),
    [
        (torch.bfloat16, (1, 2, 320, 150, 26), (2, None, 0), (130, 75)),
        (torch.bfloat16, (1, 64, 20, 16, 12), (2, None, 0), (160, 90)),  # channels-last
        (torch.bfloat16, (1, 2, 31, 15, 25), (2, None, 0), (195, 145)),
        (torch.float16, (1, 2, 20, 24, 32), (3, 2, 1), (1500, 600)),
    ],
)
def test_a_median_costs_few_instructions(dtype, shape, window, limits):
    """Per lane, in the forward and the backward kernel, compiled for sm_90."""
    from tests.pool.helpers.sass import count_instructions_per_lane

    layout = torch.channels_last_3d if shape[1] > 2 else torch.contiguous_format
    x, windows = (
        torch.empty(shape, dtype=dtype, memory_format=layout),
        PoolWindows.from_args(*window),
    )
    upper = x.new_empty(*shape[:2], *windows.output_shape(shape))
    with collect_launches() as launches:
        run_kernels(cuda, x, upper, "median", windows, 0.0)
    counts = [count_instructions_per_lane(one.kernel, one.constants) for one in launches]
    assert all(0 < count <= limit for count, limit in zip(counts, limits, strict=True)), counts
