import weakref

import pytest
import torch

from tests.data.helpers.datasets import write_nnunet
from unet3d.commands.train import build_training
from unet3d.training.trainer import seed_run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_run_warns_of_its_first_step_and_is_estimated_with_plain_modules(
    composed, tmp_path
):
    plain, compiled = (
        build_training(composed("memory.estimate=true", f"compile={choice}"), tmp_path)
        for choice in ("false", "true")
    )
    assert compiled.module.model._compiled_call_impl is not None
    assert compiled.estimate.peak.allocated > plain.estimate.peak.allocated
    assert "the first step takes minutes" in " ".join(compiled.notes)
    assert list(compiled.module.state_dict()) == list(plain.module.state_dict())


def test_a_step_frees_its_logits_before_backward_ends(composed, tmp_path):
    """The module that trains keeps nothing that the estimated step frees."""
    run, logits, alive = build_training(composed("trainer.max_steps=1"), tmp_path), [], []
    network = run.module.model
    handle = network.register_forward_hook(lambda *a: logits.append(weakref.ref(a[-1])))
    network.encoder[0].convs[0].conv.weight.register_post_accumulate_grad_hook(
        lambda _: alive.append(logits[-1]()) or handle.remove()
    )
    run.trainer.fit(run.module, run.data)
    assert alive == [None]


def test_a_step_of_fewer_batches_than_wanted_is_not_weakened(composed, tmp_path):
    words = ["optimizer=sgd", "fold=none", "data.batch_size=1", "trainer.max_steps=1"]
    runs = []
    for wanted in (5, 500):
        options = [*words, f"trainer.accumulate_grad_batches={wanted}"]
        runs.append(build_training(composed(*options), tmp_path))
        runs[-1].trainer.fit(runs[-1].module, runs[-1].data)
    (exact, more), batches = runs, len(runs[0].data.train_loader)
    assert batches == 5
    curves, loss = exact.callbacks.curves.list_points(), exact.module.nonfinite_guard.step_loss
    assert curves["train/loss"] == [[1, loss]]
    assert loss != exact.module.nonfinite_guard.loss  # of the last batch
    assert float(exact.trainer.callback_metrics["train/loss"]) == loss
    assert "500, but an epoch has 5 batches" in "".join(more.notes)
    for a, b in zip(exact.module.parameters(), more.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    exact.trainer.accumulate_grad_batches = 3
    assert [exact.module.get_loss_weight(n) for n in range(5)] == [1, 1, 1, 1.5, 1.5]


def test_tf32_can_be_switched_off(composed):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        seed_run(composed("tf32=false"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        seed_run(composed("tf32=true"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_a_strategy_that_was_not_requested_is_noted_and_recorded(composed, tmp_path):
    assert build_training(composed("checkpointing=lean"), tmp_path).notes == []
    run = build_training(composed("checkpointing=auto"), tmp_path)
    assert run.notes == ["checkpointing=auto: using fused"]
    assert run.config["checkpointing"]["encoder_last"] == ["store"]


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ([], 1),  # one window for four patches
        (["data.patch_size=[8,8,8]"], 14),  # 27 windows
        (["data.patch_size=[8,8,8]", "trainer.max_steps=null", "trainer.max_epochs=40"], 20),
        (["data.patch_size=[8,8,8]", "trainer.max_steps=null", "trainer.max_epochs=3"], 3),
        (["data.patch_size=[8,8,8]", "trainer.check_val_every_n_epoch=2"], 2),
    ],
)
def test_validation_computes_at_most_half_as_many_windows_as_training_patches(
    composed, tmp_path, options, epochs
):
    run = build_training(composed("model.depth=2", *options), tmp_path)
    assert run.trainer.check_val_every_n_epoch == epochs
    is_said = any(f"validation every {epochs} epochs" in note for note in run.notes)
    assert is_said == (epochs in (14, 20, 3))


def test_regions_of_the_dataset_reach_network_loss_and_metadata(composed, small, tmp_path):
    labels = {"background": 0, "whole": [1, 2], "front": [1]}
    write_nnunet(tmp_path / "data", 5, labels=labels, regions_class_order=[2, 1])
    base = [word for word in small if ".layout" not in word and "data.root" not in word]
    data = ["data=nnunet", f"data.root={tmp_path / 'data'}", f"data.cache={tmp_path / 'cache'}"]
    run = build_training(composed(*data, base=base), tmp_path)
    regions = {"whole": [1, 2], "front": [1]}
    assert list(run.module.loss.buffers())  # the labels of each region
    assert run.module.model.heads[0].out_channels == 2
    assert run.module.metadata["regions"] == regions
    assert run.module.metadata["region_labels"] == [2, 1]
    logits = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])  # (regions, voxels)
    assert run.module.step.sliding_window.decide(logits).tolist() == [2, 1]
    assert run.config["loss"]["regions"] == regions
    assert run.config["model"]["num_classes"] == 2
    assert run.config["data"]["num_classes"] == 3


def test_a_strategy_of_a_user_need_not_say_the_size_of_its_tiles(composed, tmp_path):
    run = build_training(composed("~checkpointing.tile_mib", "memory.estimate=true"), tmp_path)
    assert run.estimate is not None
    assert run.module.model.retention.tile_bytes is None
