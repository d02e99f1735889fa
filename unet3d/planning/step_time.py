"""Measure how long the steps of a plan take, and plan for a training time."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from math import prod
from statistics import median
from time import thread_time

import torch

from unet3d.config.fields import format_duration
from unet3d.errors import UsageError, summarize_error
from unet3d.machine import get_available_bytes, get_free_bytes, resolve_device, resolve_precision
from unet3d.planning.planner import (
    UNPLANNED_SIDE_MULTIPLE,
    DatasetFingerprint,
    IsOverridden,
    TrainingPlan,
    choose_resolution,
    make_plan,
)
from unet3d.planning.topology import list_coarser_spacings, list_patches, round_up_to_multiple
from unet3d.step.config import StepConfig
from unet3d.step.training_step import RandomBatchStep, build_configured_step, time_step
from unet3d.text import format_bytes, format_time, pluralize
from unet3d.types import FloatTriple, Triple

MIN_STEPS = 1000
"""Steps that must fit a training time; with far fewer, a network has hardly learned."""

FEWEST_STEPS = 50
"""Steps of the shortest run that is planned."""

TRAINING_FRACTION = 0.9
"""Fraction of a training time for steps; validation takes the rest."""

MIN_SIDE = 24
"""Voxels that the longest side of a case keeps at a coarser spacing."""

NARROWEST = 8
"""Channels of the narrowest first level that is planned."""

LIMIT_SECONDS = 10.0
"""A step that is expected to take longer is not run."""

BUSY_RATIO = 1.5
"""A machine is busy if a step takes this many times the seconds in which its thread computes."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step; unless it is measured, an upper bound from smaller steps."""

    seconds: float  # on a machine that does nothing else
    is_measured: bool
    device: str
    seconds_now: float = 0.0  # beside what the machine does now

    def describe(self) -> str:
        verb = "takes" if self.is_measured else "may take up to"
        line = f"a step {verb} {format_time(self.seconds)} on {self.device}"
        if self.seconds_now > BUSY_RATIO * self.seconds:
            now, planned = format_time(self.seconds_now), format_time(self.seconds)
            line += f" ({now} now, because other programs run; the plan counts with {planned})"
        return line

    def count_steps(self, training_seconds: float) -> int:
        """Return how many steps fit a training time."""
        return int(TRAINING_FRACTION * training_seconds / self.seconds)


def plan_within_time(
    config: StepConfig,
    dataset: DatasetFingerprint,
    budget: int,
    is_overridden: IsOverridden,
    training_seconds: float,
) -> tuple[TrainingPlan, StepTime]:
    """Choose the finest spacing, and for it the widest network, of which `MIN_STEPS` steps fit.

    Every patch covers as much of a case as memory allows, in batches of two: steps that see less of
    the anatomy are cheaper, but worth less. If too few steps fit anyhow, the plan has the coarsest
    spacing and the narrowest network.
    """
    device = torch.device(resolve_device(config.accelerator))
    target = choose_resolution(config.data, dataset)[0]
    spacings = [target]
    if not is_overridden("data.spacing_mm") and not is_overridden("data.patch_size"):
        for spacing in list_coarser_spacings(target):
            size = choose_resolution(replace(config.data, spacing_mm=spacing), dataset)[1]
            if max(size) >= MIN_SIDE and list_patches(spacing, size):
                spacings.append(spacing)
    widths = list_widths(config, is_overridden)

    @cache
    def make_timed_plan(spacing: FloatTriple, width: int | None) -> tuple[TrainingPlan, StepTime]:
        changes = {} if width is None else {"model.width": width}
        variant = config.vary({"data.spacing_mm": spacing, **changes})
        plan = make_plan(variant, dataset, budget, is_overridden, max_batch_size=2)
        time = measure_step_time(variant, plan, device)
        return replace(plan, model={**changes, **plan.model}), time

    def has_time(spacing: FloatTriple, width: int | None) -> bool:
        return make_timed_plan(spacing, width)[1].count_steps(training_seconds) >= MIN_STEPS

    spacing, narrowest = target, widths[-1]
    if not has_time(target, narrowest):
        key = partial(has_time, width=narrowest)
        index = bisect_left(spacings, True, lo=1, key=key)
        spacing = spacings[min(index, len(spacings) - 1)]
    fitting = [*takewhile(partial(has_time, spacing), reversed(widths))]
    width = fitting[-1] if fitting else narrowest
    plan, time = make_timed_plan(spacing, width)
    if time.count_steps(training_seconds) < FEWEST_STEPS:
        raise UsageError(
            f"{describe_limit(time, training_seconds)}; a plan needs at least {FEWEST_STEPS}"
        )
    return plan, time


