from functools import partial

import pytest
import torch

from unet3d.memory.from_config import estimate_configured_step
from unet3d.memory.step import training_step
from unet3d.memory.step.training_step import TrainingStep
from unet3d.text import MIB

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
    monkeypatch.setattr(training_step, "SkipSmallerWindows", lambda model, trace: model)
    peak_of_all, events_of_all = estimate_validation()
    assert peak_of_few == peak_of_all
    assert events_of_few < 0.7 * events_of_all


def test_cuda_graphs_keep_their_batch_and_have_a_memory_pool_of_their_own(composed):
    words = (*SMALL, "data.patch_size=[64,64,64]", "precision=16", "trainer.accelerator=gpu")
    words += ("checkpointing=none", "model.convs_per_level=1")
    eager, recorded, accumulated, several = (
        estimate_configured_step(composed(*words, *options).step)
        for options in (
            (),
            ("trainer.cuda_graph=true",),
            ("trainer.cuda_graph=true", "trainer.accumulate_grad_batches=2"),
            ("trainer.cuda_graph=true", "trainer.devices=2"),
        )
    )
    batch = composed(*words).data.batch_size * 64**3 * 5
    assert recorded.allocated - eager.allocated == pytest.approx(batch, abs=MIB)
    assert recorded.steady_step[0] <= recorded.trace.graph_pool[0].start
    assert accumulated.allocated > recorded.allocated
    assert not several.trace.graph_pool


def test_an_optimizer_that_replaces_its_state_is_traced_twice(composed, monkeypatch):
    make = partial(torch.optim.ASGD, lr=0.1)
    monkeypatch.setattr(training_step, "make_optimizer_factory", lambda *_: make)
    traces, train = [], TrainingStep.train
    monkeypatch.setattr(TrainingStep, "train", lambda *args: traces.append(train(*args)))
    estimate_configured_step(composed(*SMALL, "data.patch_size=[16,16,16]").step)
    assert len(traces) == 2
