"""Report the validations of a trial to the search that it is part of."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.errors import UsageError


class TrialPruned(Exception):
    """A trial has fallen behind the others."""


class TrialReport(Callback):
    """Call `report` with the number of a validation and its value; stop if it returns True."""

    def __init__(self, report: Callable[[int, float], bool], *, monitor: str):
        self.report, self.monitor = report, monitor
        self.validations = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        known = trainer.callback_metrics
        if self.monitor not in known:
            names = ", ".join(sorted(name for name in known if name.startswith("val/")))
            raise UsageError(f"no metric {self.monitor}; a validation logs {names}")
        self.validations += 1
        if self.report(self.validations, float(known[self.monitor])):
            raise TrialPruned

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]
