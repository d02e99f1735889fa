"""Learning rates that follow the fraction of the run that is done."""

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from unet3d.errors import UsageError
from unet3d.lit.callbacks.stopping import StoppingLimits


class Poly:
    """(1 - done) ** power, after a linear warm-up over the first `warmup` of the run."""

    def __init__(self, power: float = 0.9, warmup: float = 0.0):
        if not power > 0 or not 0 <= warmup < 1:
            raise UsageError(
                f"scheduler needs power > 0 and warmup in 0..1, got {power} and {warmup}"
            )
        self.power, self.warmup = power, warmup

    def __call__(self, done: float) -> float:
        """The factor on the learning rate when `done` (0..1) of the run is behind."""
        return linear_warmup(done, self.warmup) * (1 - done) ** self.power


class Cosine:
    """From 1 down to 0 along half a cosine, after a linear warm-up."""

    def __init__(self, warmup: float = 0.0):
        if not 0 <= warmup < 1:
            raise UsageError(f"scheduler needs warmup in 0..1, got {warmup}")
        self.warmup = warmup

    def __call__(self, done: float) -> float:
        """The factor on the learning rate when `done` (0..1) of the run is behind."""
        return linear_warmup(done, self.warmup) * (1 + math.cos(math.pi * done)) / 2


def linear_warmup(done: float, warmup: float) -> float:
    """The factor of a linear warm-up; its first step is not 0."""
    return min(1.0, (done + 1e-3) / (warmup + 1e-3))


class LRSchedule(Callback):
    """Sets the learning rate at the start of each optimizer step."""

    def __init__(self, schedule: Poly | Cosine, limits: StoppingLimits):
        self.schedule, self.limits = schedule, limits

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        factor = self.schedule(self.limits.fraction_done(trainer))
        for optimizer in trainer.optimizers:
            set_lr(optimizer, factor)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.log("train/lr", float(rate))


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Scale every group's learning rate from where it began."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):  # a fused or capturable optimizer may hold a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
