from functools import partial

import pytest
import torch
from torch import nn

from unet3d.machine import Precision
from unet3d.memory import traced_step
from unet3d.memory.fit import estimate_configured_step
from unet3d.step import training_step
from unet3d.step.build import MIN_HALF_EPSILON, make_optimizer_factory
from unet3d.step.training_step import RandomBatchStep

SMALL = ("model.depth=2", "model.width=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["precision=bf16"], ["inference.batch_size=3", "trainer.accelerator=cpu"]]
)
def test_a_few_windows_of_a_volume_have_the_peak_of_all_of_them(composed, monkeypatch, overrides):
    settings = composed(*SMALL, *overrides)

    def estimate_validation():
        estimate = estimate_configured_step(settings.step, [40, 24, 56])
        return estimate.phases["validation"], len(estimate.trace.events)

    peak_of_few, events_of_few = estimate_validation()
    monkeypatch.setattr(traced_step, "SkipSmallerWindows", lambda model, trace: model)
    peak_of_all, events_of_all = estimate_validation()
    assert peak_of_few == peak_of_all
    assert events_of_few < 0.7 * events_of_all


def test_an_optimizer_that_replaces_its_state_is_traced_twice(composed, monkeypatch):
    make = partial(torch.optim.ASGD, lr=0.1)
    monkeypatch.setattr(training_step, "make_optimizer_factory", lambda *_: make)
    traces, train = [], RandomBatchStep.train
    monkeypatch.setattr(RandomBatchStep, "train", lambda *args: traces.append(train(*args)))
    estimate_configured_step(composed(*SMALL, "data.patch_size=[16,16,16]").step)
    assert len(traces) == 2


def build(settings, precision):
    """Build the optimizer of one parameter."""
    factory = make_optimizer_factory(settings.step.optimizer, Precision(precision, precision))
    return factory([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_is_fused_unless_that_is_switched_off(composed, optimizer):
    settings = composed(f"optimizer={optimizer}")
    assert all(build(settings, precision).defaults["fused"] for precision in ("32", "16", "bf16"))
    switched_off = composed(f"optimizer={optimizer}", "optimizer.fused=false")
    assert not build(switched_off, "32").defaults["fused"]


def test_epsilon_is_large_enough_for_weights_in_fp16(composed):
    assert build(composed(), "16").defaults["eps"] == 1e-8
    assert build(composed(), "16-true").defaults["eps"] == MIN_HALF_EPSILON
    assert build(composed("optimizer.eps=0.01"), "16-true").defaults["eps"] == 0.01
