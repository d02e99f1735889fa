import pytest
import torch
import torch.nn.functional as F

from unet3d.memory.autocast import use_cuda_autocast_rules


def upsample(x):
    return F.interpolate(x, scale_factor=2, mode="trilinear")


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        *((f, torch.float32) for f in (upsample, torch.exp, torch.sum, lambda x: x.softmax(0))),
        (lambda x: F.conv3d(x, torch.ones(1, 1, 1, 1, 1)), torch.bfloat16),
        (lambda x: F.max_pool3d(x, 2), torch.bfloat16),
        (lambda x: torch.cat([x, x]), torch.bfloat16),
    ],
)
def test_operations_run_in_the_types_that_they_have_on_cuda(function, dtype):
    x = torch.randn(1, 1, 2, 2, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with use_cuda_autocast_rules():
            assert function(x).dtype == dtype
        assert upsample(x).dtype == torch.bfloat16  # a CPU's rule
