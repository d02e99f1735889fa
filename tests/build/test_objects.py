import pytest
import torch
from torch import nn

from unet3d.build.objects import optimizer_factory
from unet3d.build.run import build, flag, tensor_cores
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


@pytest.mark.parametrize("key", ["tf32", "compile"])
def test_a_flag_is_true_or_false_and_nothing_else(composed, key):
    assert flag(composed(f"{key}=true").config, key) is True
    with pytest.raises(Misuse, match=f"{key} must be true or false"):
        flag(composed(f"{key}=maybe").config, key)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_run_says_that_it_warms_up_and_is_not_predicted(composed, tmp_path):
    plain, run = (
        build(composed("meter.predict=true", f"compile={choice}"), tmp_path)
        for choice in ("false", "true")
    )
    assert run.task.model._compiled_call_impl is not None
    assert run.prediction is None
    assert "the first one takes minutes" in " ".join(run.foreseen)
    assert list(run.task.state_dict()) == list(plain.task.state_dict())


def test_tf32_is_a_choice():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        tensor_cores(False)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        tensor_cores(True)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
