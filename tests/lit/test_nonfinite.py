import json
import math
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from unet3d.errors import RunError
from unet3d.lit import nonfinite
from unet3d.lit.nonfinite import (
    NonFiniteGuard,
    find_first_nonfinite_module,
    get_running_stats,
    locate_nonfinite,
)
from unet3d.workflows.training.build import build_training


def made(composed, tmp_path, *overrides):
    return build_training(composed("fold=none", "model.norm=batch", *overrides), tmp_path)


def fit(run):
    run.trainer.fit(run.task, run.train_loader)
    return run


def spoil_images(run, *calls):
    """NaN in the image of these forwards, counted from 0."""
    seen = []

    def spoil(module, args):
        if module.training:
            seen.append(1)
            if len(seen) - 1 in calls:
                args[0].fill_(torch.nan)

    run.task.model.register_forward_pre_hook(spoil)


def spoil_gradients(run, *steps):
    """Infinite gradients of one weight in these steps."""
    weight = run.task.model.decoder[0].convs[0].conv.weight
    weight.register_hook(lambda g: g * torch.inf if run.trainer.global_step in steps else None)


class States:
    """All numbers of weights, moments and running statistics, after each step."""

    def __init__(self, run):
        self.all = []
        original = run.task.finite.end_step

        def end_step():
            original()
            state = [p.detach().clone() for p in run.task.model.state_dict().values()]
            for moments in run.trainer.optimizers[0].state.values():
                state += [value.clone() for value in moments.values()]
            self.all.append(state)

        run.task.finite.end_step = end_step

    def same(self, a, b):
        return all(x.equal(y) for x, y in zip(self.all[a], self.all[b], strict=True))

    def finite(self):
        return all(x.isfinite().all() for state in self.all for x in state)


@pytest.mark.parametrize("checkpointing", ["none", "fused", "lean", "blocks"])
def test_a_loss_that_is_nan_names_step_cases_and_layer(composed, tmp_path, checkpointing):
    run = made(composed, tmp_path, f"checkpointing={checkpointing}", "trainer.max_steps=3")
    with torch.no_grad():
        run.task.model.get_submodule("encoder.1.convs.0.conv").weight[0, 0, 0, 0, 0] = torch.nan
    name = r"encoder\.1\.convs\.0\.conv, whose weights are not finite"
    with pytest.raises(RunError, match=rf"nan at step 0, cases case_\d+.*came out of {name}"):
        fit(run)


def test_a_layer_that_overflows_is_named_though_its_weights_are_finite(composed, tmp_path):
    run = made(composed, tmp_path)
    with torch.no_grad():
        run.task.model.get_submodule("decoder.0.convs.0.conv").weight.fill_(3e38)
    with pytest.raises(RunError, match=r"came out of decoder\.0\.convs\.0\.conv; max_skipped"):
        fit(run)


def test_the_loss_itself_and_the_image_itself_are_named(composed, tmp_path):
    run = made(composed, tmp_path / "loss")
    run.task.loss.register_forward_hook(lambda module, args, loss: loss * torch.inf)
    with pytest.raises(RunError, match="the network's output is finite, the loss itself is not"):
        fit(run)
    run = made(composed, tmp_path / "image")
    spoil_images(run, 0)
    with pytest.raises(RunError, match="the image itself is not finite"):
        fit(run)


def test_looking_for_the_layer_leaves_the_network_as_it_was(composed, tmp_path):
    model = made(composed, tmp_path).task.model
    model.encoder[1].convs[0].conv.weight.data.fill_(torch.inf)
    before, keep = {k: v.clone() for k, v in model.state_dict().items()}, model.keep
    assert (
        find_first_nonfinite_module(model, torch.randn(2, 1, 16, 16, 16))
        == "encoder.1.convs.0.conv"
    )
    assert model.keep is keep is not None
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    assert model.training


