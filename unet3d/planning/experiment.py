"""Write a plan as an experiment: how long it trains, what limits it, and its YAML."""

from math import ceil, prod
from time import perf_counter
from typing import Any

import torch
import yaml

from unet3d.config.compose import Composition
from unet3d.data.preprocessing.pipeline import AUTO, choose_background
from unet3d.errors import UsageError, summarize_error
from unet3d.machine import get_available_bytes, get_free_bytes, resolve_device, resolve_precision
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import make_step_factory, time_step
from unet3d.planning.planner import (
    BATCH_FRACTION,
    MAX_BATCH_SIZE,
    OTHER_FACTOR,
    DatasetFingerprint,
    IsOverridden,
    TrainingPlan,
    compute_max_batch_size,
    find_constant_border,
    format_dims,
)
from unet3d.planning.topology import MAX_PATCH_VOXELS, round_up_to_multiple
from unet3d.text import format_bytes, pluralize
from unet3d.types import Triple

MAX_STEPS = 50_000
"""Optimizer steps of a planned run."""

MIN_STEPS_PER_VALIDATION = 50
"""Validation comes no more often: frequent enough for a short run to have curves, too."""

VALIDATION_FRACTION = 0.03
"""Windows of validation per patch of training; a window takes less than a patch's step."""

NUM_FOLDS = 5

COMMAND_KEYS = ("budget_gib", "preset", "name", "overwrite", "measure_time", "debug")
"""Keys of `unet3d plan` that the planned run does not have."""

GROUPS = (
    *("data", "model", "pool", "checkpointing", "augmentation", "optimizer", "scheduler", "loss"),
)
"""Groups whose options the experiment names."""

LIMIT_SECONDS = 10.0
"""A step that is expected to take longer is not run."""


