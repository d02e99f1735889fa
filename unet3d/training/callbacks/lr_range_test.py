"""A learning rate that rises from step to step, to see where the loss falls and where it diverges.

Lightning's finder saves and restores the whole run, and takes no learning rate but that of a module
attribute; a run of its own is simpler.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.report.figures import LRCurve
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.module import SegmentationModule


class LRRangeTest(Callback):
    """Raise the learning rate exponentially; stop when the loss diverges."""

    def __init__(self, *, min_lr: float, max_lr: float, steps: int):
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.curve = LRCurve()

    def get_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.min_lr * (self.max_lr / self.min_lr) ** (step / (self.steps - 1))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        rate = self.get_rate(trainer.global_step)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: SegmentationModule, *_: Any
    ) -> None:
        if is_optimizer_step(trainer):
            rate = self.get_rate(len(self.curve.losses))
            self.curve.add(rate, pl_module.nonfinite_guard.loss)
            if self.curve.has_diverged:
                trainer.should_stop = True