def test_a_network_of_other_peoples_modules_is_searched_too():
    class Broken(nn.Module):
        def forward(self, x):
            return x / 0

    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Dropout(), Broken(), nn.ReLU())
    image = torch.ones(1, 1, 2, 2, 2)
    outputs, random = model(image), torch.get_rng_state()
    assert "came out of 2" in locate_nonfinite(model, image, outputs)
    assert torch.get_rng_state().equal(random)


def test_a_step_that_is_left_out_changes_nothing_and_the_run_goes_on(composed, tmp_path, capsys):
    run = made(composed, tmp_path, "trainer.max_steps=5", "max_skipped_steps=1")
    spoil_images(run, 2)
    states = States(run)
    fit(run)
    assert run.trainer.global_step == 5
    assert states.finite()
    floats = [n for n, x in enumerate(states.all[1]) if x.is_floating_point()]
    assert all(states.all[1][n].equal(states.all[2][n]) for n in floats)
    assert not states.same(2, 3)
    assert "this step is left out (1 of at most 1)" in capsys.readouterr().out
    log = EventAccumulator(str(tmp_path / "tensorboard"))
    log.Reload()
    assert [(s.step, s.value) for s in log.Scalars("train/skipped_steps")] == [(2, 1.0)]


@pytest.mark.parametrize("micro", [2, 3])
def test_one_bad_batch_leaves_out_the_step_with_all_its_batches(composed, tmp_path, micro):
    run = made(
        composed,
        tmp_path,
        *("trainer.max_steps=3", "trainer.accumulate_grad_batches=2", "max_skipped_steps=1"),
        "data.patches_per_case=4",
    )
    spoil_images(run, micro)  # the first or the second of step 1
    states = States(run)
    fit(run)
    assert states.finite()
    weights = len(list(run.task.model.parameters()))
    moments = len(run.task.model.state_dict())
    for part in (slice(0, weights), slice(moments, None)):
        before, after = states.all[0][part], states.all[1][part]
        equal = [
            x.equal(y) for x, y in zip(before, after, strict=True) if part.start or x.ndim == 5
        ]
        assert all(equal)
    assert run.task.finite.skipped == 1
    assert not states.same(1, 2)


