"""Measure how long a planned step takes on this machine, with random patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import torch

from unet3d.errors import summarize_error
from unet3d.machine import get_available_bytes, get_free_bytes, resolve_device, resolve_precision
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import TrainingStep, make_step_factory
from unet3d.planning.planner import OTHER_FACTOR, TrainingPlan
from unet3d.planning.topology import round_up_to_multiple
from unet3d.text import format_bytes, pluralize
from unet3d.types import Triple

LIMIT_SECONDS = 10.0
"""A step that is expected to take longer is not run."""

ENOUGH_SECONDS = 3.0
"""No further step is run once all steps together took this long."""

MAX_TIMED_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of a step on a device, or why they are unknown."""

    device: str
    seconds: float | None = None
    reason: str = ""


class RandomInputs:
    """Fill a step's images with noise and its labels with classes."""

    def begin_phase(self, phase: str) -> None:
        """Do nothing: all phases are timed together."""

    def label(self, tensors: Sequence[Any], kind: str) -> None:
        """Fill the inputs of a step."""
        if kind == "input":
            image, label = tensors
            image.normal_()
            label.random_(0, 2)


def measure_step_time(config: StepConfig, plan: TrainingPlan) -> StepTimeEstimate:
    """Run steps of the planned network on the device that a run would use."""
    device_type = resolve_device(config.accelerator)
    device, cuda = torch.device(device_type), device_type == "cuda"
    if cuda:
        name = torch.cuda.get_device_name(device)
    else:
        name = f"this machine's CPU ({pluralize(torch.get_num_threads(), 'thread')})"
    try:
        precision = resolve_precision(config.precision, device_type)
        needed = (plan.peak.reserved or 0) * (2 if precision.used == "32" else 1)
        free = get_free_bytes(device) if cuda else get_available_bytes(device)
        if free is not None and needed > free:
            reason = f"it needs {format_bytes(needed)}, {format_bytes(free)} are free"
            return StepTimeEstimate(device=name, reason=reason)

        def build_step(patch: Triple, batch_size: int) -> TrainingStep:
            sizes = {"data.patch_size": patch, "data.batch_size": batch_size}
            variant = config.vary({**sizes, **plan.model, **plan.strategy})
            return make_step_factory(variant, precision, cuda=cuda, device=device_type)()

        sizes = list_trial_sizes(plan)
        time_step(build_step(*sizes[0]), device)  # compiles kernels
        start, seconds_per_voxel = perf_counter(), 0.0
        for patch, batch_size in sizes:
            # Small patches take longer per voxel: the expected time falls as they grow.
            voxels = batch_size * prod(patch)
            if perf_counter() - start + seconds_per_voxel * voxels > LIMIT_SECONDS:
                expected = seconds_per_voxel * plan.batch_size * prod(plan.patch_size)
                reason = f"a step may take up to {expected:.0f} s"
                return StepTimeEstimate(device=name, reason=reason)
            step = build_step(patch, batch_size)
            times = [time_step(step, device)]
            seconds_per_voxel = times[0] / voxels
        while len(times) < MAX_TIMED_STEPS and sum(times) < ENOUGH_SECONDS:
            times.append(time_step(step, device))
    except Exception as error:  # a plan may be for another machine, and is useful without a time
        return StepTimeEstimate(device=name, reason=summarize_error(error))
    times = times[1:] or times  # the first step allocates the optimizer's state
    return StepTimeEstimate(device=name, seconds=sum(times) / len(times))


def time_step(step: TrainingStep, device: torch.device) -> float:
    """Return the seconds of one step."""
    start = perf_counter()
    step.train(RandomInputs())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def list_trial_sizes(plan: TrainingPlan) -> list[tuple[Triple, int]]:
    """Return patches and batch sizes to run, from the smallest possible to those of the plan."""
    factor = plan.levels.factor if plan.levels.pool_windows else (OTHER_FACTOR,) * 3
    smallest = [min(n, f) for n, f in zip(plan.patch_size, factor, strict=True)]
    longest = max(range(3), key=lambda axis: plan.patch_size[axis] / factor[axis])
    smallest[longest] = min(plan.patch_size[longest], 2 * factor[longest])  # norms need two voxels
    fractions = [
        [max(n // divisor, m) for n, m in zip(plan.patch_size, smallest, strict=True)]
        for divisor in (4, 2)
    ]
    sizes = [round_up_to_multiple(size, factor) for size in (smallest, *fractions)]
    trials = [(size, 1) for size in sizes if size != plan.patch_size]
    return [*trials, (plan.patch_size, plan.batch_size)]
