"""`unet3d memory`: estimate the memory of the configured training step without running it."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from unet3d.config.compose import ComposedConfig, format_overrides, list_options
from unet3d.config.fields import OptionType, one_of, read_settings
from unet3d.errors import UsageError
from unet3d.files import write_figure, write_output
from unet3d.memory.cuda_libraries import assume_cudnn
from unet3d.memory.estimate import MemoryEstimate, Step, trace_step
from unet3d.memory.fit import (
    FUSED_STRATEGIES,
    LARGER_TILES_MIB,
    estimate_configured_step,
    estimate_with_savings,
    measure_step,
    resolve_fused,
    scale_patch,
)
from unet3d.memory.report import (
    estimate_to_dict,
    format_faster_peak,
    format_layers,
    format_measured,
    format_peaks,
    format_variants,
    make_figure_title,
    plot_layers,
    plot_timeline,
    plot_variants,
    summarize_compiled,
    summarize_estimate,
)
from unet3d.memory.trace import Trace
from unet3d.peak_memory import MemoryRecord
from unet3d.step.config import StepConfig
from unet3d.training.config import TrainConfig, parse_train_config
from unet3d.types import PRECISIONS, Triple

VARIABLE_SETTINGS = (
    *("resolution", "batch", "padding", "kernel"),
    *("channels", "pool", "precision", "checkpointing"),
)
VERSION = OptionType(  # YAML takes it for a number: 9.10 would be 9.1
    "a version with three parts, such as 9.10.2",
    lambda v: isinstance(v, str) and bool(re.match(r"\d+\.\d+", v)),
)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Which estimate to show, and how."""

    training: TrainConfig
    view: Literal["peak", "layers", "timeline"]
    format: Literal["table", "json", "png"]
    output: Path | None
    volume: Triple | None  # of a validation case; None: data.patch_size
    measure: bool
    vary: Annotated[str | None, one_of(VARIABLE_SETTINGS)]
    cudnn: Annotated[str | None, VERSION]  # to estimate for; None: the installed one

    def __post_init__(self):
        is_figure = self.format == "png"
        if self.vary is None and self.view == "timeline" and not is_figure:
            raise UsageError("view=timeline is a figure: add format=png output=FILE.png")
        if self.vary is None and self.view == "peak" and is_figure:
            raise UsageError("format=png draws view=timeline or view=layers: select one of them")
        if is_figure and self.output is None:
            raise UsageError("format=png needs output=FILE.png")
        if self.measure and not torch.cuda.is_available():
            raise UsageError("measure=true needs a GPU, and torch finds none")


def main(composed: ComposedConfig, folder: Path) -> int:
    """Print one estimate, or those of a varied setting."""
    settings = read_settings(MemoryConfig, composed.config, training=parse_train_config(composed))
    with assume_cudnn(settings.cudnn):
        if settings.vary is None:
            print_estimate(settings)
        else:
            print_variants(settings, settings.vary)
    return 0


def print_estimate(settings: MemoryConfig) -> None:
    """Print or draw one estimate."""
    step = settings.training.step
    estimate, savings = estimate_with_savings(step, settings.volume)
    measured = measure_step(step) if settings.measure else None
    summary = summarize_estimate(estimate, savings)
    if step.compile:
        summary = f"{summarize_compiled(estimate)} {summary}"
    if settings.format == "table":
        tables = [(format_peaks if settings.view == "peak" else format_layers)(estimate)]
        if faster := list_faster_settings(settings.training):
            peak = estimate_configured_step(step.vary(faster), settings.volume).peak
            tables[0] += f"\n\n{format_faster_peak(peak, has_graphs='cuda_graph' in faster)}"
        tables += [] if measured is None else [format_measured(estimate, measured)]
        write_output("\n\n".join([*tables, summary]), settings.output)
        return
    if settings.format == "json":
        content = estimate_to_dict(estimate)
        if measured is not None:
            content["measured_phases"] = {k: record.known() for k, record in measured.items()}
        write_output(json.dumps(content), settings.output)
    elif settings.output is not None:  # a figure
        draw = plot_timeline if settings.view == "timeline" else plot_layers
        title = make_figure_title(resolve_fused(step))
        write_figure(draw(estimate, title), settings.output, dpi=110)
        print(settings.output, file=sys.stderr)
    print(summary, file=sys.stderr)


