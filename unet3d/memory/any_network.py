"""Estimate the memory of a training step of any network, without Hydra and Lightning."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.errors import UsageError
from unet3d.machine import AUTOCAST_TYPES
from unet3d.memory.any_step import StepEstimate, simulates_cuda
from unet3d.memory.batches import find_fitting_batch
from unet3d.memory.estimate import MemoryEstimate, UntraceableError
from unet3d.memory.fake_tensors import copy_as_fake
from unet3d.memory.script import trace_script, use_plain_modules
from unet3d.text import GIB
from unet3d.types import find_precision

Loss = Callable[[Any], Tensor]
OTHER_TYPE = re.compile("Input type|scalar type|same dtype")
ONE_INPUT = "The input is one float32 tensor: pass others in the build of unet3d.estimate_step"
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def estimate_memory(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    precision: str | int = "32",
    device: str | torch.device = "cuda",
) -> "NetworkEstimate":
    """Estimate the memory of a training step before it runs; no GPU is needed.

    Args:
        model: any network in PyTorch. It is not changed, and its weights may be on any device. A
            compiled network is estimated as plain modules.
        input_shape: shape of a batch, such as (2, 1, 128, 128, 128).
        loss: computes a number from the network's outputs. Tensors that it creates are counted.
            By default the sum of the outputs' means.
        optimizer: makes an optimizer from the parameters.
        precision: 32, or mixed precision: 16 or bf16, or Lightning's name, such as "16-mixed".
        device: "cuda" (or "auto", "cuda:1": what a step takes is the same) or "cpu", without the
            columns that PyTorch unfolds there for convolutions of one small volume.

    Example::

        >>> network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))
        >>> estimate = estimate_memory(network, (2, 1, 16, 16, 16), device="cpu")
        >>> estimate.peak
        822200
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {model!r}")
    try:
        sizes = torch.Size(input_shape)
    except TypeError:
        sizes = torch.Size()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"input_shape must be sizes of at least 1, got {input_shape!r}")
    if not callable(optimizer):
        raise UsageError(f"optimizer must make one, such as torch.optim.AdamW, got {optimizer!r}")
    name, supported = find_precision(precision), ("32", *AUTOCAST_TYPES)
    if name not in supported:
        raise UsageError(f"precision must be one of {', '.join(supported)}, got {precision!r}")
    cuda = simulates_cuda(device)
    plain: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    is_compiled = plain is not model or plain._compiled_call_impl is not None

    def estimate(batch: int) -> MemoryEstimate:
        def build() -> Callable[[], None]:
            fake: Any = copy_as_fake(plain)
            if not fake.training:  # its parts may be in evaluation
                fake.train()
            if is_compiled:
                fake._compiled_call_impl = None
                use_plain_modules(fake)
            made = optimizer(p for p in fake.parameters() if p.requires_grad)
            shape = (batch, *sizes[1:])
            return make_loop(fake, shape, loss or sum_means, made, AUTOCAST_TYPES.get(name))

        return trace_script(build, cuda=cuda)

    try:
        return NetworkEstimate(estimate, sizes[0])
    except UntraceableError as error:
        if isinstance(error.__cause__, TypeError) or OTHER_TYPE.search(str(error)):
            raise UntraceableError(f"{error}. {ONE_INPUT}") from error
        raise


class NetworkEstimate(StepEstimate):
    """The estimated memory of a network's training step; sizes are in bytes."""

    def __init__(self, estimate: Callable[[int], MemoryEstimate], batch: int):
        self._estimate = cache(estimate)
        super().__init__(self._estimate(batch))

    def largest_batch(self, budget_gib: float) -> int:
        """Return the largest batch that fits a GPU with this memory; 0 if none does.

        600 MiB of it are left for the CUDA context.
        """
        if not self.details.trace.cuda:
            raise UsageError('largest_batch is for GPUs: estimate with device="cuda"')
        if not (isinstance(budget_gib, Real) and budget_gib > 0):
            raise UsageError(f"budget_gib must be above 0, got {budget_gib}")
        found = find_fitting_batch(self._estimate, int(budget_gib * GIB))
        return 0 if found is None else found[0]


def make_loop(
    model: nn.Module,
    shape: Sequence[int],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    autocast: torch.dtype | None,
) -> Callable[[], None]:
    """Return a training step that keeps its input and its loss, and no outputs."""

    def step() -> None:
        x = torch.empty(*shape)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            computed = loss(model(x))
        computed.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sum_means(outputs: Any) -> Tensor:
    """Return a number that every output contributes to."""
    means = [x.float().mean() for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    return torch.stack(means).sum()
