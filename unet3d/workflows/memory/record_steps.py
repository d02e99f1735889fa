"""Record what a GPU allocates in three training steps, and estimate the same job again."""

from collections.abc import Mapping
from typing import Any

import torch

from unet3d import __version__
from unet3d.config.allowed_targets import check_saved_config, is_inside, iter_targets
from unet3d.config.compose import compose_config, replace_values
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.errors import UsageError
from unet3d.machine.describe import describe_machine
from unet3d.machine.device import resolve_precision
from unet3d.memory.allocator_settings import get_allocator_settings
from unet3d.memory.comparison import Comparison, compare_recording
from unet3d.memory.conv_backend import VERSIONS, parse_rules
from unet3d.memory.library_workspaces import CUBLAS_WORKSPACE, get_cublas_bytes
from unet3d.memory.recording import Recording, record_allocations
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.measure import require_gpu
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.memory.training_step import NullListener, make_step_factory
from unet3d.workflows.shared.dataset import complete_settings

MAX_EVENTS = 1_000_000

# What of a config changes the memory of a step, besides its precision.
GROUPS = ("model", "pool", "checkpointing", "optimizer", "loss")
VALUES = {
    "data": ("patch_size", "batch_size", "in_channels", "num_classes"),
    "trainer": ("accumulate_grad_batches", "gradient_clip_val", "devices"),
}
SHIPPED = ("unet3d", "torch", "monai")
"""Packages whose names may be in a file that is attached to an issue."""


def record_steps(settings: TrainingSettings) -> Recording:
    """Run three steps on this machine's GPU and record its allocator."""
    require_gpu()
    if get_allocator_settings().expandable_segments:
        raise UsageError("recording= needs segments that do not expand: unset PYTORCH_ALLOC_CONF")
    device = torch.device("cuda")
    precision = resolve_precision(settings.precision, "cuda")
    settings = complete_settings(resolve_strategy(settings, precision, cuda=True))
    job = describe_job(settings)
    memory = torch.cuda.memory
    step = make_step_factory(settings, precision, cuda=True, device="cuda")()
    memory._record_memory_history(context=None, max_entries=MAX_EVENTS)
    try:
        before, events, starts = record_allocations(
            lambda: step.train(NullListener()),
            memory._snapshot,
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )
    finally:
        memory._record_memory_history(enabled=None)
    return Recording(
        machine=describe_machine(device),
        job=job,
        cublas_bytes=get_cublas_bytes(),
        before=before,
        events=events,
        step_starts=starts,
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
        reserved_after=torch.cuda.memory_reserved(device),
        unet3d=__version__,
    )


def compare_with_estimate(recording: Recording) -> Comparison:
    """Estimate the recorded job with today's code, for the recorded versions."""
    machine = recording.machine
    rules = parse_rules(machine["torch"], machine["cudnn"])
    with VERSIONS.assume(rules), CUBLAS_WORKSPACE.assume(recording.cublas_bytes):
        return compare_recording(recording, estimate_memory(restore_job(recording.job)))


def describe_job(settings: TrainingSettings) -> dict[str, Any]:
    """Return what the memory of a step depends on, without names and paths of the user's."""
    config = settings.resolved
    job: dict[str, Any] = {group: config[group] for group in GROUPS}
    job |= {group: {key: config[group][key] for key in keys} for group, keys in VALUES.items()}
    job |= {"strategy": settings.strategy, "precision": settings.precision}
    if settings.data.regions is not None:
        regions = enumerate(settings.data.regions.values(), 1)
        job["data"]["regions"] = {f"region_{n}": list(labels) for n, labels in regions}
        job["data"]["region_labels"] = settings.data.region_labels and [
            *settings.data.region_labels
        ]
        if "regions" in job["loss"]:
            job["loss"] = job["loss"] | {"regions": job["data"]["regions"]}
    for _, target in iter_targets(job, ""):
        if not is_inside(target, SHIPPED):
            raise UsageError(
                f"recording= writes only what unet3d, torch and MONAI define, and not {target}"
            )
    return job


def restore_job(job: Mapping[str, Any]) -> TrainingSettings:
    """Return the settings of a recorded job."""
    composed = compose_config([f"checkpointing={job['strategy']}"], "train")
    groups = {group: job[group] for group in GROUPS}
    check_saved_config(groups, "job", packages=SHIPPED, allow_targets=())
    values = {f"{group}.{key}": value for group in VALUES for key, value in job[group].items()}
    values |= {"precision": job["precision"], "trainer.accelerator": "cuda"}
    return parse_training(replace_values(composed, groups | values))
