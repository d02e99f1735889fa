"""What a training step computes: a run, the estimate of its memory, and benchmarks execute it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unet3d.cuda_graphs import GraphedPass
from unet3d.data.dataset import get_network_sizes
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.lazy_logits import run_network
from unet3d.machine import AUTOCAST_TYPES, TRUE_HALF_TYPES, Precision, resolve_precision
from unet3d.model.weights import WeightAverage, cast_to_half
from unet3d.peak_memory import MemoryRecord, PeakMeter
from unet3d.step.build import (
    build_network,
    complete_step,
    group_parameters,
    make_optimizer_factory,
)
from unet3d.step.config import StepConfig
from unet3d.types import get_label_dtype


@dataclass(eq=False, kw_only=True)
class TrainingStep:
    """The parts of an optimizer step, in the order in which they run.

    Whoever runs them decides where a batch comes from, and what happens between the parts.
    """

    model: nn.Module
    loss: nn.Module
    sliding_window: SlidingWindow
    clip_norm: float | None = None
    graphed_pass: GraphedPass | None = None
    average: WeightAverage | None = None
    clips_together: bool | None = None  # all gradients in one operation; None: as torch does

    def compute_loss(
        self, image: Tensor, label: Any, inspect: Callable[[Any, Tensor], None] | None = None
    ) -> Tensor:
        """Return the loss of a batch. The outputs are freed before backward: it needs none.

        `inspect` sees them and the loss; a replayed batch has no outputs to see.
        """
        if self.graphed_pass is None:
            outputs = run_network(self.model, self.loss, image)
            loss = self.loss(outputs, label)
        else:
            loss, outputs = self.graphed_pass(image, label)
        if inspect is not None:
            inspect(outputs, loss)
        return loss

    def clip_gradients(self, norm: Tensor | None = None) -> None:
        """Clip the gradients by their norm, which may be known."""
        if self.clip_norm is None:
            return
        parameters, together = list(self.model.parameters()), self.clips_together
        if norm is None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = get_total_norm(gradients, foreach=together)
        clip_grads_with_norm_(parameters, self.clip_norm, norm, foreach=together)

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        """Let `step` update the weights, free the gradients, and average the weights."""
        step()
        optimizer.zero_grad()  # Lightning would keep gradients through the next forward
        if self.average is not None:
            self.average.update()

    def validate_volume(
        self,
        image: Tensor,
        patch: tuple[Tensor, Tensor],
        observe: Any = None,
        network: Callable[[Tensor], Any] | None = None,
    ) -> tuple[float, Tensor]:
        """Return the loss of a labeled patch, and the classes of a volume (1, C, D, H, W)."""
        loss = float(self.loss(run_network(self.model, self.loss, patch[0]), patch[1]).detach())
        return loss, self.sliding_window(image, network or self.model, observe)


class NullListener:
    """Ignores the phases of a step, so that only the step is timed."""

    def begin_phase(self, phase: str) -> None:
        """Do nothing."""

    def label(self, tensors: Any, kind: str) -> None:
        """Do nothing."""


@dataclass(eq=False, kw_only=True)
class RandomBatchStep(TrainingStep):
    """A step as Lightning runs it, on random batches: to trace, to measure, to time."""

    optimizer: torch.optim.Optimizer
    batch_shape: Sequence[int]  # (B, C, D, H, W)
    volume_shape: Sequence[int]  # of a validation case: (1, C, D, H, W)
    micro_batches: int = 1
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    label_dtype: torch.dtype = torch.uint8
    device: str = "cpu"
    ema_decay: float | None = None

    def train(self, trace: Any) -> None:
        """Run one optimizer step."""
        for n in range(self.micro_batches):
            trace.begin_phase("forward")
            if self.ema_decay is not None and self.average is None:
                self.average = WeightAverage(self.model, self.ema_decay)
                trace.label(list(self.average.values.values()), "averaged weights")
            image, label = self.make_batch(trace, self.batch_shape)
            with self.compute_batch(trace, (image, label), is_last=n == self.micro_batches - 1):
                with self.use_autocast():
                    loss = self.compute_loss(image, label)
                trace.begin_phase("backward")
                (loss / self.micro_batches).backward()
                del loss
        trace.begin_phase("optimizer")
        self.reduce_gradients()
        self.clip_gradients()
        self.update(self.optimizer, self.optimizer.step)
        for state in self.optimizer.state.values():
            trace.label(list(state.values()), "optimizer state")

    def compute_batch(
        self, trace: Any, batch: tuple[Tensor, Tensor], *, is_last: bool
    ) -> AbstractContextManager:
        """Return the context of forward and backward."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Exchange gradients with other processes; there are none."""

    def make_batch(self, trace: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch_size, _, *size = shape
        # A GPU multiplies zeros faster than other numbers.
        image = torch.randn(shape, dtype=self.dtype, device=self.device)
        label = torch.zeros(batch_size, *size, dtype=self.label_dtype, device=self.device)
        trace.label([image, label], "input")
        return image, label

    def use_autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device, self.autocast, enabled=self.autocast is not None)


