import time

import lightning.pytorch as pl
import pytest
import torch

from unet3d.workflows.training.build import build_training


class RecordRates(pl.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def record_rates(composed, folder, *overrides, checkpoint=None):
    run = build_training(composed("optimizer.lr=1.0", "fold=none", *overrides), folder)
    callback = RecordRates()
    run.trainer.callbacks.append(callback)
    run.trainer.fit(run.module, run.train_loader, ckpt_path=checkpoint, weights_only=True)
    return callback.rates


def test_the_learning_rate_follows_the_limit_that_comes_first(composed, tmp_path):
    linear = ("scheduler.power=1.0", "scheduler.warmup=0")
    by_steps = record_rates(
        composed, tmp_path, *linear, "trainer.max_steps=4", "trainer.max_epochs=100"
    )
    assert by_steps == pytest.approx([1, 0.75, 0.5, 0.25])
    by_epochs = record_rates(
        composed, tmp_path, *linear, "trainer.max_steps=100", "trainer.max_epochs=2"
    )
    assert by_epochs == pytest.approx([1 - n / 6 for n in range(6)])


@pytest.mark.slow
def test_the_learning_rate_follows_elapsed_time_across_a_resume(composed, tmp_path):
    linear = ("scheduler.power=1.0", "scheduler.warmup=0", "trainer.max_steps=null")
    timed = [*linear, "trainer.max_time=00:00:00:02"]
    first = record_rates(composed, tmp_path, *timed)
    assert first == sorted(first, reverse=True)
    assert first[0] > 0.9
    assert first[-1] < 0.3
    last = tmp_path / "checkpoints" / "last.ckpt"
    elapsed = torch.load(last, weights_only=True)["callbacks"]["StoppingLimits"]["elapsed"]
    assert elapsed >= 2
    longer = [*linear, "trainer.max_time=00:00:00:04"]
    start = time.monotonic()
    second = record_rates(composed, tmp_path, *longer, checkpoint=last)
    assert time.monotonic() - start < 3.5
    assert second[0] < 0.55
