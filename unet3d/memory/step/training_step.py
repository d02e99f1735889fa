"""A training step as Lightning runs it, without trainer or data: to trace, to measure, to time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.data.dataset import get_network_sizes
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.machine import AUTOCAST_TYPES, TRUE_HALF_TYPES, Precision, resolve_precision
from unet3d.memory.fake_tensors import copy_as_fake, enable_foreach
from unet3d.memory.step.build import (
    build_network,
    complete_step,
    group_parameters,
    make_optimizer_factory,
)
from unet3d.memory.step.config import StepConfig
from unet3d.model.weights import WeightAverage, cast_to_half
from unet3d.peak_memory import MemoryRecord, PeakMeter


class NullListener:
    """Ignores the phases of a step, so that only the step is timed."""

    def begin_phase(self, phase: str) -> None:
        """Do nothing."""

    def label(self, tensors: Any, kind: str) -> None:
        """Do nothing."""


class SkipSmallerWindows:
    """A network that runs only on windows that find more memory allocated than any before them.

    Every window needs the same in addition, so no other of the hundreds can raise the peak.
    """

    def __init__(self, model: nn.Module, trace: Any):
        self.model, self.trace = model, trace
        self.peaks: dict[torch.Size, int] = {}
        self.logits: dict[torch.Size, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, windows: Tensor) -> Tensor:
        live_bytes, size = self.trace.count_live_bytes(), windows.shape
        if live_bytes <= self.peaks.get(size, -1):
            shape, dtype = self.logits[size]
            return windows.new_empty(shape, dtype=dtype)
        logits = self.model(windows)
        self.peaks[size], self.logits[size] = live_bytes, (logits.shape, logits.dtype)
        return logits


@dataclass(eq=False, kw_only=True)
class TrainingStep:
    """Forward, backward, clipping, optimizer, zero_grad: in the order of training/module.py."""

    model: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    inference: SlidingWindow
    batch_shape: Sequence[int]  # (B, C, D, H, W)
    volume_shape: Sequence[int]  # of a validation case: (1, C, D, H, W)
    micro_batches: int = 1
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    clips_like_cuda: bool = False  # all gradients in one operation
    several_processes: bool = False
    cuda_graph: bool = False
    ema_decay: float | None = None

    is_first = True
    is_last_micro_batch = False
    average: WeightAverage | None = field(default=None, init=False)
    recorded_batch: tuple[Tensor, ...] | None = field(default=None, init=False)
    """What CUDA graphs read."""

    def train(self, trace: Any) -> None:
        """Run one optimizer step; with CUDA graphs, the first step runs without them."""
        if self.several_processes and self.is_first and not self.cuda_graph:
            self._keep_gradients(trace)
        for micro_batch in range(self.micro_batches):
            self.is_last_micro_batch = micro_batch == self.micro_batches - 1
            trace.begin_phase("forward")
            if self.ema_decay is not None and self.average is None:
                self.average = WeightAverage(self.model, self.ema_decay)
                trace.label(list(self.average.values.values()), "averaged weights")
            batch = self._make_batch(trace, self.batch_shape)
            if self.cuda_graph and not self.is_first and self.recorded_batch is None:
                self._prepare_recording(batch, trace)
            with self._use_graph_pool(trace):
                with self._autocast():
                    loss = self.loss(self.model(batch[0]), batch[1])
                trace.begin_phase("backward")
                (loss / self.micro_batches).backward()
                del loss
        self.is_first = False
        trace.begin_phase("optimizer")
        if self.several_processes and self.cuda_graph:  # ranks average copies of the gradients
            trained = [p for p in self.model.parameters() if p.grad is not None]
            torch.empty(sum(p.numel() for p in trained), device=self.device)
        if self.clip_norm is not None:
            together = self.clips_like_cuda or None
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.clip_norm, foreach=together
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        for state in self.optimizer.state.values():
            trace.label(list(state.values()), "optimizer state")

    def validate(self, trace: Any) -> None:
        """Run the windows of one validation case that may set the peak."""
        trace.begin_phase("validation")
        if self.average is not None:
            self.average.apply()
        image, label = self._make_batch(trace, self.volume_shape)
        box = tuple(slice(size) for size in self.batch_shape[2:])
        self.model.eval()
        with torch.no_grad(), self._autocast(), self._use_graph_pool(trace):
            self.loss(self.model(image[:, :, *box]), label[:, *box])
            self.inference(image, SkipSmallerWindows(self.model, trace))
        self.model.train()
        if self.average is not None:
            self.average.restore()

    def _make_batch(self, trace: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch_size, _, *size = shape
        # A GPU multiplies zeros faster than other numbers.
        image = torch.randn(shape, dtype=self.dtype, device=self.device)
        label = torch.zeros(batch_size, *size, dtype=torch.uint8, device=self.device)
        trace.label([image, label], "input")
        return image, label

    def _keep_gradients(self, trace: Any) -> None:
        """Allocate the gradients that DistributedDataParallel keeps for the whole run.

        Its buckets are not modeled, only what is in them.
        """
        weights = [*self.model.parameters(), *self.model.buffers()]
        torch.cat([tensor.detach().flatten() for tensor in weights])  # sent by rank 0, then freed

        def reduce(kept: Tensor, parameter: Tensor) -> None:
            if self.is_last_micro_batch and parameter.grad is not None:
                parameter.grad = kept.copy_(parameter.grad)

        for parameter in self.model.parameters():
            if parameter.requires_grad:
                kept = torch.empty_like(parameter)
                trace.label(kept, "gradients")
                parameter.register_post_accumulate_grad_hook(partial(reduce, kept))

    def _prepare_recording(self, batch: tuple[Tensor, ...], trace: Any) -> None:
        """Allocate what CUDA graphs read and write, besides what the step allocates."""
        self.recorded_batch = tuple(tensor.clone() for tensor in batch)
        trace.label(self.recorded_batch, "input")
        if self.micro_batches > 1:
            trained = (p for p in self.model.parameters() if p.requires_grad)
            self.recorded_gradients = [torch.empty_like(p) for p in trained]  # of a micro-batch
            trace.label(self.recorded_gradients, "gradients")

    def _use_graph_pool(self, trace: Any) -> AbstractContextManager:
        # Only traced steps have graphs.
        return nullcontext() if self.recorded_batch is None else trace.use_graph_pool()

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device, self.autocast, enabled=self.autocast is not None)


def make_step_factory(
    config: StepConfig,
    precision: Precision,
    *,
    cuda: bool,
    volume_size: Sequence[int] | None = None,
    device: str = "cpu",
    network: nn.Module | None = None,
) -> Callable[[], TrainingStep]:
    """Return a function that builds the configured step, under FakeTensorMode or for real.

    `cuda` chooses whose defaults the step has, `device` where its tensors are. CUDA graphs are only
    traced: a step on a real device runs without. Where `network` has been built, with its
    checkpointing, a copy of it without values is traced.
    """
    config = complete_step(config)
    obstacle = find_cuda_graph_obstacle(config, "cuda")
    uses_graphs = cuda and device == "cpu" and config.cuda_graph is True and obstacle is None

    def make_step() -> TrainingStep:
        if network is None:
            model = build_network(config)
            config.checkpointing().apply(model)
        else:
            model = copy_as_fake(network)
        dtype = TRUE_HALF_TYPES.get(precision.used, torch.float32)
        if dtype != torch.float32:
            cast_to_half(model, dtype)
        if device != "cpu":
            model.to(device)
        parameters = group_parameters(model, config.head_warmup, config.lr_factors)
        optimizer = make_optimizer_factory(config.optimizer, precision)(parameters)
        if cuda:
            enable_foreach(optimizer)
        data, windows = config.data, config.windows
        channels, _ = get_network_sizes(data)
        return TrainingStep(
            model=model,
            loss=config.build_loss().to(device),
            optimizer=optimizer,
            inference=SlidingWindow(
                list(data.patch_size), overlap=windows.overlap, batch_size=windows.batch_size
            ),
            batch_shape=(data.batch_size, channels, *data.patch_size),
            volume_shape=(1, channels, *(volume_size or data.patch_size)),
            micro_batches=config.micro_batches,
            clip_norm=config.clip_norm,
            autocast=AUTOCAST_TYPES.get(precision.used),
            dtype=dtype,
            device=device,
            clips_like_cuda=cuda,
            several_processes=config.several_processes,
            ema_decay=config.ema_decay,
            cuda_graph=uses_graphs,
        )

    return make_step


def find_cuda_graph_obstacle(config: StepConfig, device: str) -> str | None:
    """Return why batches cannot be recorded."""
    if device != "cuda":
        return f"a {device} device has no CUDA graphs"
    if config.compile:
        return "compile=true launches compiled code itself"
    if isinstance(config.checkpointing(), OffloadActivations):
        return "checkpointing=offload copies to host memory, which it allocates in each step"
    return None


def build_configured_step(config: StepConfig, device: torch.device) -> TrainingStep:
    """Build the configured step to run on a device."""
    precision, cuda = resolve_precision(config.precision, device.type), device.type == "cuda"
    return make_step_factory(config, precision, cuda=cuda, device=device.type)()


def time_step(step: TrainingStep, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, and those in which the host queued it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = perf_counter()
    step.train(NullListener())
    queued = perf_counter()
    wait(device)
    return perf_counter() - start, queued - start


def measure_phases(step: TrainingStep, device: torch.device) -> dict[str, MemoryRecord]:
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
