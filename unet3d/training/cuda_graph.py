"""Record forward and backward of a batch as CUDA graphs, and replay them.

The host launches a graph with one call instead of hundreds. A recording is valid for one batch
size and patch size. Gradients are in the memory of the graphs, and each replay overwrites them.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unet3d.errors import summarize_error
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import find_cuda_graph_obstacle
from unet3d.peak_memory import MemoryRecord
from unet3d.training.ranks import ProcessRank

log = logging.getLogger(__name__)

WARMUP_BATCHES = 3
"""Batches that run without a graph: they compile kernels and let libraries choose algorithms."""


class CapturedGraph(NamedTuple):
    """A recorded graph."""

    tensors: Any  # where each replay writes its results
    replay: Callable[[], None]
    peak: MemoryRecord


class CudaGraphs:
    """Records CUDA graphs on a stream of their own; they share one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.MemPool()
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], Any]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats(self.device)
        pool = cast(Any, self.pool.id)
        # thread_local: the thread that pins batches allocates memory at any time.
        with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
            tensors = work()
        peak = MemoryRecord(allocated=torch.cuda.max_memory_allocated(self.device))
        return CapturedGraph(tensors, graph.replay, peak)

    @contextmanager
    def use_memory(self) -> Generator[None]:
        """Allocate from the graphs' pool, whose blocks belong to their stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool, self.device):
            yield
        current.wait_stream(self.stream)


class GraphedPass:
    """Compute the loss of a batch, after the first batches by replaying recordings.

    If recording fails, all batches run without. With `accumulates`, the gradients of several
    batches are added up.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, recorder: CudaGraphs, *, accumulates: bool = False
    ):
        self.model, self.loss, self.recorder = model, loss, recorder
        self.accumulates = accumulates
        self.batches = 0
        self.recording: _Capture | None = None
        self.peaks: dict[str, MemoryRecord] = {}  # of a replay's forward and backward

    def __call__(self, image: Tensor, label: Tensor) -> tuple[Tensor, Any]:
        """Return the loss, and the network's outputs unless they are part of a recording."""
        if self.batches == WARMUP_BATCHES:
            self._record(image, label)
        self.batches += 1
        if self.recording is not None and self.recording.accepts(image, label):
            return self.recording.replay(image, label), None
        outputs = self.model(image)
        return self.loss(outputs, label), outputs

    @contextmanager
    def use_memory(self) -> Generator[None]:
        """Allocate from the memory of the recording, which is unused between two steps."""
        if self.recording is None:
            yield
        else:
            with self.recorder.use_memory():
                yield

    def _record(self, image: Tensor, label: Tensor) -> None:
        try:
            self.recording = _Capture(self, image, label)
            self.peaks["forward"] = self.recording.forward.peak
            self.peaks["backward"] = self.recording.backward.peak
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = summarize_error(error)
            log.warning(
                "trainer.cuda_graph: this step cannot be recorded and runs without: %s", reason
            )


class _Capture:
    """The graphs of forward and backward, and the tensors that they read and write."""

    def __init__(self, owner: GraphedPass, image: Tensor, label: Tensor):
        self.accumulates = owner.accumulates
        self.image, self.label = image.clone(), label.clone()
        self.parameters = [p for p in owner.model.parameters() if p.requires_grad]

        def run_forward() -> Tensor:
            return owner.loss(owner.model(self.image), self.label)

        self.forward = owner.recorder.record(run_forward)
        loss = self.forward.tensors
        self.grad_output = torch.ones_like(loss)

        def run_backward() -> list[Tensor | None]:
            with torch.autocast(image.device.type, enabled=False):
                gradients = torch.autograd.grad(
                    loss, self.parameters, self.grad_output, allow_unused=True
                )
            return list(map(match_strides, gradients, self.parameters))

        self.backward = owner.recorder.record(run_backward)
        self.anchor = torch.ones((), requires_grad=True)  # makes autograd call _Replay.backward

    def accepts(self, image: Tensor, label: Tensor) -> bool:
        """Return whether the graphs were recorded for batches like this one."""
        return all(
            (x.shape, x.dtype) == (recorded.shape, recorded.dtype)
            for x, recorded in ((image, self.image), (label, self.label))
        )

    def replay(self, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of a batch; its backward replays the second graph."""
        self.image.copy_(image)
        self.label.copy_(label)
        return _Replay.apply(self.anchor, self)

    def set_gradients(self) -> None:
        for parameter, gradient in zip(self.parameters, self.backward.tensors, strict=True):
            if gradient is None:
                continue
            if parameter.grad is not None:
                parameter.grad += gradient
            else:  # the next replay overwrites its own tensor
                parameter.grad = gradient.clone() if self.accumulates else gradient


def match_strides(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return the gradient with the parameter's strides, which fused optimizers expect."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


class _Replay(Function):
    """The autograd node of a replayed batch."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Capture) -> Tensor:
        ctx.recording = recording
        recording.forward.replay()
        return recording.forward.tensors.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:
        recording = ctx.recording
        recording.grad_output.copy_(grad_output)
        recording.backward.replay()
        recording.set_gradients()
        return None, None


def choose_graphs(
    config: StepConfig, device: torch.device, process: ProcessRank
) -> tuple[CudaGraphs | None, list[str]]:
    """Return what records batches, if anything does; also say why `cuda_graph=true` does not."""
    if config.cuda_graph is not True:
        return None, []
    several = process.world_size > 1
    obstacle = find_cuda_graph_obstacle(config, device.type, several_processes=several)
    if obstacle is not None:
        return None, [f"trainer.cuda_graph=true has no effect: {obstacle}"]
    return CudaGraphs(device), []
