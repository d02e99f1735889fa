"""Write a plan as an experiment: its dataset, how long it trains, what limits it, and its YAML."""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np
import yaml

from unet3d.config.compose import Composition, parse_value
from unet3d.data.augmentation.transforms import get_thin_axes
from unet3d.data.preprocessing.channels import AUTO, describe_axes
from unet3d.data.preprocessing.fingerprint import CaseFingerprint
from unet3d.data.preprocessing.pipeline import choose_background
from unet3d.nnunet.plans import (
    EPOCHS,
    RECIPE,
    STEPS_PER_EPOCH,
    compute_foreground_fraction,
)
from unet3d.planning.planner import (
    BATCH_FRACTION,
    MAX_BATCH_SIZE,
    DatasetFingerprint,
    IsOverridden,
    TrainingPlan,
    compute_max_batch_size,
    find_constant_border,
    format_dims,
)
from unet3d.planning.topology import MAX_PATCH_VOXELS
from unet3d.text import pluralize

LONG_STEPS = STEPS_PER_EPOCH * EPOCHS
"""Optimizer steps of a run without a limit, as many as nnU-Net's."""

MIN_LONG_STEPS = 50_000
"""Steps from which a run has nnU-Net's recipe."""


RECIPES: dict[str, tuple[Sequence[str], str]] = {
    "short": ((), "AdamW and light augmentation, which learn most in a few thousand steps"),
    "long": (RECIPE, "SGD, augmentation and sampling of nnU-Net, which need many steps"),
}
"""Changes of the defaults of `unet3d train`, and what they are."""

MANY_PASSES = 50
"""Times that a run sees each training case, from which it learns them by heart."""

TURNING = {"augmentation": "light_spatial"}

LOW_RESOLUTION_FRACTION = 0.25
"""nnU-Net has a Dice per volume unless a patch covers less than this of the median case."""

MIN_STEPS_PER_VALIDATION = 50
"""Validation comes no more often: frequent enough for a short run to have curves, too."""

MIN_VALIDATIONS, MAX_VALIDATIONS = 5, 1000

VALIDATION_FRACTION = 0.03
"""Windows of validation per patch of training; a window takes less than a patch's step."""

COMMAND_KEYS = "budget_gib preset name overwrite measure_time debug max_time steps recipe".split()
"""Keys of `unet3d plan` that the planned run does not have."""

GROUPS = "data model pool checkpointing augmentation optimizer scheduler loss".split()
"""Groups whose options the experiment names."""


def summarize_dataset(
    fingerprints: Sequence[CaseFingerprint], classes: Sequence[str], orientation: str
) -> str:
    """Describe sizes, spacings and classes: the median, and the range where cases differ."""

    def format_range(values: np.ndarray) -> str:
        rows = values.min(0), np.median(values, 0), values.max(0)
        low, middle, high = (format_dims([float(f"{n:.4g}") for n in row]) for row in rows)
        return middle if low == high else f"{middle} ({low} to {high})"

    counts = [[p.voxels.get(c, 0) for c in range(len(classes))] for p in fingerprints]
    fractions = np.array(counts) / np.sum(counts, axis=1, keepdims=True).clip(min=1)
    shapes = np.array([p.shape for p in fingerprints])
    sizes = describe_axes(np.median(shapes, 0).tolist(), orientation)
    if (shapes != shapes[0]).any():
        sizes += f", {format_dims(shapes.min(0))} to {format_dims(shapes.max(0))}"
    spacings = format_range(np.array([p.spacing_mm for p in fingerprints]))
    rows = [
        f"{len(fingerprints)} cases, sizes {sizes} voxels",
        f"spacings {spacings} mm",
    ]
    for c, name in enumerate(classes[1:], start=1):
        count, percent = int((fractions[:, c] > 0).sum()), 100 * fractions[:, c].mean()
        rows.append(f"{name}: in {pluralize(count, 'case')}, {percent:.2g}% of the voxels")
    return "\n".join(rows)


def choose_recipe(recipe: str, steps: int) -> str:
    """Return the recipe of a run: nnU-Net's, where it has the steps for it."""
    if recipe != "auto":
        return recipe
    return "long" if steps >= MIN_LONG_STEPS else "short"


def compute_coverage(plan: TrainingPlan) -> float:
    """Return the share of the median case that a patch covers."""
    return prod(min(1, p / n) for p, n in zip(plan.patch_size, plan.median_shape, strict=True))


