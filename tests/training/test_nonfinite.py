import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import distributed, nn

from unet3d.commands.train import build_training
from unet3d.errors import RunError
from unet3d.training import nonfinite
from unet3d.training.distributed import RankAgreement
from unet3d.training.nonfinite import (
    NonFiniteGuard,
    find_first_nonfinite_module,
    get_running_stats,
)


def build(composed, tmp_path, *overrides):
    return build_training(
        composed("fold=none", "model.norm=batch", "model.width=4", *overrides), tmp_path
    )


def fit(run):
    run.trainer.fit(run.module, run.data.train_loader)
    return run


def spoil_images(run, *calls):
    """Put NaN into the image of these forwards, counted from 0."""
    count = []

    def spoil(module, args):
        if module.training:
            count.append(1)
            if len(count) - 1 in calls:
                args[0].fill_(torch.nan)

    run.module.model.register_forward_pre_hook(spoil)


def spoil_gradients(run, *steps):
    """Make gradients of one weight infinite in these steps."""

    def register(model, args):  # in the first forward: true half precision replaces the weights
        weight = model.decoder[0].convs[0].conv.weight
        weight.register_hook(lambda g: g * torch.inf if run.trainer.global_step in steps else None)
        handle.remove()

    handle = run.module.model.register_forward_pre_hook(register)


class States:
    """Record weights, moments and running statistics after each step."""

    def __init__(self, run):
        self.all = []
        original = run.module.nonfinite_guard.end_step

        def end_step():
            original()
            state = [p.detach().clone() for p in run.module.model.state_dict().values()]
            for moments in run.trainer.optimizers[0].state.values():
                state += [value.clone() for value in moments.values()]
            self.all.append(state)

        run.module.nonfinite_guard.end_step = end_step

    def equal(self, a, b):
        return all(x.equal(y) for x, y in zip(self.all[a], self.all[b], strict=True))

    def finite(self):
        return all(x.isfinite().all() for state in self.all for x in state)


def test_locating_the_layer_does_not_change_the_network(composed, tmp_path):
    model = build(composed, tmp_path).module.model
    model.encoder[1].convs[0].conv.weight.data.fill_(torch.inf)
    before, keep = {k: v.clone() for k, v in model.state_dict().items()}, model.retention
    image = torch.randn(2, 1, 16, 16, 16)
    assert find_first_nonfinite_module(model, image) == "encoder.1.convs.0.conv"
    assert model.retention is keep is not None
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize("micro", [2, 3])
def test_one_non_finite_batch_skips_the_step_with_all_its_batches(composed, tmp_path, micro):
    words = ["trainer.max_steps=3", "trainer.accumulate_grad_batches=2", "max_skipped_steps=1"]
    run = build(composed, tmp_path, *words, "data.patches_per_case=4")
    spoil_images(run, micro)  # the first or the second of step 1
    states = States(run)
    fit(run)
    assert states.finite()
    moments = len(run.module.model.state_dict())
    for n, (before, after) in enumerate(zip(states.all[0], states.all[1], strict=True)):
        if before.ndim == 5 or n >= moments:  # running statistics may change
            assert after.equal(before)
    assert run.module.nonfinite_guard.skipped == 1
    assert not states.equal(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "fused", "step"),
    [("adamw", True, 2), ("sgd", True, 0), ("sgd", True, 2), ("adamw", False, 2)],
)
def test_non_finite_gradients_change_nothing(composed, tmp_path, optimizer, fused, step):
    words = [f"optimizer={optimizer}", f"optimizer.fused={fused}", "max_skipped_steps=1"]
    words += ["trainer.max_steps=4", "trainer.gradient_clip_val=null"]
    run = build(composed, tmp_path, *words)
    spoil_gradients(run, step)
    states = States(run)
    fit(run)
    assert states.finite()
    assert run.module.nonfinite_guard.skipped == 1
    weights = [n for n, x in enumerate(states.all[0]) if x.ndim == 5]
    if step:
        assert all(states.all[step - 1][n].equal(states.all[step][n]) for n in weights)
    assert not states.equal(step, step + 1)


