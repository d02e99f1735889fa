"""What a run does before its first step: check the machine, choose what fits, prepare the network.

`unet3d doctor` shows the same checks; Lightning is not imported for them.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from unet3d.cuda_graphs import CudaGraphs
from unet3d.data.dataset import get_network_sizes
from unet3d.data.loading.datasets import compute_class_fractions
from unet3d.errors import DoesNotFitError, UsageError, summarize_error
from unet3d.files import find_existing_dir
from unet3d.machine import (
    Precision,
    describe_missing_kernels,
    get_available_bytes,
    resolve_device,
)
from unet3d.memory.cuda_libraries import CUDNN_WITHOUT_CONV3D
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes
from unet3d.memory.fake_tensors import copy_as_fake
from unet3d.memory.fit import (
    estimate_configured_step,
    fits,
    list_leaner_strategies,
    list_run_options,
    resolve_strategy,
    search,
    try_changes,
)
from unet3d.memory.from_config import check_step_size, estimate_resolved_step
from unet3d.memory.oom_advice import check_memory
from unet3d.memory.report import summarize_compiled
from unet3d.memory.traced_step import find_cuda_graph_obstacle
from unet3d.model.weights import (
    compute_sigmoid_bias,
    compute_softmax_bias,
    find_head_names,
    set_bias,
)
from unet3d.step.config import StepConfig
from unet3d.text import GIB, MIB, format_bytes, pluralize
from unet3d.training.config import TrainConfig
from unet3d.training.ranks import ProcessRank
from unet3d.training.run_folder import Log
from unet3d.types import HasHeads, HasRetention

if TYPE_CHECKING:
    from unet3d.training.datamodule import VolumeDataModule
    from unet3d.training.module import SegmentationModule
    from unet3d.training.run import TrainingRun

SHM = Path("/dev/shm")

PREFETCH = 2  # batches that each DataLoader worker loads ahead, all of them in shared memory


@dataclass(frozen=True)
class Problem:
    """What is wrong or too small, and what to change; with `is_fatal` a run is certain to fail."""

    message: str
    is_fatal: bool = False


def check_machine(
    data: "VolumeDataModule", precision: Precision, network: nn.Module, folder: Path
) -> list[str]:
    """Raise at a problem that would certainly stop the run; return the others as lines."""
    check_step_size(data.settings.step)
    problems = find_problems(
        data.settings,
        precision,
        device=data.device.type,
        processes=data.process.local_world_size,
        folder=folder,
        is_fused=isinstance(network, HasRetention) and network.retention is not None,
    )
    for problem in problems:
        if problem.is_fatal:
            raise UsageError(problem.message)
    return [problem.message for problem in problems]


def find_problems(
    settings: TrainConfig,
    precision: Precision,
    *,
    device: str,
    processes: int,
    folder: Path,
    is_fused: bool,
) -> list[Problem]:
    """Return what is missing on this machine for a run of `processes` processes; change nothing."""
    problems = [check_writable(folder / "checkpoints")]
    if device == "cuda" and precision.used != "32" and not is_fused:
        problems.append(check_cudnn(torch.backends.cudnn.version()))
    elif device != "cuda" and settings.step.accelerator != "cpu":
        problems.append(check_torch_build(sorted(Path("/dev").glob("nvidia[0-9]*"))))
    data = settings.data
    if data.num_workers > 0:
        channels, _ = get_network_sizes(data)
        batch = data.batch_size * prod(data.patch_size) * (4 * channels + 1)
        problems.append(check_shm(workers=processes * data.num_workers, batch=batch))
    return [problem for problem in problems if problem is not None]


def check_writable(folder: Path) -> Problem | None:
    """Check that files can be created in the folder, or the folder in its parent."""
    existing = find_existing_dir(folder)
    try:
        with TemporaryFile(dir=existing):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return Problem(f"{existing} is not writable: {reason}", is_fatal=True)


def check_cudnn(cudnn: int | None) -> Problem | None:
    """Check whether torch gives half-precision 3D convolutions to this version of cuDNN.

    Fused blocks are not concerned: they compute channels-last.
    """
    if cudnn is None or cudnn not in CUDNN_WITHOUT_CONV3D:
        return None
    return Problem(
        f"cuDNN {cudnn // 10_000}.{cudnn % 10_000 // 100}: torch computes half-precision 3D "
        "convolutions of plain modules without it, in many times the memory and the time "
        "(pytorch#166643): install cuDNN 9.15 or newer (nvidia-cudnn-cu12 or -cu13), or use fused "
        "blocks"
    )


def check_torch_build(devices: Sequence[Path]) -> Problem | None:
    """Say why torch may find none of the GPUs that have device files."""
    if not devices:
        return None
    what, fix = "was built without CUDA", "install a CUDA build"
    if torch.version.cuda is not None:
        what = f"for CUDA {torch.version.cuda} finds no GPU"
        fix = "check that nvidia-smi works and that the driver is new enough"
    return Problem(
        f"torch {torch.__version__} {what}, but the machine has an NVIDIA GPU ({devices[0]}): {fix}"
    )


def check_shm(*, workers: int, batch: int) -> Problem | None:
    """Check shared memory for the workers' batches; too little kills workers with SIGBUS."""
    needed = workers * PREFETCH * batch
    if not SHM.is_dir() or needed <= (free := shutil.disk_usage(SHM).free):
        return None
    return Problem(
        f"{SHM} has {format_bytes(free)} left, but the batches of {workers} workers need "
        f"{format_bytes(needed)}: start the container with --shm-size={ceil(1.25 * needed / GIB)}g "
        "or use data.num_workers=0",
        is_fatal=True,
    )