def choose_turning(plan: TrainingPlan, steps: int) -> tuple[dict[str, Any], str]:
    """Return the rotations and scales of the short recipe, and why it has them or none."""
    patches = steps * plan.batch_size / plan.num_training
    passes = patches * compute_coverage(plan)
    chosen = TURNING if passes >= MANY_PASSES else {}
    name = "rotations and scales" if chosen else "light augmentation alone"
    return chosen, f"each case is seen {passes:,.1f} times: {name}"


def describe_long_recipe(plan: TrainingPlan) -> dict[str, Any]:
    """Return what nnU-Net's trainer derives from patch and batch, by key."""
    values: dict[str, Any] = {
        "data.foreground_fraction": compute_foreground_fraction(plan.batch_size),
        "loss.batch_dice": compute_coverage(plan) < LOW_RESOLUTION_FRACTION,
        "evaluation.tta": True,
    }
    if any(get_thin_axes(plan.patch_size)):
        values["augmentation.rotation_degrees"] = [180, 180, 180]  # in plane only
    return values


def plan_schedule(plan: TrainingPlan, steps: int) -> tuple[int, int]:
    """Return patches per case in an epoch, and epochs between validations."""
    num_training = plan.num_training
    frequency = max(MIN_STEPS_PER_VALIDATION, steps / MAX_VALIDATIONS)
    patches_per_case = max(1, round(frequency * plan.batch_size / num_training))
    steps_per_epoch = ceil(num_training * patches_per_case / plan.batch_size)
    windows_per_case = prod(  # windows overlap by half
        1 if size <= patch else ceil(2 * (size - patch) / patch) + 1
        for size, patch in zip(plan.median_shape, plan.patch_size, strict=True)
    )
    windows = (plan.num_cases - num_training) * windows_per_case / plan.batch_size
    frequency = min(max(frequency, windows / VALIDATION_FRACTION), steps / MIN_VALIDATIONS)
    return patches_per_case, max(1, round(frequency / steps_per_epoch))


def explain_limits(
    plan: TrainingPlan, is_overridden: IsOverridden, *, is_timed: bool = False
) -> list[str]:
    """Say why the patch and the batch are not larger."""
    if is_overridden("data.patch_size"):
        patch = "patch size: set by data.patch_size"
    elif plan.patch_size != plan.initial_patch:
        size = format_dims(plan.initial_patch)
        patch = f"patch size: limited by the budget, {size} would not fit"
    elif all(p >= n for p, n in zip(plan.patch_size, plan.median_shape, strict=True)):
        patch = "patch size: covers the median case, a larger patch would contain only padding"
    else:
        patch = f"patch size: limited to {MAX_PATCH_VOXELS:,} voxels, with which a plan starts"
    limit = compute_max_batch_size(plan.patch_size, plan.median_shape, plan.num_cases)
    if is_overridden("data.batch_size"):
        batch = "batch size: set by data.batch_size"
    elif is_timed:
        batch = f"batch size: {plan.batch_size}, because more would leave time for fewer steps"
    elif plan.batch_size < limit:
        batch = f"batch size: limited by the budget, {plan.batch_size + 1} would not fit"
    elif limit == MAX_BATCH_SIZE:
        batch = f"batch size: limited to {MAX_BATCH_SIZE}"
    else:
        percent = f"{100 * BATCH_FRACTION:g}%"
        batch = f"batch size: limited to {percent} of the dataset's voxels, but at least 2"
    return [patch, batch]


def render_experiment(
    composition: Composition,
    dataset: DatasetFingerprint,
    plan: TrainingPlan,
    *,
    precision: str,
    schedule: tuple[int, int],
    limit: dict[str, Any],
    recipe: dict[str, Any],
    flip_axes: list[int] | None,
) -> str:
    """Return the plan as an experiment's YAML, with what the command line set.

    `limit` is the key of `trainer` that ends the run; `recipe` has values that depend on the plan.
    """
    patches_per_case, epochs = schedule
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
    values: dict[str, Any] = {"data": data, "trainer": {**limit, "check_val_every_n_epoch": epochs}}
    if flip_axes is not None:
        values["augmentation"] = {"flip_axes": flip_axes}
    typed = (o.lstrip("+").partition("=") for o in composition.overrides if o[0] != "~")
    given = {key: value for key, _, value in typed if key not in COMMAND_KEYS}
    planned = {**recipe, **plan.model, **plan.strategy, "precision": yaml.safe_load(precision)}
    options = dict(composition.choices)
    for key, value in (planned | {k: parse_value(v) for k, v in given.items()}).items():
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
