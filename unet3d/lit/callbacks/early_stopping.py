"""Stop a run whose validation no longer improves.

Lightning's EarlyStopping takes its patience from the checkpoint, so a resumed run could not change
it, and does not say whether a checkpoint's run has stopped.
"""

from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.errors import UsageError
from unet3d.lit.validation_metric import ValidationMetric


class EarlyStopping(Callback):
    """Stop after `patience` validations in a row that are not better by more than `min_delta`."""

    def __init__(
        self,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        patience: int = 10,
        min_delta: float = 0.0,
    ):
        if patience < 1 or min_delta < 0:
            raise UsageError(
                f"early stopping needs patience >= 1 and min_delta >= 0, got {patience} and "
                f"{min_delta}"
            )
        self.metric = ValidationMetric(monitor, mode)
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.bad_validations = 0

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint: each metric has its own."""
        return f"EarlyStopping[{self.metric.name}]"

    @property
    def has_stopped(self) -> bool:
        """Return whether the last validations were not better."""
        return self.bad_validations >= self.patience

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = self.metric.read(trainer)
        if self.metric.is_better(value, self.best, by=self.min_delta):
            self.best, self.bad_validations = value, 0
        else:
            self.bad_validations += 1
        if self.has_stopped:
            trainer.should_stop = True
            best = "NaN" if self.best is None else f"{self.best:.4g}"
            pl_module.print(
                f"stopping early: {self.metric.name} was not better than {best} in "
                f"{self.bad_validations} validations"
            )

    STATE: ClassVar = {"best": float | None, "bad_validations": int}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_validations": self.bad_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.bad_validations = state_dict["best"], state_dict["bad_validations"]
