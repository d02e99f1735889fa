"""A callback that applies a learning-rate schedule."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.lr_schedule import Cosine, Poly
from unet3d.lit.step_values import log_values


class LRSchedule(Callback):
    """Set the learning rate at the start of each optimizer step."""

    def __init__(self, schedule: Poly | Cosine, limits: StoppingLimits):
        self.schedule, self.limits = schedule, limits

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        done = self.limits.fraction_done(trainer)
        factor = self.schedule(done)
        for optimizer in trainer.optimizers:
            set_lr(optimizer, factor, done)
        lr = trainer.optimizers[0].param_groups[0]["initial_lr"] * factor
        log_values(pl_module, {"train/lr": lr})


def set_lr(optimizer: Optimizer, factor: float, done: float) -> None:
    """Set every group's learning rate to `factor` times its initial one, or to 0 until it starts.

    `done` is the fraction of the run.
    """
    for group in optimizer.param_groups:
        lr = group["initial_lr"] * factor if done >= group.get("starts_at", 0) else 0.0
        if isinstance(group["lr"], Tensor):  # a fused or capturable optimizer may hold a tensor
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
