"""Record what every training step takes and reaches: memory, time, loss and learning rate."""

import time
from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d import peak_memory
from unet3d.data.loading.loaders import WaitTimer
from unet3d.peak_memory import MemoryRecord, PeakMeter, release_freed_memory
from unet3d.report.curves import Curve
from unet3d.text import MANY_CLASSES, MIB
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.loggers import log_values
from unet3d.training.module import SegmentationModule
from unet3d.training.schedules import get_rate

VALIDATION = ("val/loss", "val/dice", "val/hd95_mm")
"""Values of a validation that have a curve; Dice has one per class, too."""


class StepMemory(Callback):
    """Reset the peak at the start of each phase and read it at the end.

    A step is one optimizer step with all of its micro-batches. The first step, which allocates the
    optimizer state, the steady steps after it, and validation are recorded separately. `recorded`
    holds the peaks of phases that replay CUDA graphs: the allocator does not see what is in them.
    """

    def __init__(self, recorded: Mapping[str, MemoryRecord]):
        self.meter = PeakMeter()
        self.estimated: MemoryRecord | None = None
        self.recorded = recorded  # is filled during the run
        self.phase: str | None = None  # None between steps
        self.before: int | None = None  # resident bytes before the first step, without weights
        self.step: dict[str, MemoryRecord] = {}  # peaks of this step by phase
        self.steps: dict[str, dict[str, MemoryRecord]] = {}  # of the first step, and the others
        self.validation: MemoryRecord | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        device = trainer.strategy.root_device
        if device.type == "cpu" and not (self.steps or self.step):
            release_freed_memory()
            meter = PeakMeter()
            meter.start(device)
            weights = sum(parameter.nbytes for parameter in pl_module.parameters())
            resident = meter.read(device).resident
            self.before = None if resident is None else resident - weights
        self._enter("forward", trainer)

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self._enter("backward", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self._enter("optimizer", trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.phase != "optimizer":
            return  # a micro-batch that only accumulates gradients
        self._leave(trainer)
        peak = reduce(or_, self.step.values())
        tags = make_tags("step", peak)
        if self.estimated is not None and self.estimated.allocated is not None:
            tags["memory/estimated_step_peak_mib"] = self.estimated.allocated / MIB
        for phase, record in self.step.items():
            tags |= make_tags(phase, record)
        log_values(pl_module, tags)
        if peak.headline is not None:
            headline = {"peak_mib": peak.headline / MIB}
            log_values(pl_module, headline, prog_bar=True, logger=False)
        name = "steady_step" if self.steps else "first_step"
        known = self.steps.get(name, {})
        self.steps[name] = {p: record | known.get(p, record) for p, record in self.step.items()}
        self.step = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.start(trainer.strategy.root_device)

    def on_validation_end(self, trainer: Trainer, pl_module: SegmentationModule) -> None:
        record = self.meter.read(trainer.strategy.root_device)
        self.validation = record | (self.validation or record)
        tags = make_tags("validation", record)
        for logger in [] if trainer.sanity_checking else trainer.loggers:
            logger.log_metrics(tags, step=trainer.global_step - 1)

    def summarize(self) -> dict[str, Any]:
        """Return bytes for the report: first step, maximum of the steady steps, and validation."""
        summary: dict[str, Any] = {}
        if self.estimated is not None:
            summary["estimated"] = self.estimated.known()
        for name, phases in self.steps.items():
            by_phase = {phase: record.known() for phase, record in phases.items()}
            summary[name] = reduce(or_, phases.values()).known() | {"phases": by_phase}
        if self.validation is not None:
            summary["validation"] = self.validation.known()
        return summary

    def _enter(self, phase: str, trainer: Trainer) -> None:
        if self.phase is not None:
            self._leave(trainer)
        self.phase = phase
        self.meter.start(trainer.strategy.root_device)

    def _leave(self, trainer: Trainer) -> None:
        assert self.phase is not None
        record = self.meter.read(trainer.strategy.root_device)
        record |= self.recorded.get(self.phase, record)
        if record.resident is not None and self.before is not None:
            record = replace(record, above_start=max(0, record.resident - self.before))
        self.step[self.phase] = record | self.step.get(self.phase, record)
        self.phase = None


def make_tags(name: str, peak: MemoryRecord) -> dict[str, float]:
    """Return the tags of a peak, in MiB."""
    return {f"memory/{name}_peak_{kind}_mib": n / MIB for kind, n in peak.known().items()}


class StepTimer(Callback):
    """Time each optimizer step from the end of the previous one, including waiting for data."""

    def __init__(self) -> None:
        self.start = 0.0
        self.volumes = 0
        self.waits: list[WaitTimer] = []  # of this step's micro-batches
        self.seconds, self.shares = array("d"), array("d")  # of every step
        self.gpu_utilization: int | None = None  # percent
        self.queried_at = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.volumes += len(batch["image"])
        self.waits.append(batch["wait"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not is_optimizer_step(trainer):
            return
        now = time.perf_counter()
        total = now - self.start
        # The host has read this step's loss, so the GPU is done with the batch: no extra sync.
        waiting = sum(wait.get_seconds() for wait in self.waits)
        self.seconds.append(total)
        self.shares.append(waiting / total)
        values = {
            "speed/step_seconds": total,
            "speed/volumes_per_second": self.volumes / total,
            "speed/data_wait_fraction": waiting / total,
        }
        log_values(pl_module, values | self._query_gpu(pl_module.device, now))
        self.start, self.volumes, self.waits = now, 0, []

    def _query_gpu(self, device: torch.device, now: float) -> dict[str, float]:
        """Return the driver's utilization, queried once a second; it samples a few times."""
        if device.type == "cuda" and now - self.queried_at >= 1:
            self.gpu_utilization, self.queried_at = peak_memory.get_utilization(device), now
        if self.gpu_utilization is None:
            return {}
        return {"speed/gpu_utilization_percent": float(self.gpu_utilization)}

    def summarize(self) -> dict[str, float]:
        """Return median and 95th percentile over all steps but the first, which is warmup."""
        seconds, shares = sorted(self.seconds[1:] or self.seconds), self.shares[1:] or self.shares
        if not seconds:
            return {}
        return {
            "median_step_seconds": median(seconds),
            "p95_step_seconds": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
            "median_data_wait_fraction": median(shares),
            "steps_timed": len(seconds),
        }


class Curves(Callback):
    """Record loss and learning rate of the steps, and the scores of validations, on rank 0."""

    def __init__(self) -> None:
        self.loss = Curve()
        self.curves = {"train/loss": self.loss}
        self.rate = 0.0  # of the step that runs

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        pending = self.curves.setdefault("train/lr", Curve()).pending
        # Read once per point: an optimizer may hold the rate on the device, which is waited for.
        self.rate = pending[-1][1] if pending else get_rate(trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Trainer, pl_module: SegmentationModule, *_: Any) -> None:
        if not is_optimizer_step(trainer):
            return
        # At the end of the step: a checkpoint may be saved within it, from which it is repeated.
        self._add("train/lr", trainer.global_step, self.rate)
        self._add("train/loss", trainer.global_step, pl_module.nonfinite_guard.step_loss)

    def on_validation_end(self, trainer: Trainer, pl_module: SegmentationModule) -> None:
        if trainer.sanity_checking:
            return
        shows_all = len(pl_module.metric.scored_classes) <= MANY_CLASSES
        for name, value in trainer.callback_metrics.items():
            if name in VALIDATION or (shows_all and name.startswith("val/dice/")):
                self._add(name, trainer.global_step, float(value))

    def _add(self, name: str, step: int, value: float) -> None:
        self.curves.setdefault(name, Curve()).add(step, value)

    def list_points(self) -> dict[str, list[list[float]]]:
        """Return [step, value] pairs by curve."""
        points = {name: curve.list_points() for name, curve in self.curves.items()}
        return {name: pairs for name, pairs in points.items() if pairs}

    def state_dict(self) -> dict[str, Any]:
        return {name: curve.state_dict() for name, curve in self.curves.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, state in state_dict.items():
            self.curves.setdefault(name, Curve()).load_state_dict(state)