@pytest.mark.parametrize(
    "option", ["optimizer.fused=true", "optimizer.fused=false", "trainer.gradient_clip_val=null"]
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("step", [0, 2])
def test_gradients_that_are_not_finite_change_nothing(composed, tmp_path, option, optimizer, step):
    run = made(
        composed,
        tmp_path,
        *(f"optimizer={optimizer}", option, "trainer.max_steps=4", "max_skipped_steps=1"),
    )
    spoil_gradients(run, step)
    states = States(run)
    fit(run)
    assert states.finite()
    assert run.task.finite.skipped == 1
    weights = [n for n, x in enumerate(states.all[0]) if x.ndim == 5]
    if step:
        assert all(states.all[step - 1][n].equal(states.all[step][n]) for n in weights)
    assert not states.same(step, step + 1)


@pytest.mark.parametrize("steps", [3, 9])
def test_gradients_that_are_not_finite_name_step_cases_and_weight(composed, tmp_path, steps):
    """The last step of a run is looked at as well."""
    run = made(composed, tmp_path, f"trainer.max_steps={steps}")
    spoil_gradients(run, 2)
    with pytest.raises(
        RunError, match=r"not at step 2, cases case_\d+.*decoder\.0\.convs\.0\.conv\.w"
    ):
        fit(run)
    assert all(p.isfinite().all() for p in run.task.model.parameters())


def test_clipping_is_torchs(composed, tmp_path):
    """Two steps with a small norm, against torch's own function."""
    run = made(composed, tmp_path, "trainer.gradient_clip_val=0.01", "optimizer=sgd")
    seen = {}
    original = run.task.configure_gradient_clipping

    def compared(optimizer, **given):
        before = [p.grad.clone() for p in run.task.model.parameters()]
        original(optimizer, **given)
        seen["ours"] = [p.grad.clone() for p in run.task.model.parameters()]
        for p, g in zip(run.task.model.parameters(), before, strict=True):
            p.grad = g
        nn.utils.clip_grad_norm_(run.task.model.parameters(), 0.01)
        seen["torchs"] = [p.grad.clone() for p in run.task.model.parameters()]

    run.task.configure_gradient_clipping = compared
    fit(run)
    for ours, torchs in zip(seen["ours"], seen["torchs"], strict=True):
        torch.testing.assert_close(ours, torchs)


def test_too_many_steps_end_the_run_with_code_4_and_the_count(unet3d, tmp_path, capsys):
    assert unet3d("optimizer.lr=1e30", "trainer.max_steps=20", "max_skipped_steps=3") == 4
    said = capsys.readouterr()
    assert said.out.count("this step is left out") == 2  # the first and the second, not the third
    assert "max_skipped_steps=3 were left out before" in said.err
    assert len(said.err.strip().splitlines()) == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["skipped_steps"] == 4
    assert report["finished"] is False
    assert report["fault"] in said.err


def test_statistics_are_kept_whole_when_a_run_stops(composed, tmp_path):
    run = made(composed, tmp_path, "trainer.max_steps=4")
    spoil_images(run, 2)
    with pytest.raises(RunError):
        fit(run)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(x.isfinite().all() for x in last["state_dict"].values())
    assert last["global_step"] == 2


def test_a_resumed_run_goes_on_counting_what_it_left_out(composed, tmp_path):
    run = made(composed, tmp_path, "trainer.max_steps=3", "max_skipped_steps=1")
    spoil_images(run, 1)
    fit(run)
    run = made(composed, tmp_path, "trainer.max_steps=6", "max_skipped_steps=1")
    spoil_images(run, 1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(RunError, match="max_skipped_steps=1 were left out before"):
        run.trainer.fit(run.task, run.train_loader, ckpt_path=last, weights_only=True)


def test_a_rank_leaves_out_a_step_that_another_rank_cannot_take(monkeypatch):
    said = []
    monkeypatch.setattr(nonfinite, "any_rank", lambda trainer, flag: True)
    trainer = SimpleNamespace(world_size=2)
    task = SimpleNamespace(trainer=trainer, global_step=7, log=lambda *_: None, print=said.append)
    model = nn.Sequential(nn.BatchNorm3d(1))
    steps = NonFiniteGuard(most=1)
    steps.begin(model)
    image = torch.randn(2, 1, 2, 2, 2)
    before = [x.clone() for x in get_running_stats(model)]
    outputs = model(image)
    steps.check_loss(task, model, {"case": ["a"], "image": image}, outputs, outputs.sum())
    assert steps.leaving
    assert all(x.equal(y) for x, y in zip(get_running_stats(model), before, strict=True))
    assert said == [
        "the loss of another rank is not finite at step 7; this step is left out (1 of at most 1)"
    ]


@pytest.mark.parametrize("bad", ["-1", "many", "1.5"])
def test_a_number_of_steps_that_cannot_be_is_refused(unet3d, bad, capsys):
    assert unet3d(f"max_skipped_steps={bad}") == 2
    assert "max_skipped_steps must be" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16", "bf16-true"])
def test_on_a_gpu_bad_gradients_change_nothing_and_no_step_waits(composed, tmp_path, precision):
    run = made(
        composed,
        tmp_path,
        *("trainer.accelerator=gpu", f"precision={precision}"),
        *("trainer.max_steps=5", "max_skipped_steps=1"),
    )
    spoil_gradients(run, 2)
    states = States(run)
    fit(run)
    assert states.finite()
    assert run.task.finite.skipped == 1
    assert getattr(run.trainer.optimizers[0], "_step_supports_amp_scaling", False)
    assert math.isfinite(run.trainer.callback_metrics["train/loss"])
