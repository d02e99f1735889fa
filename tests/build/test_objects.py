import pytest
import torch
from torch import nn

from unet3d.build.objects import optimizer_factory
from unet3d.build.run import tensor_cores
from unet3d.machine.device import Precision
from unet3d.types import Misuse


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_is_fused_unless_mixed_precision_is_clipped(composed, optimizer):
    def fused(precision, *overrides):
        cfg = composed(f"optimizer={optimizer}", *overrides).config
        factory = optimizer_factory(cfg, Precision(precision, precision))
        return factory([nn.Parameter(torch.zeros(1))]).defaults["fused"]

    assert fused("32") is True
    assert fused("16") is None
    assert fused("bf16") is None
    assert fused("16", "trainer.gradient_clip_val=null") is True
    assert fused("32", "optimizer.fused=false") is False


def test_tf32_is_a_choice_and_nothing_else_than_true_or_false():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        tensor_cores(False)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        tensor_cores(True)
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(Misuse, match="tf32"):
            tensor_cores("yes")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