def plan_schedule(plan: TrainingPlan, fold: int | None) -> tuple[int, int]:
    """Return patches per case in an epoch, and epochs between validations."""
    num_training = plan.num_cases
    if fold is not None:
        num_training = max(1, plan.num_cases * (NUM_FOLDS - 1) // NUM_FOLDS)
    patches_per_case = max(1, round(MIN_STEPS_PER_VALIDATION * plan.batch_size / num_training))
    steps_per_epoch = ceil(num_training * patches_per_case / plan.batch_size)
    windows_per_case = prod(  # windows overlap by half
        1 if size <= patch else ceil(2 * (size - patch) / patch) + 1
        for size, patch in zip(plan.median_shape, plan.patch_size, strict=True)
    )
    windows = (plan.num_cases - num_training) * windows_per_case / plan.batch_size
    steps = max(MIN_STEPS_PER_VALIDATION, windows / VALIDATION_FRACTION)
    return patches_per_case, max(1, round(steps / steps_per_epoch))


def explain_limits(plan: TrainingPlan, is_overridden: IsOverridden) -> list[str]:
    """Say why the patch and the batch are not larger."""
    if is_overridden("data.patch_size"):
        patch = "patch size: set by data.patch_size"
    elif plan.patch_size != plan.initial_patch:
        size = format_dims(plan.initial_patch)
        patch = f"patch size: limited by the budget, {size} would not fit"
    elif all(p >= n for p, n in zip(plan.patch_size, plan.median_shape, strict=True)):
        patch = "patch size: covers the median case, a larger patch would contain only padding"
    else:
        patch = (
            f"patch size: limited to {MAX_PATCH_VOXELS:,} voxels, the largest that a plan starts "
            "with"
        )
    limit = compute_max_batch_size(plan.patch_size, plan.median_shape, plan.num_cases)
    percent = f"{100 * BATCH_FRACTION:g}%"
    if is_overridden("data.batch_size"):
        batch = "batch size: set by data.batch_size"
    elif plan.batch_size < limit:
        batch = f"batch size: limited by the budget, {plan.batch_size + 1} would not fit"
    elif limit == MAX_BATCH_SIZE:
        batch = f"batch size: limited to {MAX_BATCH_SIZE}"
    elif limit > 2:
        batch = f"batch size: limited to {percent} of the dataset's voxels"
    else:
        batch = f"batch size: 2, because 3 would exceed {percent} of the dataset's voxels"
    return [patch, batch]


def render_experiment(
    composition: Composition,
    dataset: DatasetFingerprint,
    plan: TrainingPlan,
    *,
    precision: str,
    fold: int | None,
    flip_axes: list[int] | None,
) -> str:
    """Return the plan as an experiment's YAML, with what the command line set."""
    patches_per_case, epochs = plan_schedule(plan, fold)
    data: dict[str, Any] = {
        "spacing_mm": list(plan.spacing_mm),
        "normalize": plan.normalize,
        "patch_size": list(plan.patch_size),
        "batch_size": plan.batch_size,
        "patches_per_case": patches_per_case,
    }
    if find_constant_border(dataset, composition.is_overridden):
        background = choose_background(dataset.channels)
        data["background"] = AUTO if set(background) == {AUTO} else list(background)
    if dataset.group_by is not None:
        data["group_by"] = dataset.group_by
    values: dict[str, Any] = {
        "data": data,
        "trainer": {"max_steps": MAX_STEPS, "check_val_every_n_epoch": epochs},
    }
    if flip_axes is not None:
        values["augmentation"] = {"flip_axes": flip_axes}
    typed = (o.lstrip("+").partition("=") for o in composition.overrides)
    given = {key: value for key, _, value in typed if key not in COMMAND_KEYS}
    planned = {**plan.model, **plan.strategy, "precision": yaml.safe_load(precision)}
    options = dict(composition.choices)
    for key, value in (planned | {k: yaml.safe_load(v) for k, v in given.items()}).items():
        if key in GROUPS:
            options[key] = given.get(key, value)
        elif not key.startswith("hydra"):
            level, (*parents, name) = values, key.split(".")
            for parent in parents:
                level = level.setdefault(parent, {})
            level[name] = value
    defaults = [f"  - override /{group}: {options[group]}" for group in sorted(GROUPS)]
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    return "\n".join(["defaults:", *defaults, body])


def describe_step_time(config: StepConfig, plan: TrainingPlan) -> str:
    """Say how long steps take on the device that a run would use, or why that is unknown."""
    device = torch.device(resolve_device(config.accelerator))
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"this machine's CPU ({pluralize(torch.get_num_threads(), 'thread')})"
    try:
        seconds = measure_step_time(config, plan, device)
    except Exception as error:  # a plan may be for another machine, and is useful without a time
        return f"time not measured on {name}: {summarize_error(error)}"
    return (
        f"a step takes {seconds:.2g} s on {name}: {MAX_STEPS:,} steps take "
        f"{MAX_STEPS * seconds / 3600:.1f} hours, plus validation"
    )


def measure_step_time(config: StepConfig, plan: TrainingPlan, device: torch.device) -> float:
    """Return the seconds of a step of the planned network; smaller ones are tried before it."""
    cuda = device.type == "cuda"
    precision = resolve_precision(config.precision, device.type)
    needed = (plan.peak.reserved or 0) * (2 if precision.used == "32" else 1)
    free = get_free_bytes(device) if cuda else get_available_bytes(device)
    if free is not None and needed > free:
        raise UsageError(f"it needs {format_bytes(needed)}, {format_bytes(free)} are free")
    start, seconds, seconds_per_voxel = perf_counter(), 0.0, 0.0
    for patch, batch_size in list_trial_sizes(plan):
        # Small patches take longer per voxel: the expected time falls as they grow.
        voxels = batch_size * prod(patch)
        if perf_counter() - start + 2 * seconds_per_voxel * voxels > LIMIT_SECONDS:
            expected = seconds_per_voxel * plan.batch_size * prod(plan.patch_size)
            raise UsageError(f"a step may take up to {expected:.0f} s")
        sizes = {"data.patch_size": patch, "data.batch_size": batch_size}
        variant = config.vary({**sizes, **plan.model, **plan.strategy})
        step = make_step_factory(variant, precision, cuda=cuda, device=device.type)()
        time_step(step, device)  # compiles kernels, and allocates the optimizer's state
        seconds = time_step(step, device)
        seconds_per_voxel = seconds / voxels
    return seconds


def list_trial_sizes(plan: TrainingPlan) -> list[tuple[Triple, int]]:
    """Return patches and batch sizes to run: sides of an eighth, a quarter, half, and the plan."""
    factor = plan.levels.factor if plan.levels.pool_windows else (OTHER_FACTOR,) * 3
    trials = []
    for divisor in (8, 4, 2):
        # Norms need two voxels at the coarsest level.
        sides = zip(plan.patch_size, factor, strict=True)
        size = [min(n, max(n // divisor, 2 * multiple)) for n, multiple in sides]
        trials.append((round_up_to_multiple(size, factor), 1))
    return [*dict.fromkeys(trials), (plan.patch_size, plan.batch_size)]
