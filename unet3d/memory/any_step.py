"""Estimate the memory of a training step that a script defines."""

from math import inf
from numbers import Real
from typing import TYPE_CHECKING

import torch

from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES, get_available_bytes
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.report import format_peaks, plot_timeline
from unet3d.memory.script import NO_UPDATE, Build, trace_script
from unet3d.text import GIB, MIB, format_bytes, pluralize
from unet3d.types import DEVICE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXT_BYTES = 270 * MIB, 850 * MIB
"""The least and the most that CUDA's context took on an H100 and an H200."""

RESERVED_MARGIN = 1.1
"""Reserved memory may be higher than the replay's by this: it was not in 81 of 82 steps of an H100,
which chose it, and in 15 of 15 of an H200."""


def estimate_step(
    build: Build, *, device: str | torch.device = "cuda", budget_gib: float | None = None
) -> "StepEstimate":
    """Estimate the memory of your own training step before it runs; no GPU is needed.

    Args:
        build: makes networks, losses and optimizers as your script does, and returns a function
            that takes one training step. It runs without values: nothing is computed, and every
            tensor that the step uses has to be made in it. Compiled networks are estimated as
            plain modules.
        device: "cuda" (or "auto", "cuda:1": what a step takes is the same), which may have any
            name in the script, or "cpu".
        budget_gib: memory that the step should fit. By default that of this machine's GPU.

    Example::

        >>> def build():
        ...     network = torch.nn.Linear(1024, 1024)
        ...     optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        ...     def step():
        ...         loss = network(torch.randn(64, 1024)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return step
        >>> estimate_step(build, device="cpu").peak
        8921096
    """
    if not callable(build):
        raise UsageError(f"build must be a function that returns a training step, got {build!r}")
    is_number = isinstance(budget_gib, Real) and 0 < budget_gib < inf
    if not (budget_gib is None or is_number):
        raise UsageError(f"budget_gib must be a number above 0, got {budget_gib!r}")
    budget = None if budget_gib is None else int(budget_gib * GIB)
    details = trace_script(build, cuda=simulates_cuda(device))
    if not details.trace.blocks:
        raise UsageError(f"the step that {build!r} returns uses no tensors")
    return StepEstimate(details, budget)


def simulates_cuda(device: str | torch.device) -> bool:
    """Return whether a device is a GPU; refuse those that are not estimated."""
    kind = str(device).partition(":")[0]
    if not DEVICE.fullmatch(str(device)) or kind == "mps":
        raise UsageError(f"device must be auto, cpu, cuda or cuda:N, got {str(device)!r}")
    return kind != "cpu"


class StepEstimate:
    """The estimated memory of a training step; sizes are in bytes."""

    def __init__(self, details: MemoryEstimate, budget: int | None = None):
        self.details = details
        self.budget = budget

    def __repr__(self) -> str:
        return "\n\n".join((self.describe_fit(), self.table(), *self.details.notes))

    @property
    def peak(self) -> int:
        """Return the largest size of all blocks in use."""
        return self.details.allocated

    @property
    def reserved(self) -> int:
        """Return what torch reserves on a GPU; 0 for a CPU."""
        return self.details.peak.reserved or 0

    @property
    def reserved_at_most(self) -> int:
        """Return what torch reserves at most: kernels of cuDNN may take more than is known."""
        return int(RESERVED_MARGIN * self._replayed_at_most)

    @property
    def process(self) -> tuple[int, int]:
        """Return what a process takes of the device at least and at most.

        On an H100 and an H200, 96 of 97 recorded steps were within it.
        """
        low = high = self.peak
        if self.details.trace.cuda:
            low, high = low + CONTEXT_BYTES[0], self._replayed_at_most + CONTEXT_BYTES[1]
        return low, high

    @property
    def _replayed_at_most(self) -> int:
        return self.details.peak.reserved_at_most or 0

    def describe_fit(self) -> str:
        """Say in a sentence whether the step fits the budget, or what it takes."""
        (low, high), budget = self.process, self.budget
        if idle := [note for note in self.details.notes if NO_UPDATE in note]:
            return f"unknown whether it fits: {idle[0]}"
        usual = high if low == high else self.reserved + CUDA_CONTEXT_BYTES
        if budget is None and self.details.trace.cuda and torch.cuda.is_available():
            budget = get_available_bytes(torch.device("cuda"))
        if budget is None:
            takes = f"{format_bytes(usual)}{' of a GPU' * self.details.trace.cuda}"
            return f"takes {takes}; give budget_gib to see whether it fits"
        if high <= budget:
            answer = f"yes, with {format_bytes(budget - high)} to spare"
        elif low <= budget:
            answer = "likely" if usual <= budget else "unlikely"
            answer += f": it takes {format_bytes(low)} to {format_bytes(high)}"
        else:
            answer = f"no: it takes at least {format_bytes(low)}"
        notes = len(self.details.notes)
        more = f"; the estimate has {pluralize(notes, 'note')}" if notes else ""
        return f"fits {format_bytes(budget)}: {answer}{more}"

    def table(self) -> str:
        """Format the peak by phase and by kind of tensor."""
        return format_peaks(self.details)

    def timeline(self) -> "Figure":
        """Plot the memory in use over the step; needs matplotlib."""
        return plot_timeline(self.details, "one training step, estimated")
