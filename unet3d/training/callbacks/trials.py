"""What `unet3d lr` and `unet3d search` add to the runs that they train."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.report.curves import LRCurve
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.loggers import get_metric
from unet3d.training.module import SegmentationModule


class LRRangeTest(Callback):
    """Raise the learning rate exponentially from step to step; stop when the loss diverges.

    Lightning's finder saves and restores the whole run, and takes no learning rate but that of a
    module attribute.
    """

    def __init__(self, *, min_lr: float, max_lr: float, steps: int):
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.curve = LRCurve()

    def get_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.min_lr * (self.max_lr / self.min_lr) ** (step / (self.steps - 1))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        rate = self.get_rate(trainer.global_step)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: SegmentationModule, *_: Any) -> None:
        if is_optimizer_step(trainer):
            rate = self.get_rate(len(self.curve.losses))
            self.curve.add(rate, pl_module.nonfinite_guard.loss)
            if self.curve.has_diverged:
                trainer.should_stop = True


class PrunedTrialError(Exception):
    """A trial has fallen behind the others."""


class PruningCallback(Callback):
    """Call `report` with the number of a validation and its value; stop if it returns True."""

    def __init__(self, report: Callable[[int, float], bool], *, monitor: str):
        self.report, self.monitor = report, monitor
        self.validations = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = get_metric(trainer.callback_metrics, self.monitor)
        self.validations += 1
        if self.report(self.validations, value):
            raise PrunedTrialError

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]
