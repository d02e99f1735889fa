"""Small convolutions of one volume are computed by oneDNN."""

import pytest
import torch
from torch.nn.functional import conv3d

from unet3d.machine import Precision
from unet3d.model.fused.conv_ops import compute_weight_gradient, convolve
from unet3d.step.training_step import NullListener, build_step

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)

FORMAT = torch.channels_last_3d
SLOW = {"aten::slow_conv3d_forward", "aten::_slow_conv3d_forward", "aten::slow_conv3d"}


def test_a_small_convolution_and_its_gradient_equal_those_of_pytorch():
    x = torch.randn(1, 16, 18, 16, 16).contiguous(memory_format=FORMAT)
    weight = torch.randn(8, 16, 3, 3, 3).contiguous(memory_format=FORMAT)
    expected = conv3d(x, weight.requires_grad_(), padding=1)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    own = compute_weight_gradient(gradient, x, weight.shape, [1, 1, 1])
    torch.testing.assert_close(convolve(x, weight, [1, 1, 1]), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(own, weight.grad, rtol=1e-4, atol=1e-3)


def test_a_step_of_one_volume_has_no_matrix_products_of_windows(composed):
    settings = composed("data.batch_size=1", "model.width=16", "data.patch_size=[32,32,32]")
    config = settings.step.vary({"data.num_classes": 3, "data.in_channels": 1})
    step = build_step(config, Precision("32", "32"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step.train(NullListener())
    assert not SLOW & {event.key for event in profiler.key_averages()}