def count_local_processes(settings: TrainConfig, process: ProcessRank | None = None) -> int:
    """Return how many processes this one is to start; 1 if a launcher has started them."""
    trainer = settings.trainer
    if trainer.launch != "local" or (process is not None and process.world_size > 1):
        return 1
    cuda = resolve_device(settings.step.accelerator) == "cuda"
    num_gpus = torch.cuda.device_count() if cuda else None
    processes = (num_gpus or 1) if trainer.devices == "auto" else trainer.devices
    if num_gpus is not None and processes > num_gpus:
        raise UsageError(
            f"trainer.devices={processes}, but torch finds {pluralize(num_gpus, 'GPU')}: lower it, "
            "or set it to auto"
        )
    return processes


# Memory.


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
    largest = max((volume.shape for volume in data.validation), key=prod, default=None)
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
            tile_mib = step.checkpointing.arguments["tile_mib"]
            is_open = tile_mib == settings.step.checkpointing.arguments["tile_mib"]
            tile_bytes = retention.tile_bytes if is_open else tile_mib * MIB
            model.retention = replace(retention, tile_bytes=tile_bytes)
        return estimate_resolved_step(
            step, precision, cuda=cuda, volume_size=largest, network=model
        )

    for changes, estimate in try_changes(settings.step, options, estimate_run):
        if isinstance(estimate, UsageError):
            if retention is not None:
                model.retention = retention  # nothing says that larger tiles fit
            return None, [str(estimate)]
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
    estimate = run.estimate or estimate_configured_step(step, validates=False)
    found = next(search(step, leaner, add_context_bytes(estimate.peak) - 1), None)
    if found is None:
        raise error
    step, saved = step.vary(found[0]), run.callbacks.last.saved_step
    log(f"{error}\ncontinuing from step {saved} with checkpointing={step.strategy}")
    settings = replace(run.settings, step=step)
    return replace(settings, resume="auto") if saved else settings


# The network.


def initialize_head_bias(data: "VolumeDataModule", model: nn.Module) -> list[str]:
    """Let the bias of the heads start at the class fractions of the training patches.

    Return messages about networks that are not ours.
    """
    config, dataset, loader = data.settings.step, data.dataset, data.train_loader
    if not config.network.prior_bias:
        return []
    fractions = compute_class_fractions(
        loader.patches,
        num_classes=len(dataset.classes),
        samples=loader.epoch_sampler.samples,
        foreground_fraction=config.data.foreground_fraction,
    )
    if dataset.regions is None:
        bias = compute_softmax_bias(fractions)
    else:
        by_region = [fractions[list(labels)].sum() for labels in dataset.regions.values()]
        bias = compute_sigmoid_bias(by_region)
    if isinstance(model, HasHeads):
        set_bias(model.list_heads(), bias)
        return []
    names = trace_head_names(model, config, len(dataset.channels), len(bias))
    set_bias([model.get_submodule(name) for name in names], bias)
    if not names:
        return ["model.prior_bias: found no head with a bias, so the outputs start equal"]
    return [
        f"model.prior_bias: the bias of {' and '.join(names)} starts at the class fractions of the "
        "training patches (model.prior_bias=false disables it)"
    ]


def trace_head_names(
    model: nn.Module, config: StepConfig, channels: int, outputs: int
) -> list[str]:
    """Return the names of a network's last convolutions, found by a forward without values."""
    size = config.data.patch_size
    with FakeTensorMode():
        try:
            return find_head_names(copy_as_fake(model), torch.zeros(2, channels, *size), outputs)
        except DataDependentOutputException:  # it reads values
            return []
        except Exception as error:
            problem = f"cannot take patches of {'x'.join(map(str, size))}"
            if isinstance(error, ImportError):
                problem = "needs a package that is not installed"
            message = f"model={config.network.name} {problem}: {summarize_error(error)}"
            raise UsageError(message) from error
