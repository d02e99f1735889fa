"""One thing of a config swept, everything else as it is: why cost follows what it follows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unet3d.config.compose import ComposedConfig, get_config_dir
from unet3d.errors import UsageError
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.memory.record import MemoryRecord
from unet3d.memory.trace import Trace
from unet3d.workflows.memory.estimate import estimate_memory, format_scaled_patch, with_overrides
from unet3d.workflows.memory.measure import measure_step, require_gpu

SWEEPS = (
    "resolution",
    "batch",
    "padding",
    "kernel",
    "channels",
    "pool",
    "precision",
    "checkpointing",
)


@dataclass(frozen=True)
class SweepPoint:
    """One value of the thing that is swept: what a step takes, or why it cannot be."""

    label: str
    found: MemoryEstimate | str
    measured: MemoryRecord | None = None  # on this machine's GPU, if that was asked for


def run_sweep(request: ComposedConfig, what: str, *, measure: bool = False) -> Iterator[SweepPoint]:
    """One point for each value of the thing that is swept."""
    if measure:
        require_gpu()
    if what not in SWEEPS:
        raise UsageError(f"sweep must be one of {', '.join(SWEEPS)}, got {what!r}")
    cuda = str(request.config.trainer.accelerator) != "cpu"
    for override in list_sweep_overrides(request, what):
        try:
            trial = with_overrides(request, override)
            real = measure_step(trial).peak if measure else None
            yield SweepPoint(override, estimate_memory(trial), real)
        except UsageError as reason:
            yield SweepPoint(override, str(reason))
    if what in ("kernel", "padding"):
        for size in (16, 32):
            for kernel, padding in ((1, 0), (3, 0), (3, 1), (5, 0), (5, 2)):
                label = f"Conv3d(16, 32, {kernel}, padding={padding}) at {size}^3"
                made = estimate_step(partial(SingleConvStep, kernel, padding, size), cuda=cuda)
                yield SweepPoint(label, made)


def list_sweep_overrides(request: ComposedConfig, what: str) -> list[str]:
    """The overrides that a study tries."""
    cfg = request.config
    if what == "resolution":
        shares = (0.25, 0.5, 0.75, 1.0, 1.25)
        return [
            f"data.patch_size={format_scaled_patch(cfg.data.patch_size, share)}" for share in shares
        ]
    if what == "batch":
        return [f"data.batch_size={n}" for n in (1, 2, 3, 4, 6, 8)]
    if what == "kernel":
        return [f"model.kernel_size={k}" for k in (1, 3, 5)] if "kernel_size" in cfg.model else []
    if what == "channels":
        width = cfg.model.get("width")
        if width is None:
            raise UsageError("sweep=channels needs a network with model.width")
        return [f"model.width={max(1, int(width * s))}" for s in (0.25, 0.5, 1, 1.5, 2)]
    if what == "precision":
        return [f"precision={p}" for p in ("32", "16", "bf16", "16-true", "bf16-true")]
    if what in ("pool", "checkpointing"):
        options = sorted(p.stem for p in (get_config_dir() / what).glob("[!_]*.yaml"))
        return [f"{what}={option}" for option in options]
    return []  # padding: the networks keep their size; it is studied on one convolution


class SingleConvStep:
    """A training step of a single convolution, without an optimizer."""

    def __init__(self, kernel: int, padding: int, size: int):
        self.model = nn.Conv3d(16, 32, kernel, padding=padding)
        self.size = size

    def train(self, trace: Trace) -> None:
        """Forward and backward of two volumes."""
        trace.begin_phase("forward")
        x = torch.empty(2, 16, self.size, self.size, self.size, requires_grad=True)
        trace.label(x, "input")
        y = self.model(x)
        gradient = torch.empty_like(y)
        trace.label(gradient, "activation gradients")
        trace.begin_phase("backward")
        y.backward(gradient)
        trace.begin_phase("optimizer")
        self.model.zero_grad()

    def validate(self, trace: Trace) -> None:
        """There is nothing to validate."""
