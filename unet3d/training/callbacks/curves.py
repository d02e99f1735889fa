"""Record the curves of a run for its report, whichever loggers it has."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.report.figures import Curve
from unet3d.training.module import SegmentationModule
from unet3d.training.schedules import get_rate

VALIDATION = ("val/dice", "val/hd95_mm")
"""Scores of a validation that have a curve; Dice has one per class, too."""


class Curves(Callback):
    """Record loss and learning rate of the steps, and the scores of validations, on rank 0."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.rate = 0.0  # of the step that runs

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        pending = self.curves.setdefault("train/lr", Curve()).pending
        # Read once per point: an optimizer may hold the rate on the device, which is waited for.
        self.rate = pending[-1][1] if pending else get_rate(trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Trainer, pl_module: SegmentationModule, *_: Any) -> None:
        # At the end of the step: a checkpoint may be saved within it, from which it is repeated.
        self._add("train/lr", trainer.global_step, self.rate)
        self._add("train/loss", trainer.global_step, pl_module.nonfinite_guard.loss)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        for name, value in trainer.callback_metrics.items():
            if name in VALIDATION or name.startswith("val/dice/"):
                self._add(name, trainer.global_step, float(value))

    def _add(self, name: str, step: int, value: float) -> None:
        self.curves.setdefault(name, Curve()).add(step, value)

    def list_points(self) -> dict[str, list[list[float]]]:
        """Return [step, value] pairs by curve."""
        return {name: curve.list_points() for name, curve in self.curves.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: curve.state_dict() for name, curve in self.curves.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, state in state_dict.items():
            self.curves[name] = Curve()
            self.curves[name].load_state_dict(state)
