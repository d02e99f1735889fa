"""The training step on fake tensors, with what a GPU and several processes allocate besides."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.inference.heads import split_heads
from unet3d.machine import Precision
from unet3d.memory.fake_tensors import SmallRangeMode, copy_as_fake, enable_foreach
from unet3d.step.build import build_network
from unet3d.step.config import StepConfig
from unet3d.step.training_step import RandomBatchStep, build_step


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

    def split_head(self) -> tuple[Any, nn.Conv3d | None]:
        """Split the head off the network, if that can be done."""
        [features], heads = split_heads([self.model])
        return SkipSmallerWindows(features, self.trace), heads[0] if heads else None


@dataclass(eq=False, kw_only=True)
class TracedStep(RandomBatchStep):
    """A step without values. With CUDA graphs, the first step runs without them."""

    several_processes: bool = False
    cuda_graph: bool = False

    is_first = True
    is_last_micro_batch = False
    recorded_batch: tuple[Tensor, ...] | None = field(default=None, init=False)
    """What CUDA graphs read."""

    def train(self, trace: Any) -> None:
        if self.several_processes and self.is_first and not self.cuda_graph:
            self._keep_gradients(trace)
        super().train(trace)
        self.is_first = False

    def compute_batch(
        self, trace: Any, batch: tuple[Tensor, Tensor], *, is_last: bool
    ) -> AbstractContextManager:
        self.is_last_micro_batch = is_last
        if self.cuda_graph and not self.is_first and self.recorded_batch is None:
            self._prepare_recording(batch, trace)
        return self._use_graph_pool(trace)

    def reduce_gradients(self) -> None:
        """Copy all gradients, as ranks do that replay graphs; others have averaged them."""
        if self.several_processes and self.cuda_graph:
            trained = [p for p in self.model.parameters() if p.grad is not None]
            torch.empty(sum(p.numel() for p in trained), device=self.device)

    def validate(self, trace: Any) -> None:
        """Run the windows of one validation case that may set the peak."""
        trace.begin_phase("validation")
        if self.average is not None:
            self.average.apply()
        image, label = self.make_batch(trace, self.volume_shape)
        box = tuple(slice(size) for size in self.batch_shape[2:])
        patch = image[:, :, *box], label[:, *box]
        self.model.eval()
        with torch.no_grad(), self.use_autocast(), self._use_graph_pool(trace):
            self.validate_volume(image, patch, network=SkipSmallerWindows(self.model, trace))
        self.model.train()
        if self.average is not None:
            self.average.restore()

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
        return nullcontext() if self.recorded_batch is None else trace.use_graph_pool()


def build_traced_step(
    config: StepConfig,
    precision: Precision,
    *,
    cuda: bool,
    volume_size: Sequence[int] | None = None,
    network: nn.Module | None = None,
) -> TracedStep:
    """Build the configured step under FakeTensorMode; `cuda` chooses whose defaults it has.

    Where `network` has been built, with its checkpointing, a copy of it without values is traced.
    """
    if network is None:
        with SmallRangeMode():
            model = build_network(config)
        config.checkpointing().apply(model)
    else:
        model = copy_as_fake(network)
    records = cuda and config.cuda_graph is True
    kind = partial(
        TracedStep,
        several_processes=config.several_processes,
        cuda_graph=records and find_cuda_graph_obstacle(config, "cuda") is None,
        clips_together=cuda or None,
    )
    step: Any = build_step(config, precision, network=model, kind=kind, volume_size=volume_size)
    if cuda:
        enable_foreach(step.optimizer)
    return step


def find_cuda_graph_obstacle(config: StepConfig, device: str) -> str | None:
    """Return why batches cannot be recorded."""
    if device != "cuda":
        return f"a {device} device has no CUDA graphs"
    if config.compile:
        return "compile=true launches compiled code itself"
    if isinstance(config.checkpointing(), OffloadActivations):
        return "checkpointing=offload copies to host memory, which it allocates in each step"
    return None
