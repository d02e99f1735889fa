"""Measure the peak memory of every training step by phase, and log it with the metrics."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.peak_memory import MemoryRecord, PeakMeter
from unet3d.text import MIB
from unet3d.training.loggers import log_values


class StepMemory(Callback):
    """Reset the peak at the start of each phase and read it at the end.

    A step is one optimizer step with all of its micro-batches. The first step, which allocates the
    optimizer state, the steady steps after it, and validation are recorded separately. `recorded`
    holds the peaks of phases that replay CUDA graphs: the allocator does not see what is in them.
    """

    def __init__(
        self,
        meter: PeakMeter,
        estimated: MemoryRecord | None = None,
        recorded: Mapping[str, MemoryRecord] | None = None,
    ):
        self.meter = meter
        self.estimated = estimated
        self.recorded = {} if recorded is None else recorded  # is filled during the run
        self.phase: str | None = None  # None between steps
        self.step: dict[str, MemoryRecord] = {}
        self.first: dict[str, MemoryRecord] | None = None
        self.steady: dict[str, MemoryRecord] | None = None
        self.validation: MemoryRecord | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("forward", trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("optimizer", trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self.phase != "optimizer":
            return  # a micro-batch that only accumulates gradients
        self._leave(trainer)
        peak = find_peak_over_phases(self.step)
        tags = {f"memory/step_peak_{k}_mib": v / MIB for k, v in peak.known().items()}
        if self.estimated is not None and self.estimated.allocated is not None:
            tags["memory/estimated_step_peak_mib"] = self.estimated.allocated / MIB
        for phase, record in self.step.items():
            tags |= {f"memory/{phase}_peak_{k}_mib": v / MIB for k, v in record.known().items()}
        log_values(pl_module, tags)
        if peak.headline is not None:
            headline = {"peak_mib": peak.headline / MIB}
            log_values(pl_module, headline, prog_bar=True, logger=False)
        if self.first is None:
            self.first = self.step
        else:
            previous = self.steady or {}
            self.steady = {
                phase: record | previous.get(phase, record) for phase, record in self.step.items()
            }
        self.step = {}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.meter.start(trainer.strategy.root_device)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        record = self.meter.read(trainer.strategy.root_device)
        self.validation = record if self.validation is None else self.validation | record
        if trainer.logger is not None and not trainer.sanity_checking:
            tags = {f"memory/validation_peak_{k}_mib": v / MIB for k, v in record.known().items()}
            trainer.logger.log_metrics(tags, step=trainer.global_step - 1)

    def summarize(self) -> dict[str, Any]:
        """Return bytes for the report: first step, maximum of the steady steps, and validation."""
        summary: dict[str, Any] = {}
        if self.estimated is not None:
            summary["estimated"] = self.estimated.known()
        for name, phases in (("first_step", self.first), ("steady_step", self.steady)):
            if phases is not None:
                by_phase = {phase: record.known() for phase, record in phases.items()}
                summary[name] = find_peak_over_phases(phases).known() | {"phases": by_phase}
        if self.validation is not None:
            summary["validation"] = self.validation.known()
        return summary

    def _enter(self, phase: str, trainer: pl.Trainer) -> None:
        if self.phase is not None:
            self._leave(trainer)
        self.phase = phase
        self.meter.start(trainer.strategy.root_device)

    def _leave(self, trainer: pl.Trainer) -> None:
        assert self.phase is not None
        record = self.meter.read(trainer.strategy.root_device)
        record |= self.recorded.get(self.phase, record)
        self.step[self.phase] = record | self.step.get(self.phase, record)
        self.phase = None


def find_peak_over_phases(phases: dict[str, MemoryRecord]) -> MemoryRecord:
    """Return the peak over all phases."""
    peak = MemoryRecord()
    for record in phases.values():
        peak = peak | record
    return peak
