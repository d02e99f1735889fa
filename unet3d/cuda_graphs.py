"""Record work on a GPU as CUDA graphs: the host launches one with a single call.

A recording of a batch's forward and backward is valid for one batch size and patch size. Gradients
are in the memory of the graphs, and each replay overwrites them.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from unet3d.errors import summarize_error
from unet3d.lazy_logits import run_network
from unet3d.peak_memory import MemoryRecord

log = logging.getLogger(__name__)

KNOWN_PACKAGES = ("unet3d", "torch", "monai", "dynamic_network_architectures", "nnunetv2")
"""Packages whose modules compute the same operations in every step."""

HOOKS = tuple(
    f"_{kind}_hooks"
    for kind in ("forward", "forward_pre", "backward", "backward_pre", "post_accumulate_grad")
)

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
    batches are added up. Without `trusted`, networks with hooks and other people's code are not
    recorded: a replay does not call Python.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        recorder: CudaGraphs,
        *,
        accumulates: bool = False,
        trusted: bool = True,
    ):
        self.model, self.loss = model, loss
        self.recorder: CudaGraphs | None = recorder  # None after it has failed: frees its memory
        self.accumulates, self.trusted = accumulates, trusted
        self.batches = 0
        self.recording: _Capture | None = None
        self.peaks: dict[str, MemoryRecord] = {}  # of a replay's forward and backward

    def __call__(self, image: Tensor, label: Any) -> tuple[Tensor, Any]:
        """Return the loss, and the network's outputs unless they are part of a recording.

        The label is what the loss takes: a tensor, or a list of tensors.
        """
        if self.recording is not None and self.recording.state != get_state(self.model):
            log.warning("the network has changed: steps are recorded again")
            self.recording, self.batches = None, 0
        if self.batches == WARMUP_BATCHES and self.recorder is not None:
            self._record(self.recorder, image, label)
        self.batches += 1
        if self.recording is not None and self.recording.accepts(image, label):
            return self.recording.replay(image, label), None
        outputs = run_network(self.model, self.loss, image)
        return self.loss(outputs, label), outputs

    def use_memory(self) -> AbstractContextManager[None]:
        """Allocate from the memory of the recording, which is unused between two steps."""
        if self.recording is None or self.recorder is None:
            return nullcontext()
        return self.recorder.use_memory()

    def _record(self, recorder: CudaGraphs, image: Tensor, label: Any) -> None:
        try:
            skipped = None if self.trusted else find_skipped_code(self.model, self.loss)
            if skipped is not None:
                raise RuntimeError(f"a replay would not call {skipped} (trainer.cuda_graph=true)")
            self.recording = _Capture(self, recorder, image, label)
            self.peaks["forward"] = self.recording.forward.peak
            self.peaks["backward"] = self.recording.backward.peak
        except RuntimeError as error:
            log.warning("steps run without CUDA graphs: %s", summarize_error(error))
            self.recorder = None


def find_skipped_code(*modules: nn.Module) -> str | None:
    """Return what a replay might skip: hooks, or what unknown modules do besides computing."""
    for module in chain.from_iterable(module.modules() for module in modules):
        for owner in (module, *module.parameters(recurse=False)):
            if any(getattr(owner, name, None) for name in HOOKS):
                return f"a hook of {type(module).__name__}"
        if type(module).__module__.partition(".")[0] not in KNOWN_PACKAGES:
            return f"the code of {type(module).__name__}"
    return None


class _Capture:
    """The graphs of forward and backward, and the tensors that they read and write."""

    def __init__(self, owner: GraphedPass, recorder: CudaGraphs, image: Tensor, label: Any):
        self.accumulates = owner.accumulates
        batch = tree_map(torch.clone, (image, label))
        self.inputs = tree_leaves(batch)
        self.parameters = [p for p in owner.model.parameters() if p.requires_grad]
        self.state = get_state(owner.model)

        def run_forward() -> Tensor:
            return owner.loss(run_network(owner.model, owner.loss, batch[0]), batch[1])

        self.forward = recorder.record(run_forward)
        loss = self.forward.tensors
        self.grad_output = torch.ones_like(loss)

        def run_backward() -> list[Tensor | None]:
            with torch.autocast(image.device.type, enabled=False):
                gradients = torch.autograd.grad(
                    loss, self.parameters, self.grad_output, allow_unused=True
                )
            return list(map(match_strides, gradients, self.parameters))

        self.backward = recorder.record(run_backward)
        self.anchor = torch.ones((), requires_grad=True)  # makes autograd call _Replay.backward

    def accepts(self, *batch: Any) -> bool:
        """Return whether the graphs were recorded for batches like this one."""
        return all(
            (x.shape, x.dtype) == (recorded.shape, recorded.dtype)
            for x, recorded in zip(tree_leaves(batch), self.inputs, strict=True)
        )

    def replay(self, *batch: Any) -> Tensor:
        """Return the loss of a batch; its backward replays the second graph."""
        for x, recorded in zip(tree_leaves(batch), self.inputs, strict=True):
            recorded.copy_(x)
        return _Replay.apply(self.anchor, self)

    def set_gradients(self) -> None:
        for parameter, gradient in zip(self.parameters, self.backward.tensors, strict=True):
            if gradient is None:
                continue
            if parameter.grad is not None:
                parameter.grad += gradient
            else:  # the next replay overwrites its own tensor
                parameter.grad = gradient.clone() if self.accumulates else gradient


def get_state(model: nn.Module) -> tuple[list[int], list[bool]]:
    """Return which weights are trained, where their values are, and what is in evaluation."""
    weights = [p.data_ptr() if p.requires_grad else -p.data_ptr() for p in model.parameters()]
    return weights, [module.training for module in model.modules()]


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
