"""Choose what fits into memory before the first step: strategy, CUDA graphs, tiles."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from unet3d.cuda_graphs import CudaGraphs
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import (
    Precision,
    describe_missing_kernels,
    get_available_bytes,
)
from unet3d.memory.estimate import MemoryEstimate, UntraceableError, add_context_bytes
from unet3d.memory.fit import (
    estimate_configured_step,
    estimate_resolved_step,
    fits,
    list_leaner_strategies,
    list_run_options,
    resolve_strategy,
    search,
    try_changes,
)
from unet3d.memory.oom_advice import check_memory
from unet3d.memory.report import summarize_compiled
from unet3d.memory.traced_step import find_cuda_graph_obstacle
from unet3d.step.config import StepConfig
from unet3d.text import MIB, format_bytes
from unet3d.training.config import TrainConfig
from unet3d.training.launch import ProcessRank
from unet3d.training.run_folder import Log
from unet3d.types import HasRetention

if TYPE_CHECKING:
    from unet3d.training.datamodule import VolumeDataModule
    from unet3d.training.module import SegmentationModule
    from unet3d.training.run import TrainingRun


def choose_graphs(
    config: StepConfig, device: torch.device, process: ProcessRank
) -> tuple[CudaGraphs | None, list[str]]:
    """Return what records batches, if anything does; also say why `cuda_graph=true` does not."""
    is_wanted = config.cuda_graph is True
    if not (is_wanted or (config.cuda_graph == "auto" and process.world_size == 1)):
        return None, []
    obstacle = find_cuda_graph_obstacle(config, device.type)
    if obstacle is None:
        return CudaGraphs(device), []
    return None, [f"trainer.cuda_graph=true has no effect: {obstacle}"] if is_wanted else []


def choose_strategy(
    step: StepConfig, precision: Precision, device: torch.device
) -> tuple[StepConfig, list[str]]:
    """Return the step with the strategy that fits network and device; say if it is another."""
    requested = step.strategy
    if device.type == "mps":
        step = step.with_strategy("none")
    step = resolve_strategy(step, precision, cuda=device.type == "cuda")
    missing = describe_missing_kernels(device.type)
    if missing is not None:
        return step, [missing]
    if requested == step.strategy:
        return step, []
    reason = "" if requested == "auto" else " this network has no fused blocks,"
    return step, [f"checkpointing={requested}:{reason} using {step.strategy}"]


def estimate_run_memory(
    data: "VolumeDataModule", precision: Precision, module: "SegmentationModule"
) -> tuple[MemoryEstimate | None, list[str]]:
    """Estimate the memory of a step; also return what to print of it before the first one.

    Choose what `auto` leaves open, so that the step fits: the module's CUDA graphs, and its tiles.
    """
    settings, cuda = data.settings, data.device.type == "cuda"
    model: Any = module.model
    if not settings.memory.estimate:
        return None, []
    largest = data.largest_validation
    available, notes = get_available_bytes(data.device), []
    retention = model.retention if isinstance(model, HasRetention) else None
    deterministic = settings.trainer.factory.arguments.get("deterministic")
    options = list_run_options(
        settings.step,
        has_graphs=module.step.graphed_pass is not None,
        # With trainer.deterministic=true, tiles do not depend on the memory that is free, because
        # the order of sums depends on them.
        has_tiles=cuda
        and retention is not None
        and retention.tile_bytes is None
        and not deterministic,
    )

    def estimate_run(step: StepConfig) -> MemoryEstimate:
        if retention is not None:
            model.retention = retention
            if step.checkpointing != settings.step.checkpointing:  # with other tiles
                tile_bytes = step.checkpointing.arguments["tile_mib"] * MIB
                model.retention = replace(retention, tile_bytes=tile_bytes)
        return estimate_resolved_step(
            step, precision, cuda=cuda, volume_size=largest, network=model
        )

    for changes, estimate in try_changes(settings.step, options, estimate_run):
        if isinstance(estimate, UntraceableError):
            if retention is not None:
                model.retention = retention  # nothing says that larger tiles fit
            return None, [str(estimate)]
        if isinstance(estimate, UsageError):  # no such step runs, either
            raise estimate
        if fits(changes, estimate, available):
            break
    step = settings.step.vary(changes)
    if module.step.graphed_pass is not None and not step.cuda_graph:
        module.step.graphed_pass = None
        notes.append("steps run without CUDA graphs, whose memory does not fit")
    if tile_mib := changes.get("checkpointing.tile_mib"):
        notes.append(f"checkpointing.tile_mib=auto: using {tile_mib}")
    peak = format_bytes(estimate.peak.allocated or 0)
    note = f"estimated peak of a step: {peak} {'allocated' if cuda else 'of tensors'}"
    warnings = check_memory(
        estimate,
        step,
        data.device,
        if_too_large=settings.memory.if_too_large,
        volume_size=largest,
        sweeping=settings.composition.sweeping,
    )
    return estimate, [*notes, summarize_compiled(estimate) if step.compile else note, *warnings]


def choose_leaner(
    run: "TrainingRun", error: DoesNotFitError, log: Log, *, is_auto: bool
) -> TrainConfig:
    """Return the settings to continue with after a lack of memory; raise if there are none.

    Only a run of one process with checkpointing=auto may choose: the next strategy that is
    estimated to need less.
    """
    step = run.settings.step
    leaner = [{"checkpointing": name} for name in list_leaner_strategies(step)]
    if not is_auto or run.data.process.world_size > 1 or not leaner:
        raise error
    budget = add_context_bytes(estimate_configured_step(step).run_peak) - 1
    found = next(search(step, leaner, budget), None)
    if found is None:
        raise error
    step, saved = step.vary(found[0]), run.callbacks.last.saved_step
    log(f"{error}\ncontinuing from step {saved} with checkpointing={step.strategy}")
    settings = replace(run.settings, step=step)
    return replace(settings, resume="auto") if saved else settings
