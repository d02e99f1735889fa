import pytest
import torch
from torch import nn

from unet3d.config.instantiate import (
    build_network,
    build_preprocessing,
    make_optimizer_factory,
    resolve_dataset_facts,
)
from unet3d.data.case import Description
from unet3d.errors import UsageError
from unet3d.machine.device import Precision
from unet3d.memory.batch_search import CONTEXT
from unet3d.workflows.memory import strategies
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.training.build import build_training, parse_bool, set_tf32


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_is_fused_unless_a_scaler_meets_clipping(composed, optimizer):
    def fused(precision, *overrides):
        cfg = composed(f"optimizer={optimizer}", *overrides).config
        factory = make_optimizer_factory(cfg, Precision(precision, precision))
        return factory([nn.Parameter(torch.zeros(1))]).defaults["fused"]

    assert fused("32") is True
    assert fused("16") is None
    assert fused("bf16") is True
    assert fused("16", "trainer.gradient_clip_val=null") is True
    assert fused("32", "optimizer.fused=false") is False


@pytest.mark.parametrize("key", ["tf32", "compile"])
def test_a_flag_is_true_or_false_and_nothing_else(composed, key):
    assert parse_bool(composed(f"{key}=true").config, key) is True
    with pytest.raises(UsageError, match=f"{key} must be true or false"):
        parse_bool(composed(f"{key}=maybe").config, key)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_run_says_that_it_warms_up_and_is_not_predicted(composed, tmp_path):
    plain, run = (
        build_training(composed("memory.estimate=true", f"compile={choice}"), tmp_path)
        for choice in ("false", "true")
    )
    assert run.task.model._compiled_call_impl is not None
    assert run.prediction is None
    assert "the first one takes minutes" in " ".join(run.foreseen)
    assert list(run.task.state_dict()) == list(plain.task.state_dict())


def test_tf32_is_a_choice():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_tf32(False)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        set_tf32(True)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_auto_takes_the_first_rung_that_is_predicted_to_fit(composed, tmp_path, monkeypatch):
    words = ["checkpointing=auto", "data.patch_size=[64,64,64]", "model.width=32"]
    request = composed(*words, "trainer.accelerator=cpu")
    used = Precision("32", "32")
    peaks = {
        rung: estimate_memory(composed(*words[1:], f"checkpointing={rung}")).peak.allocated
        for rung in ("none", "skips", "lean", "leanest")
    }
    for total, rung in ((2**40, "none"), (peaks["lean"] + CONTEXT, "lean"), (0, "leanest")):
        monkeypatch.setattr(strategies, "get_available_bytes", lambda _, total=total: total)
        found = resolve_strategy(request, used, cuda=False)
        assert found.choices["checkpointing"] == rung
        assert "encoders" in found.config.checkpointing


def test_auto_is_said_to_be_what_it_became(composed, tmp_path):
    run = build_training(composed("checkpointing=auto"), tmp_path)
    assert run.foreseen == ["checkpointing=auto: fused"]
    assert run.config["checkpointing"]["encoders"] == ["store_last"]


def test_auto_without_the_gpu_that_it_is_for_names_the_choices(composed):
    with pytest.raises(UsageError, match="fused, skips, lean, leanest"):
        estimate_memory(composed("checkpointing=auto", "trainer.accelerator=auto"))


def test_two_classes_of_one_name_are_refused(composed):
    said = Description(channels=("MRI",), classes=("background", "a", "a"))
    with pytest.raises(UsageError, match="names of their own, got background, a, a"):
        resolve_dataset_facts(composed("data.num_classes=3").config, said)


def test_a_network_asks_the_data_set_for_its_channels_and_classes(composed, decathlon_folder):
    request = composed("data=decathlon", f"data.root={decathlon_folder}", base=[])
    widths = {p.shape[0] for name, p in build_network(request).named_parameters() if "head" in name}
    assert request.config.data.in_channels == 1
    assert widths == {3}


def test_a_background_that_is_not_zero_is_left_out_of_the_normalization(composed):
    def prepared(*words):
        found = build_preprocessing(composed(*words).config, [], ["MRI"])
        return found.background, found.normalize

    assert prepared() == ((0,), ("zscore",))
    assert prepared("data.background=auto") == (("auto",), ("zscore_nonzero",))
    assert prepared("data.background=[-3.5]", "data.normalize=zscore") == ((-3.5,), ("zscore",))
