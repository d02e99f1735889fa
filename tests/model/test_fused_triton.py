"""The Triton kernels of fused blocks without a GPU: interpreted, and compiled for sm_90."""

import pytest
import torch

from unet3d.model.fused.kernels import cuda
from unet3d.model.fused.ops.upsample_ops import interpolate_gradient


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_pytorch(run_interpreted):
    run_interpreted("tests.model.helpers.interpreted")


def test_the_estimate_knows_what_the_upsampling_kernel_allocates(monkeypatch):
    monkeypatch.setattr(cuda, "launch", lambda *arguments, **constants: None)
    sizes, empty = [], torch.empty

    def count(*arguments, **options):
        result = empty(*arguments, **options)
        sizes.append(result.numel() * result.element_size())
        return result

    monkeypatch.setattr(torch, "empty", count)
    g, low = torch.zeros(2, 3, 4, 6, 8), torch.zeros(2, 3, 2, 3, 4)
    axes = [0, 4, 0, 2, 0, 6, 0, 3, 0, 8, 0, 4]
    cuda.interpolate_gradient(g, axes, True, low)
    assert sizes == interpolate_gradient.list_temporaries(g, axes, True, low)
