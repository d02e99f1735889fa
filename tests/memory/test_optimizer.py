import pytest
import torch
from torch import nn

from unet3d.machine import Precision
from unet3d.memory.step.build import MIN_HALF_EPSILON, make_optimizer_factory


def build(settings, precision):
    """Build the optimizer of one parameter."""
    factory = make_optimizer_factory(settings.step.optimizer, Precision(precision, precision))
    return factory([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_is_fused_unless_that_is_switched_off(composed, optimizer):
    def is_fused(precision, *overrides):
        settings = composed(f"optimizer={optimizer}", *overrides)
        return build(settings, precision).defaults["fused"]

    assert is_fused("32") is True
    assert is_fused("16") is True
    assert is_fused("bf16") is True
    assert is_fused("32", "optimizer.fused=false") is False


def test_epsilon_is_large_enough_for_weights_in_fp16(composed):
    assert build(composed(), "16").defaults["eps"] == 1e-8
    assert build(composed(), "16-true").defaults["eps"] == MIN_HALF_EPSILON
    assert build(composed("optimizer.eps=0.01"), "16-true").defaults["eps"] == 0.01
