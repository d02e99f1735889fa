import lightning.pytorch as pl
import pytest
import torch

from tests.config.helpers.configs import SHRUNK
from tests.helpers.training import GiveDistances
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.schedules import Cosine, Poly


class SplitByRank(torch.optim.SGD):
    """Groups of its own: weights decay, biases do not."""

    def __init__(self, params, lr, **options):
        groups = [group["params"] if isinstance(group, dict) else [group] for group in params]
        flat = [parameter for group in groups for parameter in group]
        shapes = [[p for p in flat if p.ndim > 1], [p for p in flat if p.ndim <= 1]]
        super().__init__([{"params": shape} for shape in shapes if shape], lr=lr)


class RecordRates(pl.Callback):
    def __init__(self):
        self.rates, self.fractions = [], []

    def on_train_batch_start(self, trainer, *_):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        first, *_ = trainer.optimizers[0].param_groups
        self.fractions.append(first["lr"] / first["initial_lr"])


def train_and_record(composed, folder, *overrides, checkpoint=None):
    run = build_training(composed("optimizer.lr=1.0", "fold=none", *overrides), folder)
    callback = RecordRates()
    run.trainer.callbacks.append(callback)
    run.trainer.fit(run.module, run.data.train_loader, ckpt_path=checkpoint, weights_only=True)
    return callback


def record_rates(*arguments, **options):
    rates = train_and_record(*arguments, **options).rates
    return rates if len(rates[0]) > 1 else [rate for (rate,) in rates]


def test_parts_of_the_network_have_their_own_rates_which_are_no_decay(composed, tmp_path):
    """Or a run with a slow part would be warned of a rate that has fallen."""
    with pytest.raises(UsageError, match="no part 'encodr'; it has encoder, decoder, heads"):
        build_training(composed("lr_factors={encodr:0.1}"), tmp_path)
    words = ["lr_factors={encoder:0.1,encoder.0:0.01}", "trainer.max_steps=2"]
    words += ["scheduler=poly", "scheduler.power=1", "scheduler.warmup=0"]
    recorded = train_and_record(composed, tmp_path, *words)
    assert recorded.rates == [[0.01, 0.1, 1.0], [0.005, 0.05, 0.5]]
    assert recorded.fractions == pytest.approx([1, 0.5])


def test_an_optimizer_that_regroups_parameters_is_refused_where_parts_have_rates(
    composed, tmp_path
):
    with pytest.raises(UsageError, match="lr_factors: SplitByRank makes groups of parameters"):
        train_and_record(
            composed,
            tmp_path,
            f"optimizer._target_={__name__}.SplitByRank",
            "lr_factors={encoder:0.1}",
        )


SCHEDULERS = {
    "step": (["scheduler.step_size=2", "scheduler.gamma=0.5"], [1, 1, 0.5, 0.5, 0.25, 0.25]),
    "warm_restarts": (["scheduler.T_0=2", "scheduler.T_mult=1"], [1, 0.5] * 3),
    "one_cycle": (
        ["scheduler.pct_start=0.5", "scheduler.div_factor=2", "scheduler.final_div_factor=1"],
        [0.5, 0.75, 1.0, 0.875, 0.625, 0.5],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_steps_with_the_optimizer(composed, tmp_path, name):
    """A part that learns at its own rate does not change the schedule."""
    words, expected = SCHEDULERS[name]
    words = [f"scheduler={name}", *words, "trainer.max_steps=6", "lr_factors={encoder:0.1}"]
    encoder, others = zip(*record_rates(composed, tmp_path, *words), strict=True)
    assert others == pytest.approx(expected, abs=1e-3)
    assert encoder == pytest.approx([rate / 10 for rate in others], abs=1e-4)


@pytest.mark.slow
def test_parts_follow_a_cycle_at_their_own_rates(composed, tmp_path):
    words = ["scheduler=step", "~scheduler.step_size", "~scheduler.gamma", "trainer.max_steps=5"]
    words += ["scheduler._target_=torch.optim.lr_scheduler.CyclicLR", "+scheduler.base_lr=0.5"]
    words += ["+scheduler.max_lr=1.0", "+scheduler.step_size_up=2"]
    words += ["+scheduler.cycle_momentum=false", "lr_factors={encoder:0.1}"]
    encoder, others = zip(*record_rates(composed, tmp_path, *words), strict=True)
    assert others == pytest.approx([0.5, 0.75, 1.0, 0.75, 0.5])
    assert encoder == pytest.approx([rate / 10 for rate in others])


@pytest.mark.slow
def test_the_rate_falls_when_validation_no_longer_improves(composed, tmp_path):
    words = ["scheduler=plateau", "scheduler.monitor=val/hd95_mm", "scheduler.mode=min"]
    words += ["scheduler.patience=1", "scheduler.factor=0.1", "optimizer.lr=1.0"]
    limits = ["data.batch_size=4", "trainer.max_steps=6", "trainer.num_sanity_val_steps=0"]
    run = build_training(composed(*words, *limits), tmp_path)
    rates = RecordRates()
    run.trainer.callbacks[:0] = [GiveDistances(9.0, 8.0, 8.5, 8.4, 7.0, 7.0), rates]
    run.trainer.fit(run.module, run.data)
    assert [rate for (rate,) in rates.rates] == pytest.approx([1, 1, 1, 1, 0.1, 0.1])


def test_the_rate_falls_to_the_limit_that_comes_first(composed, tmp_path):
    words = ["scheduler.power=1.0", "scheduler.warmup=0", "data.layout.num_cases=4"]
    limits = ["trainer.max_steps=100", "trainer.max_epochs=2"]
    rates = record_rates(composed, tmp_path, *words, *limits)
    assert rates == pytest.approx([1, 3 / 4, 1 / 2, 1 / 4])


@pytest.mark.slow
def test_the_learning_rate_follows_elapsed_time_across_a_resume(composed, tmp_path):
    linear = ("scheduler.power=1.0", "scheduler.warmup=0", "trainer.max_steps=null")
    first = record_rates(composed, tmp_path, *linear, "trainer.max_time=00:00:00:02")
    assert first == sorted(first, reverse=True)
    assert first[0] > 0.9
    assert first[-1] < 0.3
    last = tmp_path / "checkpoints" / "last.ckpt"
    longer = [*linear, "trainer.max_time=00:00:00:04"]
    assert record_rates(composed, tmp_path, *longer, checkpoint=last)[0] < 0.55
    limits = torch.load(last, weights_only=True)["callbacks"]["StoppingLimits"]
    assert 4 <= limits["time_elapsed"]["train"] < 5.5  # not 2 + 4


def test_a_network_without_a_list_of_heads_has_no_warmup_of_them(composed, tmp_path):
    words = ["model=dynunet", *SHRUNK["dynunet"], "head_warmup=0.5"]
    with pytest.raises(UsageError, match="head_warmup: DynUNet does not list its heads"):
        build_training(composed(*words), tmp_path)


def test_cosine_rises_from_nearly_zero_and_is_one_half_in_the_middle():
    assert [round(Cosine(warmup=0)(f), 3) for f in (0, 0.5, 1)] == [1, 0.5, 0]
    assert 0 < Cosine(warmup=0.5)(0) < 0.01
    for bad in ({"power": 0}, {"warmup": 1.0}, {"warmup": -0.1}):
        with pytest.raises(UsageError):
            Poly(**bad)
