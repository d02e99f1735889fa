"""`unet3d plan data=... budget_gib=...`: choose settings, and write them as an experiment file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from unet3d.config.compose import ComposedConfig, compose_config, format_overrides
from unet3d.config.fields import (
    DURATION,
    OptionType,
    convert_option,
    format_duration,
    integer,
    is_text,
    one_of,
    read,
    read_settings,
)
from unet3d.data.preprocessing.channels import describe_axes
from unet3d.data.sides import find_mixing_flips
from unet3d.errors import UsageError
from unet3d.files import write_text
from unet3d.machine import get_available_bytes, resolve_device
from unet3d.memory.fit import BUDGET, get_budget_bytes
from unet3d.planning.experiment import (
    LONG_STEPS,
    RECIPES,
    choose_recipe,
    choose_turning,
    describe_long_recipe,
    explain_limits,
    plan_schedule,
    render_experiment,
    summarize_dataset,
)
from unet3d.planning.planner import (
    DatasetFingerprint,
    TrainingPlan,
    check_largest_case,
    find_constant_border,
    find_ordered_axes,
    format_dims,
    inspect_dataset,
    make_plan,
)
from unet3d.planning.step_time import (
    describe_limit,
    describe_step_time,
    plan_within_time,
)
from unet3d.text import format_bytes, pluralize
from unet3d.training.config import TrainConfig, parse_train_config

PRESET_GIB = {"resenc_m": 8.5, "resenc_l": 21.1, "resenc_xl": 34.1}
"""GPU memory that nnU-Net's documentation states for its presets: 9.1, 22.7 and 36.6 GB."""

NAME = OptionType(
    "letters, digits, - and _",
    lambda value: is_text(value) and re.fullmatch(r"[A-Za-z0-9_-]+", str(value)) is not None,
    str,
)

