"""A step run for real on this machine's GPU, measured by phase and by layer."""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from unet3d.config.compose import ComposedConfig
from unet3d.errors import UsageError
from unet3d.machine.device import resolve_precision
from unet3d.memory.estimate import Layer
from unet3d.memory.layer_recorder import LayerRecorder
from unet3d.memory.peak import PeakMeter
from unet3d.memory.record import MemoryRecord
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.training_step import TrainingStep, make_step_factory


@dataclass(frozen=True)
class Measurement:
    """What a step took, by phase and by layer."""

    phases: dict[str, MemoryRecord]
    layers: list[Layer]

    @property
    def peak(self) -> MemoryRecord:
        """Of the whole step."""
        return reduce(or_, self.phases.values())


class PhaseMeter:
    """Reads the peak of each phase."""

    def __init__(self, device: torch.device):
        self.device, self.meter = device, PeakMeter()
        self.peaks: dict[str, MemoryRecord] = {}
        self.phase: str | None = None

    def begin_phase(self, phase: str) -> None:
        """End the phase that was and begin another."""
        if self.phase is not None:
            record = self.meter.read(self.device)
            self.peaks[self.phase] = record | self.peaks.get(self.phase, record)
        self.phase = phase
        self.meter.start(self.device)

    def label(self, tensors: Any, kind: str) -> None:
        """Nothing to do: the device knows no kinds."""


def require_gpu() -> None:
    """Refuse to measure where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise UsageError("measure=true needs a GPU, and torch finds none here")


def measure_phases(step: TrainingStep, device: torch.device) -> dict[str, MemoryRecord]:
    """Of each phase of the second step, as predictions have it."""
    step.train(PhaseMeter(device))
    phases = PhaseMeter(device)
    step.train(phases)
    phases.begin_phase("end")
    return phases.peaks


def measure_step(request: ComposedConfig) -> Measurement:
    """The same step run on this machine's GPU."""
    require_gpu()
    estimate_memory(request)  # fills in what the data set says, and refuses what cannot be
    device = torch.device("cuda", 0)
    used = resolve_precision(request.config.precision, "cuda")
    step = make_step_factory(request, used, cuda=True, device="cuda")()
    found = measure_phases(step, device)
    recorder = LayerRecorder(
        lambda: (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    )
    with recorder.record(step.model):  # reading costs time but no memory: a step of its own
        step.train(PhaseMeter(device))
    return Measurement(phases=found, layers=recorder.layers)
