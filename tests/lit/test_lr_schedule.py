import time

import lightning.pytorch as pl
import pytest
import torch

from unet3d.errors import UsageError
from unet3d.lit.lr_schedule import Cosine, Poly
from unet3d.workflows.training.build import build_training


class Rates(pl.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(composed, folder, *overrides, checkpoint=None):
    run = build_training(composed("optimizer.lr=1.0", "fold=none", *overrides), folder)
    callback = Rates()
    run.trainer.callbacks.append(callback)
    run.trainer.fit(run.task, run.train_loader, ckpt_path=checkpoint, weights_only=True)
    return callback.rates


def test_poly_falls_from_1_to_0():
    assert [round(Poly(1.0)(f), 3) for f in (0, 0.25, 1)] == [1, 0.75, 0]


def test_cosine_is_half_way_in_the_middle():
    assert [round(Cosine()(f), 3) for f in (0, 0.5, 1)] == [1, 0.5, 0]


def test_a_warm_up_starts_low_but_not_at_nothing():
    schedule = Cosine(warmup=0.5)
    assert 0 < schedule(0) < 0.01
    assert schedule(0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [{"power": 0}, {"warmup": 1.0}, {"warmup": -0.1}])
def test_a_schedule_that_makes_no_sense_is_refused(bad):
    with pytest.raises(UsageError):
        Poly(**bad)


def test_the_rate_follows_the_limit_that_comes_first(composed, tmp_path):
    linear = "scheduler.power=1.0"
    by_steps = rates(composed, tmp_path, linear, "trainer.max_steps=4", "trainer.max_epochs=100")
    assert by_steps == pytest.approx([1, 0.75, 0.5, 0.25])
    by_epochs = rates(composed, tmp_path, linear, "trainer.max_steps=100", "trainer.max_epochs=2")
    assert by_epochs == pytest.approx([1 - n / 6 for n in range(6)])


def test_the_rate_follows_elapsed_time_and_goes_on_after_a_resume(composed, tmp_path):
    timed = ["scheduler.power=1.0", "trainer.max_steps=null", "trainer.max_time=00:00:00:02"]
    first = rates(composed, tmp_path, *timed)
    assert first == sorted(first, reverse=True)
    assert first[0] > 0.9
    assert first[-1] < 0.3
    last = tmp_path / "checkpoints" / "last.ckpt"
    elapsed = torch.load(last, weights_only=True)["callbacks"]["Limits"]["elapsed"]
    assert elapsed >= 2
    longer = [*timed[:2], "trainer.max_time=00:00:00:04"]
    begun = time.monotonic()
    second = rates(composed, tmp_path, *longer, checkpoint=last)
    assert time.monotonic() - begun < 3.5
    assert second[0] < 0.55