def test_non_finite_gradients_are_reported_with_step_cases_and_weight(composed, tmp_path):
    """Also those of the last step."""
    run = build(composed, tmp_path, "trainer.max_steps=3")
    spoil_gradients(run, 2)
    with pytest.raises(
        RunError, match=r"not finite at step 2, cases case_\d+.*decoder\.0\.convs\.0\.conv\.w"
    ):
        fit(run)
    assert all(p.isfinite().all() for p in run.module.model.parameters())


def test_a_rank_skips_a_step_that_another_rank_cannot_take(monkeypatch):
    monkeypatch.setattr(distributed, "all_reduce", lambda shared, _: shared.fill_(1))
    lines, model, image = [], nn.Sequential(nn.BatchNorm3d(1)), torch.randn(2, 1, 2, 2, 2)
    task = SimpleNamespace(global_step=7, log_dict=lambda _: None, print=lines.append)
    guard = NonFiniteGuard(model, RankAgreement(world_size=2), max_skipped=1)
    before = [x.clone() for x in get_running_stats(model)]
    guard.begin()
    outputs = model(image)
    guard.check_loss(task, {"case": ["a"], "image": image}, outputs, outputs.sum())
    assert guard.skipping
    pairs = zip(get_running_stats(model), before, strict=True)
    assert all(x.equal(y) for x, y in pairs)
    assert lines == [
        "the loss of another rank is not finite at step 7; step skipped (1 of at most 1)"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16", "bf16-true"])
def test_on_a_gpu_non_finite_gradients_change_nothing_and_no_step_waits(
    composed, tmp_path, precision
):
    words = ["trainer.accelerator=gpu", f"precision={precision}", "max_skipped_steps=1"]
    run = build(composed, tmp_path, *words, "trainer.max_steps=5")
    spoil_gradients(run, 2)
    states = States(run)
    fit(run)
    assert states.finite()
    assert run.module.nonfinite_guard.skipped == 1
    assert getattr(run.trainer.optimizers[0], "_step_supports_amp_scaling", False)
    assert math.isfinite(run.trainer.callback_metrics["train/loss"])


def scale_gradients(run, initial):
    """Train with a gradient scaler, as on a GPU with precision=16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial)
    run.trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return scaler


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("optimizer=adamw",), ("optimizer=sgd", "optimizer.fused=false")]
)
def test_overflows_of_scaled_gradients_change_nothing_and_are_not_counted(
    composed, tmp_path, options
):
    options = (*options, "trainer.max_steps=8", "data.patches_per_case=8")
    run = build(composed, tmp_path, *options)
    scaler, states = scale_gradients(run, 2.0**24), States(run)
    fit(run)
    assert scaler.get_scale() < 2.0**24
    assert states.finite()
    assert not states.equal(6, 7)
    assert run.module.nonfinite_guard.skipped == 0


@pytest.mark.slow
def test_gradients_that_overflow_at_every_scale_are_reported(composed, tmp_path, monkeypatch):
    monkeypatch.setattr(nonfinite, "MAX_OVERFLOWS", 3)
    run = build(composed, tmp_path, "trainer.max_steps=6", "data.patches_per_case=4")
    scale_gradients(run, 2.0**16)
    spoil_gradients(run, *range(100))
    with pytest.raises(RunError, match="not finite after 4 steps in which the scale fell"):
        fit(run)


@pytest.mark.slow
def test_clipping_of_scaled_gradients_equals_that_of_unscaled_ones(composed, tmp_path):
    norms = []
    options = ["trainer.gradient_clip_val=0.01", "trainer.max_steps=1", "optimizer=sgd"]
    options += ["optimizer.lr=1.0", "optimizer.weight_decay=0", "optimizer.momentum=0"]
    options += ["optimizer.nesterov=false", "scheduler.warmup=0"]
    for initial in (1.0, 2.0**10):
        run = build(composed, tmp_path, *options)
        before = [p.detach().clone() for p in run.module.model.parameters()]
        scale_gradients(run, initial)
        fit(run)
        after = [p.detach() for p in run.module.model.parameters()]
        changes = [p - q for p, q in zip(after, before, strict=True)]
        norms.append(float(torch.linalg.vector_norm(torch.cat([c.flatten() for c in changes]))))
    assert norms == pytest.approx([0.01, 0.01], rel=1e-2)
