"""Run a step on this machine's GPU and measure its memory by phase and by layer."""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import UsageError
from unet3d.machine.device import resolve_precision
from unet3d.memory.estimate import Layer
from unet3d.memory.layer_recorder import LayerRecorder
from unet3d.memory.peak import PeakMeter
from unet3d.memory.record import MemoryRecord
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.memory.training_step import NullListener, TrainingStep, make_step_factory


@dataclass(frozen=True)
class Measurement:
    """What a step took, by phase and by layer."""

    phases: dict[str, MemoryRecord]
    layers: list[Layer]

    @property
    def peak(self) -> MemoryRecord:
        """Return the peak of the whole step."""
        return reduce(or_, self.phases.values())


class PhaseMeter(NullListener):
    """Read the peak of each phase."""

    def __init__(self, device: torch.device):
        self.device, self.meter = device, PeakMeter()
        self.peaks: dict[str, MemoryRecord] = {}
        self.phase: str | None = None

    def begin_phase(self, phase: str) -> None:
        """End the current phase and begin another."""
        if self.phase is not None:
            record = self.meter.read(self.device)
            self.peaks[self.phase] = record | self.peaks.get(self.phase, record)
        self.phase = phase
        self.meter.start(self.device)


def require_gpu() -> None:
    """Refuse to measure without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("measure=true needs a GPU, and torch finds none")


def measure_phases(step: TrainingStep, device: torch.device) -> dict[str, MemoryRecord]:
    """Return the peak of each phase of the second step, which is the one that is estimated."""
    step.train(PhaseMeter(device))
    phases = PhaseMeter(device)
    step.train(phases)
    phases.begin_phase("end")
    return phases.peaks


def measure_step(settings: TrainingSettings) -> Measurement:
    """Run the configured step on this machine's GPU."""
    require_gpu()
    device = torch.device("cuda")
    precision = resolve_precision(settings.precision, "cuda")
    settings = resolve_strategy(settings, precision, cuda=True)
    step = make_step_factory(settings, precision, cuda=True, device="cuda")()
    phases = measure_phases(step, device)
    recorder = LayerRecorder(
        lambda: (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    )
    with recorder.record(step.model):  # slow to read, so in a step of its own
        step.train(PhaseMeter(device))
    return Measurement(phases=phases, layers=recorder.layers)
