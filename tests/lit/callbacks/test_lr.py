import time

import lightning.pytorch as pl
import pytest
import torch

from tests.config.helpers.configs import SHRUNK
from unet3d.errors import UsageError
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


class RecordWeights(pl.Callback):
    """Records which parts of the network change in each step."""

    def __init__(self):
        self.changed = []

    def on_train_batch_start(self, trainer, module, *_):
        self.before = {name: p.detach().clone() for name, p in module.model.named_parameters()}

    def on_train_batch_end(self, trainer, module, *_):
        names = {
            name.split(".")[0]
            for name, p in module.model.named_parameters()
            if not p.equal(self.before[name])
        }
        self.changed.append(names)


def train_and_record(composed, folder, *overrides, steps=4, checkpoint=None):
    limits = ["fold=none", f"trainer.max_steps={steps}", "trainer.max_epochs=100"]
    run = build_training(composed(*overrides, *limits), folder)
    callback = RecordWeights()
    run.trainer.callbacks.append(callback)
    run.trainer.fit(run.module, run.train_loader, ckpt_path=checkpoint, weights_only=True)
    return callback.changed, run.module.model.state_dict()


def test_only_the_heads_learn_in_their_warmup(composed, tmp_path):
    changed, _ = train_and_record(composed, tmp_path, "head_warmup=0.5")
    assert changed == [{"heads"}, {"heads"}] + [{"encoder", "decoder", "heads"}] * 2


def test_frozen_parts_never_learn(composed, tmp_path):
    changed, _ = train_and_record(composed, tmp_path, "freeze=[encoder]", steps=2)
    assert changed == [{"decoder", "heads"}] * 2


def test_a_network_without_a_list_of_heads_has_no_warmup_of_them(composed, tmp_path):
    words = ["model=dynunet", *SHRUNK["dynunet"], "head_warmup=0.5"]
    with pytest.raises(UsageError, match="head_warmup: DynUNet does not list its heads"):
        train_and_record(composed, tmp_path, *words)
