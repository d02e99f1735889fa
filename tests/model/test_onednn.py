"""Small convolutions of one volume are computed by oneDNN."""

import pytest
import torch
from torch.nn.functional import conv3d

from unet3d.machine import Precision
from unet3d.memory.step.training_step import NullListener, make_step_factory
from unet3d.model.fused.conv_ops import compute_weight_gradient, convolve

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)

FORMAT = torch.channels_last_3d
SLOW = {"aten::slow_conv3d_forward", "aten::_slow_conv3d_forward", "aten::slow_conv3d"}


def list_operations(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return {event.key for event in profiler.key_averages()}


def test_a_small_convolution_takes_onednn_where_pytorch_does_not():
    x = torch.randn(1, 16, 18, 16, 16).contiguous(memory_format=FORMAT)
    weight = torch.randn(8, 16, 3, 3, 3).contiguous(memory_format=FORMAT)
    assert SLOW & list_operations(lambda: conv3d(x, weight, padding=1))
    assert not SLOW & list_operations(lambda: convolve(x, weight, [1, 1, 1]))
    result, expected = convolve(x, weight, [1, 1, 1]), conv3d(x, weight, padding=1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
    leaf = weight.clone().requires_grad_()
    output = conv3d(x, leaf, padding=1)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    own = compute_weight_gradient(gradient, x, weight, [1, 1, 1])
    torch.testing.assert_close(own, leaf.grad, rtol=1e-4, atol=1e-3)


def test_a_step_of_one_volume_has_no_matrix_products_of_windows(composed):
    settings = composed("data.batch_size=1", "model.width=16", "data.patch_size=[32,32,32]")
    config = settings.step.vary({"data.num_classes": 3, "data.in_channels": 1})
    step = make_step_factory(config, Precision("32", "32"), cuda=False)()
    assert not SLOW & list_operations(lambda: step.train(NullListener()))
