"""Estimate the memory of a training step of any network, without Hydra and Lightning."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.errors import UsageError
from unet3d.machine import AUTOCAST_TYPES
from unet3d.memory.batches import find_fitting_batch
from unet3d.memory.estimate import MemoryEstimate, Step, estimate_step
from unet3d.memory.fake_tensors import copy_as_fake, enable_foreach
from unet3d.memory.report import format_peaks, plot_timeline
from unet3d.memory.trace import Trace
from unet3d.text import GIB
from unet3d.types import DEVICE, HasRetention, find_precision

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[Any], Tensor]
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
    if not input_shape or min(input_shape) < 1:
        raise UsageError(f"input_shape must be sizes of at least 1, got {input_shape!r}")
    name, supported = find_precision(precision), ("32", *AUTOCAST_TYPES)
    if name not in supported:
        raise UsageError(f"precision must be one of {', '.join(supported)}, got {precision!r}")
    kind = str(device).partition(":")[0]
    if not DEVICE.fullmatch(str(device)) or kind == "mps":
        raise UsageError(f"device must be auto, cpu, cuda or cuda:N, got {str(device)!r}")
    plain: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    is_compiled = plain is not model or plain._compiled_call_impl is not None

    def estimate(batch: int) -> MemoryEstimate:
        def make_step() -> ModelStep:
            fake: Any = copy_as_fake(plain).train()
            if is_compiled:
                fake._compiled_call_impl = None
                for module in fake.modules():
                    if isinstance(module, HasRetention):  # which compiles as plain modules
                        module.retention = None
            made = optimizer(p for p in fake.parameters() if p.requires_grad)
            if kind != "cpu":
                enable_foreach(made)
            shape = (batch, *input_shape[1:])
            return ModelStep(fake, shape, loss or sum_means, made, AUTOCAST_TYPES.get(name))

        return estimate_step(make_step, cuda=kind != "cpu")

    return NetworkEstimate(estimate, input_shape[0])


class NetworkEstimate:
    """The estimated memory of a network's training step; sizes are in bytes."""

    def __init__(self, estimate: Callable[[int], MemoryEstimate], batch: int):
        self._estimate = cache(estimate)
        self.details = self._estimate(batch)

    def __repr__(self) -> str:
        return self.table()

    @property
    def peak(self) -> int:
        """Return the largest size of all blocks in use."""
        return self.details.allocated

    @property
    def reserved(self) -> int:
        """Return what torch reserves on a GPU; 0 for a CPU."""
        return self.details.peak.reserved or 0

    def table(self) -> str:
        """Format the peak by phase and by kind of tensor."""
        return format_peaks(self.details)

    def timeline(self) -> "Figure":
        """Plot the memory in use over the step; needs matplotlib."""
        return plot_timeline(self.details, "one training step, estimated")

    def largest_batch(self, budget_gib: float) -> int:
        """Return the largest batch that fits a GPU with this memory; 0 if none does.

        600 MiB of it are left for the CUDA context.
        """
        if not self.details.trace.cuda:
            raise UsageError('largest_batch is for GPUs: estimate with device="cuda"')
        if not budget_gib > 0:
            raise UsageError(f"budget_gib must be above 0, got {budget_gib}")
        found = find_fitting_batch(self._estimate, int(budget_gib * GIB))
        return 0 if found is None else found[0]


@dataclass(eq=False)
class ModelStep(Step):
    """A training step as most loops write it; it may do something else the second time."""

    model: nn.Module
    shape: Sequence[int]
    loss: Loss
    optimizer: torch.optim.Optimizer
    autocast: torch.dtype | None

    def train(self, trace: Trace) -> None:
        trace.begin_phase("forward")
        x = torch.empty(*self.shape)
        trace.label(x, "input")
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            loss = self.loss(self.model(x))
        trace.begin_phase("backward")
        loss.backward()
        trace.begin_phase("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()


def sum_means(outputs: Any) -> Tensor:
    """Return a number that every output contributes to."""
    means = [x.float().mean() for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    return torch.stack(means).sum()
