"""Write a plan as an experiment: how long it trains, what limits it, and its YAML."""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import yaml

from unet3d.config.compose import Composition
from unet3d.data.preprocessing.pipeline import AUTO, choose_background
from unet3d.planning.planner import (
    BATCH_FRACTION,
    MAX_BATCH_SIZE,
    DatasetFingerprint,
    IsGiven,
    TrainingPlan,
    find_constant_border,
    join_by_x,
    limit_batch,
)
from unet3d.planning.topology import MAX_PATCH_VOXELS

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


def explain_limits(plan: TrainingPlan, is_given: IsGiven) -> list[str]:
    """Say why the patch and the batch are not larger."""
    if is_given("data.patch_size"):
        patch = "patch size: set by data.patch_size"
    elif plan.patch_size != plan.initial_patch:
        size = join_by_x(plan.initial_patch)
        patch = f"patch size: limited by the budget, {size} would not fit"
    elif all(p >= n for p, n in zip(plan.patch_size, plan.median_shape, strict=True)):
        patch = "patch size: covers the median case, a larger patch would contain only padding"
    else:
        patch = (
            f"patch size: limited to {MAX_PATCH_VOXELS:,} voxels, the largest that a plan starts "
            "with"
        )
    limit = limit_batch(plan.patch_size, plan.median_shape, plan.num_cases)
    percent = f"{100 * BATCH_FRACTION:g}%"
    if is_given("data.batch_size"):
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
    typed = (o.lstrip("+").partition("=") for o in composition.overrides)
    given = {key: value for key, _, value in typed if key not in COMMAND_KEYS}
    planned = {**plan.model, **plan.strategy, "precision": yaml.safe_load(precision)}
    options = dict(composition.choices)
    for key, value in (planned | {k: yaml.safe_load(v) for k, v in given.items()}).items():
        if key in GROUPS:
            options[key] = given.get(key, value)
        elif not key.startswith("hydra"):
            set_nested(values, key.split("."), value)
    defaults = [f"  - override /{group}: {options[group]}" for group in sorted(GROUPS)]
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    return "\n".join(["defaults:", *defaults, body])


def set_nested(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a nested key.

    >>> values = {}
    >>> set_nested(values, ["a", "b"], 1)
    >>> values
    {'a': {'b': 1}}
    """
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value