def list_faster_settings(training: TrainConfig) -> dict[str, Any]:
    """Return what a run changes of the step on a GPU that has room for it; else nothing."""
    step, values = resolve_fused(training.step), training.trainer.factory.arguments
    has_tiles = step.strategy in FUSED_STRATEGIES and not (
        step.compile or step.accelerator == "cpu"
    )
    is_open = step.checkpointing.arguments.get("tile_mib") == "auto"
    if not (has_tiles and is_open) or values.get("deterministic"):
        return {}
    records = step.cuda_graph == "auto" and not step.several_processes
    graphs = {"cuda_graph": True} if records else {}
    return {"checkpointing.tile_mib": LARGER_TILES_MIB[0], **graphs}


def print_variants(settings: MemoryConfig, vary: str) -> None:
    """Print how memory depends on one setting."""
    step = settings.training.step
    variants = []
    for label, estimate, measured in estimate_variants(step, vary, measure=settings.measure):
        if isinstance(estimate, UsageError):
            print(f"{label}: {estimate}", file=sys.stderr)
        else:
            variants.append((label, estimate, measured))
    if settings.format == "png" and settings.output is not None:
        bars = [(label, estimate) for label, estimate, _ in variants]
        title = f"vary={vary}, model={step.network.name}"
        write_figure(plot_variants(bars, title), settings.output, dpi=110)
        print(settings.output, file=sys.stderr)
    elif settings.format == "json":
        rows = []
        for label, estimate, measured in variants:
            row = {"value": label, **estimate_to_dict(estimate)}
            rows.append(row | ({} if measured is None else {"measured": measured.known()}))
        write_output(json.dumps(rows), settings.output)
    else:
        write_output(format_variants(variants), settings.output)


Variant = tuple[str, MemoryEstimate | UsageError, MemoryRecord | None]
"""A value of the setting that varies, the estimate of its step, and what a GPU measured."""


def estimate_variants(config: StepConfig, vary: str, *, measure: bool) -> Iterator[Variant]:
    """Yield one variant for each value of the setting that `vary` names."""

    def estimate(changes: dict[str, Any]) -> Variant:
        label = format_overrides(changes)
        try:
            changed = config.vary(changes)
            measured = reduce(or_, measure_step(changed).values()) if measure else None
            return label, estimate_configured_step(changed), measured
        except UsageError as reason:
            return label, reason, None

    yield from map(estimate, list_changes(config, vary))
    if vary in ("kernel", "padding"):
        for size in (16, 32):
            for kernel_size, padding in ((1, 0), (3, 0), (3, 1), (5, 0), (5, 2)):
                label = f"Conv3d(16, 32, {kernel_size}, padding={padding}) at {size}^3"
                step = partial(SingleConvStep, kernel_size, padding, size)
                yield label, trace_step(step, cuda=config.accelerator != "cpu"), None


def list_changes(config: StepConfig, vary: str) -> list[dict[str, Any]]:
    """Return the values to try, each by its key."""
    arguments, patch_size = config.network.model.arguments, config.data.patch_size
    key, values = vary, ()  # padding: our networks keep their size, only the single one varies
    if vary == "resolution":
        key = "data.patch_size"
        values = [scale_patch(patch_size, f) for f in (0.25, 0.5, 0.75, 1.0, 1.25)]
    elif vary == "batch":
        key, values = "data.batch_size", (1, 2, 3, 4, 6, 8)
    elif vary == "kernel" and "pool_kernel" in arguments:  # whose kernel_size may be one number
        key, values = "model.kernel_size", (1, 3, 5)
    elif vary == "channels":
        width = arguments.get("width")
        if width is None:
            raise UsageError("vary=channels needs a network with model.width")
        key, values = "model.width", [max(1, int(width * s)) for s in (0.25, 0.5, 1, 1.5, 2)]
    elif vary == "precision":
        values = PRECISIONS
    elif vary in ("pool", "checkpointing"):
        values = list_options(vary)
    return [{key: value} for value in values]


class SingleConvStep(Step):
    """A training step of a single convolution, without an optimizer."""

    def __init__(self, kernel_size: int, padding: int, size: int):
        self.model = nn.Conv3d(16, 32, kernel_size, padding=padding)
        self.size = size

    def train(self, trace: Trace) -> None:
        """Run forward and backward on two volumes."""
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
