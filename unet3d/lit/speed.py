"""Seconds per step and volumes per second, beside the metrics."""

import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class StepSpeed(Callback):
    """Times each optimizer step from the end of the one before it, so waiting for data counts."""

    def __init__(self) -> None:
        self.begun: float | None = None  # None: what came before was not a step
        self.volumes = 0
        self.stepping = False  # whether this batch ends with an optimizer step
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.begun is None:
            self.begun = time.perf_counter()
        self.volumes += len(batch["image"])

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.stepping = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.stepping:
            return
        now = time.perf_counter()
        assert self.begun is not None
        seconds = now - self.begun
        self.seconds.append(seconds)
        pl_module.log("speed/step_seconds", seconds)
        pl_module.log("speed/volumes_per_second", self.volumes / seconds)
        self.begun, self.volumes, self.stepping = now, 0, False

    def summary(self) -> dict[str, float]:
        """Median and 95th percentile of a step; the first one, which warms up, is left out."""
        steady = sorted(self.seconds[1:] or self.seconds)
        if not steady:
            return {}
        return {
            "median_step_seconds": median(steady),
            "p95_step_seconds": steady[min(len(steady) - 1, int(0.95 * len(steady)))],
            "steps_timed": len(steady),
        }