RECIPE = one_of(("auto", *RECIPES))


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan, and the name of the experiment to write."""

    training: Mapping[str, TrainConfig]  # by recipe
    budget_gib: float | None  # None: what this machine's GPU has, or the CPU for max_time
    max_seconds: Annotated[float | None, DURATION, "max_time"]
    steps: Annotated[int | None, integer(">= 1")]
    recipe: Annotated[str, RECIPE]
    name: Annotated[str, NAME]
    overwrite: bool
    measure_time: bool

    def __post_init__(self):
        if self.steps is not None and self.max_seconds is not None:
            raise UsageError("use either steps= or max_time=")
        if self.max_seconds is not None and not self.measure_time:
            raise UsageError("max_time= needs the time of a step: remove measure_time=false")


def read_config(composed: ComposedConfig) -> PlanConfig:
    """Read the config; a preset has its own network, and a budget of its own."""
    config, overrides, network = composed.config, composed.composition.overrides, []
    preset = convert_option(config, "", "preset", Annotated[str | None, one_of(tuple(PRESET_GIB))])
    if preset is not None:
        words = [word for word in overrides if word.startswith("model=")]
        if words:
            raise UsageError(f"preset={preset} has its own network: remove {words[0]}")
        network = ["model=unet_resenc"]
    if read(config, "budget_gib") is not None:
        budget = BUDGET.parse(read(config, "budget_gib"), "budget_gib")
    else:
        budget = PRESET_GIB.get(preset)
        if budget is None and read(config, "max_time") is None:
            raise UsageError("budget_gib must be given: GPU memory in GiB, or auto")
    training = {}
    for name, (changes, _) in RECIPES.items():
        words = [*network, *changes]
        with_recipe = compose_config([*words, *overrides], "plan") if words else composed
        training[name] = parse_train_config(with_recipe)
    return read_settings(PlanConfig, config, training=training, budget_gib=budget)


def main(composed: ComposedConfig, folder: Path) -> int:
    """Inspect the data, search, and write the experiment with a figure of the dataset."""
    settings = read_config(composed)
    steps, time = settings.steps or LONG_STEPS, settings.max_seconds
    recipe = choose_recipe(settings.recipe, 0 if time else steps)
    training, is_overridden = settings.training[recipe], composed.composition.is_overridden
    path = Path("conf") / "experiment" / f"{settings.name}.yaml"
    if path.exists() and not settings.overwrite:
        raise UsageError(f"{path} exists: choose another name=, or set overwrite=true")
    step, budget = training.step, None
    if time and settings.budget_gib is None:  # on the device of this machine
        device = torch.device(resolve_device(step.accelerator))
        step = step if device.type == "cuda" else step.vary({"accelerator": "cpu"})
        budget = get_available_bytes(device)
    budget = budget or get_budget_bytes(settings.budget_gib)
    dataset = inspect_dataset(training.data, training.fold, is_overridden)
    summary = summarize_dataset(dataset.fingerprints, dataset.classes, training.data.orientation)
    print(*(f"skipped: {reason}" for reason in dataset.skipped), summary, sep="\n")
    if time:
        plan, step_time = plan_within_time(step, dataset, budget, is_overridden, time)
        steps = step_time.count_steps(time)
        recipe = choose_recipe(settings.recipe, steps)
        training = settings.training[recipe]  # nnU-Net's optimizer has less state
        limit, timing = {"max_time": format_duration(time)}, [describe_limit(step_time, time)]
    else:
        plan, limit = make_plan(training.step, dataset, budget, is_overridden), {"max_steps": steps}
        measures = settings.measure_time
        timing = [describe_step_time(training.step, plan, steps)] if measures else []
    lines = summarize_plan(plan, budget, training.data.orientation)
    lines += check_largest_case(step, dataset, plan, budget)
    if not is_overridden("data.spacing_mm"):
        lines += describe_coarsening(plan.spacing_mm, [f.spacing_mm for f in dataset.fingerprints])
    lines += explain_limits(plan, is_overridden, is_timed=time is not None)
    if border := find_constant_border(dataset, is_overridden):
        count, *ends = border
        span = " to ".join(dict.fromkeys(f"{value:.4g}" for value in ends))
        lines += [
            f"{count} of {pluralize(len(dataset.fingerprints), 'case')} with a constant border "
            f"({span}): the plan sets",
            "data.background=auto, so that crop and normalization leave it out of these",
        ]
    flip_axes, reasons = choose_flip_axes(training, dataset)
    lines += [*reasons, *dataset.notes, *filter(None, [dataset.too_few])]
    patches, epochs = schedule = plan_schedule(plan, steps)
    frequency = "every epoch" if epochs == 1 else f"every {epochs} epochs"
    lines += [
        f"recipe={recipe}: {RECIPES[recipe][1]}",
        f"{pluralize(steps, 'step')}; an epoch has {patches} patches per case; validation "
        f"{frequency}",
        *timing,
    ]
    values = describe_long_recipe(plan) if recipe == "long" else {}
    if recipe == "short" and not is_overridden("augmentation"):
        values, reason = choose_turning(plan, steps)
        lines.append(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = ["@package _global_", *summary.splitlines(), *lines]
    header = "".join(f"# {line}\n" for line in comments)
    experiment = render_experiment(
        training.composition,
        dataset,
        plan,
        precision=training.step.precision,
        schedule=schedule,
        limit=limit,
        recipe=values,
        flip_axes=flip_axes if reasons else None,
    )
    write_text(path, header + experiment)
    print(*lines, "", f"wrote {path}", sep="\n")
    print(f"unet3d train experiment={settings.name}{' fold=none' if dataset.too_few else ''}")
    return 0


def describe_coarsening(
    planned_mm: Sequence[float], spacings_mm: Sequence[Sequence[float]]
) -> list[str]:
    """Say how many cases become much coarser, and how to keep their voxels.

    >>> print(*describe_coarsening((1, 1, 3), [(1, 1, 3), (1, 1, 1), (1, 1, 3)]))
    1 of 3 cases are resampled to voxels twice as long or more: data.spacing_mm=[1,1,1] keeps them
    """
    coarser = [mm for mm in spacings_mm if (np.divide(planned_mm, mm) >= 2).any()]
    if not coarser:
        return []
    finest = ",".join(f"{min(axis):.4g}" for axis in zip(*spacings_mm, strict=True))
    return [
        f"{len(coarser)} of {len(spacings_mm)} cases are resampled to voxels twice as long or "
        f"more: data.spacing_mm=[{finest}] keeps them"
    ]


def choose_flip_axes(
    training: TrainConfig, dataset: DatasetFingerprint
) -> tuple[list[int], list[str]]:
    """Return the axes to flip, and why the others of the augmentation are not flipped."""
    axes = getattr(training.augmentation(), "mirroring_axes", [])
    if training.composition.is_overridden("augmentation.flip_axes"):
        return axes, []
    ordered = find_ordered_axes(dataset.fingerprints, dataset.classes)
    reasons = []
    if mixing := find_mixing_flips(dataset.outputs, training.data.orientation, axes):
        reasons, axes = [f"no {mixing[0]}"], mixing[1]
    for axis in filter(ordered.__contains__, axes):
        first, second = ordered[axis]
        reasons.append(f"no flips along {'xyz'[axis]}, where {first} comes before {second}")
    return [axis for axis in axes if axis not in ordered], reasons


def summarize_plan(plan: TrainingPlan, budget: int, orientation: str) -> list[str]:
    """Return the plan as lines of text."""
    windows = " ".join("x".join(map(str, window)) for window in plan.levels.pool_windows)
    spacing, median = format_dims(plan.spacing_mm), format_dims(plan.median_shape)
    needed = plan.peak.reserved or plan.peak.allocated or 0  # a CPU reserves nothing
    patch = f"patch {describe_axes(plan.patch_size, orientation)}"
    chosen = [patch, f"batch {plan.batch_size}", format_overrides(plan.strategy)]
    return [
        f"spacing {spacing} mm; the median case has {median} voxels",
        ", ".join(filter(None, chosen)),
        f"{len(plan.levels.kernels)} levels, pooling {windows}",
        f"a run is estimated to take {format_bytes(needed)} of {format_bytes(budget)}",
    ]
