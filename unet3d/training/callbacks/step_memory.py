"""Measure the peak memory of every training step by phase, and log it with the metrics."""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

from lightning.pytorch import LightningModule, Trainer
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

    def __init__(self, recorded: Mapping[str, MemoryRecord]):
        self.meter = PeakMeter()
        self.estimated: MemoryRecord | None = None
        self.recorded = recorded  # is filled during the run
        self.phase: str | None = None  # None between steps
        self.step: dict[str, MemoryRecord] = {}  # peaks by phase, here and below
        self.first: dict[str, MemoryRecord] = {}
        self.steady: dict[str, MemoryRecord] = {}
        self.validation: MemoryRecord | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
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
        if not self.first:
            self.first = self.step
        else:
            self.steady = {p: r | self.steady.get(p, r) for p, r in self.step.items()}
        self.step = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.start(trainer.strategy.root_device)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self.meter.read(trainer.strategy.root_device)
        self.validation = record | (self.validation or record)
        if trainer.logger is not None and not trainer.sanity_checking:
            tags = make_tags("validation", record)
            trainer.logger.log_metrics(tags, step=trainer.global_step - 1)

    def summarize(self) -> dict[str, Any]:
        """Return bytes for the report: first step, maximum of the steady steps, and validation."""
        summary: dict[str, Any] = {}
        if self.estimated is not None:
            summary["estimated"] = self.estimated.known()
        for name, phases in (("first_step", self.first), ("steady_step", self.steady)):
            if phases:
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
        self.step[self.phase] = record | self.step.get(self.phase, record)
        self.phase = None


def make_tags(name: str, peak: MemoryRecord) -> dict[str, float]:
    """Return the tags of a peak, in MiB."""
    return {f"memory/{name}_peak_{kind}_mib": n / MIB for kind, n in peak.known().items()}