def build_step(
    config: StepConfig,
    precision: Precision,
    *,
    device: str = "cpu",
    network: nn.Module | None = None,
    kind: Callable[..., RandomBatchStep] = RandomBatchStep,
    volume_size: Sequence[int] | None = None,
) -> RandomBatchStep:
    """Build the configured step; a `network` that is passed has its checkpointing."""
    config = complete_step(config)
    if network is None:
        network = build_network(config)
        config.checkpointing().apply(network)
    dtype = TRUE_HALF_TYPES.get(precision.used, torch.float32)
    if dtype != torch.float32:
        cast_to_half(network, dtype)
    if device != "cpu":
        network.to(device)
    parameters = group_parameters(network, config.head_warmup, config.lr_factors)
    data, windows = config.data, config.windows
    channels, _ = get_network_sizes(data)
    return kind(
        model=network,
        loss=config.build_loss().to(device),
        optimizer=make_optimizer_factory(config.optimizer, precision)(parameters),
        sliding_window=SlidingWindow(
            list(data.patch_size), overlap=windows.overlap, batch_size=windows.batch_size
        ),
        batch_shape=(data.batch_size, channels, *data.patch_size),
        volume_shape=(1, channels, *(volume_size or data.patch_size)),
        micro_batches=config.micro_batches,
        clip_norm=config.clip_norm,
        autocast=AUTOCAST_TYPES.get(precision.used),
        dtype=dtype,
        label_dtype=getattr(torch, get_label_dtype(data.num_classes or 2)),
        device=device,
        ema_decay=config.ema_decay,
    )


def build_configured_step(config: StepConfig, device: torch.device) -> RandomBatchStep:
    """Build the configured step to run on a device."""
    return build_step(config, resolve_precision(config.precision, device.type), device=device.type)


def time_step(step: RandomBatchStep, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, and those in which the host queued it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = perf_counter()
    step.train(NullListener())
    queued = perf_counter()
    wait(device)
    return perf_counter() - start, queued - start


def measure_phases(step: RandomBatchStep, device: torch.device) -> dict[str, MemoryRecord]:
    """Return the peak of each phase of the second step, which is the one that is estimated."""
    step.train(NullListener())
    phases = PhaseMeter(device)
    step.train(phases)
    phases.begin_phase("end")
    return phases.peaks


class PhaseMeter(NullListener):
    """Read the peak of each phase."""

    def __init__(self, device: torch.device):
        self.device, self.meter = device, PeakMeter()
        self.peaks: dict[str, MemoryRecord] = {}
        self.phase: str | None = None

    def begin_phase(self, phase: str) -> None:
        if self.phase is not None:
            record = self.meter.read(self.device)
            self.peaks[self.phase] = record | self.peaks.get(self.phase, record)
        self.phase = phase
        self.meter.start(self.device)