def list_widths(config: StepConfig, is_overridden: IsOverridden) -> Sequence[int | None]:
    """Return the widths to try, widest first; None is the network's own, where it has to stay."""
    width = config.network.model.arguments.get("width")
    is_fixed = is_overridden("model.width") or is_overridden("model.channels")
    if is_fixed or not isinstance(width, int):
        return [None]
    widths = [width]
    while widths[-1] >= 2 * NARROWEST:
        widths.append(widths[-1] // 2)
    return widths


def describe_step_time(config: StepConfig, plan: TrainingPlan, steps: int) -> str:
    """Say how long steps take on the device that a run would use, or why that is unknown."""
    device = torch.device(resolve_device(config.accelerator))
    try:
        time = measure_step_time(config, plan, device)
    except Exception as error:  # a plan may be for another machine, and is useful without a time
        return f"time not measured on this machine: {summarize_error(error)}"
    return (
        f"{time.describe()}: {steps:,} steps take {format_time(steps * time.seconds)}, plus "
        f"validation; an hour has time for {time.count_steps(3600):,} of them "
        "(max_time=00:01:00:00 plans for an hour)"
    )


def describe_limit(time: StepTime, training_seconds: float) -> str:
    """Say how many steps fit a training time, and which time would suffice if they are too few."""
    steps, line = time.count_steps(training_seconds), time.describe()
    line += f": about {pluralize(steps, 'step')} fit {format_time(training_seconds)}"
    if steps >= MIN_STEPS:
        return line
    enough = format_duration(1 + MIN_STEPS * time.seconds / TRAINING_FRACTION)
    return f"{line}, too few to learn much; max_time={enough} has time for {MIN_STEPS:,}"


def measure_step_time(config: StepConfig, plan: TrainingPlan, device: torch.device) -> StepTime:
    """Run steps of the planned network, and smaller ones before it.

    If they are expected to take too long, the time is an upper bound from the largest ones that
    were run, which took long, too: small patches take longer per voxel.
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "this machine's CPU"
    precision = resolve_precision(config.precision, device.type)
    needed = plan.peak.allocated or 0
    if plan.peak.reserved is not None:  # of a GPU; most CPUs compute in float32
        needed = plan.peak.reserved * (2 if precision.used == "32" else 1)
    free = get_free_bytes(device) if cuda else get_available_bytes(device)
    if free is not None and needed > free:
        raise UsageError(f"it needs {format_bytes(needed)}, {format_bytes(free)} are free")
    seconds, seconds_now, previous = 0.0, 0.0, 0
    for patch, batch_size in list_trial_sizes(plan):
        voxels = batch_size * prod(patch)
        if previous and seconds * voxels / previous > LIMIT_SECONDS:
            factor = plan.batch_size * prod(plan.patch_size) / previous
            return StepTime(seconds=factor * seconds, is_measured=False, device=name)
        sizes = {"data.patch_size": patch, "data.batch_size": batch_size}
        variant = config.vary({**sizes, **plan.model, **plan.strategy})
        seconds, seconds_now = time_steps(build_configured_step(variant, device), device)
        previous = voxels
    return StepTime(seconds=seconds, is_measured=True, device=name, seconds_now=seconds_now)


def time_steps(step: RandomBatchStep, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step on a machine that does nothing else, and the median now.

    On a CPU, those are the lower quartile of the seconds in which the thread of the step computes,
    which leave out when other processes do.
    """
    alone, now = [], []
    first, _ = time_step(step, device)  # compiles kernels, and allocates the optimizer's state
    for _ in range(3 if first > 1 else 7):
        before = thread_time()
        now.append(time_step(step, device)[0])
        alone.append(now[-1] if device.type == "cuda" else thread_time() - before)
    return sorted(alone)[len(alone) // 4], median(now)


def list_trial_sizes(plan: TrainingPlan) -> list[tuple[Triple, int]]:
    """Return patches and batch sizes to run: sides of an eighth, a quarter, half, and the plan."""
    factor = plan.levels.factor if plan.levels.pool_windows else (UNPLANNED_SIDE_MULTIPLE,) * 3
    trials = []
    for divisor in (8, 4, 2):
        # Norms need two voxels at the coarsest level.
        sides = zip(plan.patch_size, factor, strict=True)
        size = [min(n, max(n // divisor, 2 * multiple)) for n, multiple in sides]
        trials.append((round_up_to_multiple(size, factor), 1))
    return [*dict.fromkeys(trials), (plan.patch_size, plan.batch_size)]
