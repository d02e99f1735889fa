"""Report the validations of a trial to the search that it is part of."""

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.training.validation_metric import ValidationMetric


class TrialPruned(Exception):
    """A trial has fallen behind the others."""


class TrialReport(Callback):
    """Call `report` with the number of a validation and its value; stop if it returns True."""

    def __init__(
        self, report: Callable[[int, float], bool], *, monitor: str, mode: Literal["max", "min"]
    ):
        self.report, self.metric = report, ValidationMetric(monitor, mode)
        self.validations = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validations += 1
        if self.report(self.validations, self.metric.read(trainer)):
            raise TrialPruned

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]
