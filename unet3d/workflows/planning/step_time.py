"""What a planned step takes of time on this machine: a few real ones, on random patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import torch

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import summarize_error
from unet3d.machine.device import resolve_device, resolve_precision
from unet3d.machine.memory import get_available_bytes, get_free_bytes
from unet3d.types import Triple
from unet3d.units import format_bytes
from unet3d.workflows.memory.estimate import with_batch
from unet3d.workflows.memory.training_step import TrainingStep, make_step_factory
from unet3d.workflows.planning.planner import OWN_FACTOR, TrainingPlan, join_by_x, with_patch
from unet3d.workflows.planning.topology import round_up_to_multiple

LIMIT_SECONDS = 10.0
"""A step that is guessed to take longer is not run."""

ENOUGH_SECONDS = 3.0
"""Once steps took so long together, no further one is run."""

MOST_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of a step on a device, or why they are not known."""

    device: str
    seconds: float | None = None
    why: str = ""


class RandomInputs:
    """Fills a step's images with noise and its labels with classes."""

    def __init__(self, classes: int):
        self.classes = classes

    def begin_phase(self, phase: str) -> None:
        """Nothing to do: all phases are timed together."""

    def label(self, tensors: Sequence[Any], kind: str) -> None:
        """Fill what a step begins with."""
        if kind == "input":
            image, label = tensors
            image.normal_()
            label.random_(0, self.classes)


def measure_step_time(request: ComposedConfig, plan: TrainingPlan) -> StepTimeEstimate:
    """Run steps of the planned network on the device that a run would have."""
    device = resolve_device(str(request.config.trainer.accelerator))
    where = torch.device(device)
    threads = torch.get_num_threads()
    name = f"this machine's CPU ({threads} thread{'s' * (threads != 1)})"
    if device == "cuda":
        name = torch.cuda.get_device_name(where)
    try:
        used = resolve_precision(request.config.precision, device)
        needed = (plan.peak.reserved or 0) * (2 if used.used == "32" else 1)
        free = get_free_bytes(where) if device == "cuda" else get_available_bytes(where)
        if free is not None and needed > free:
            return StepTimeEstimate(
                device=name, why=f"it needs {format_bytes(needed)}, {format_bytes(free)} are free"
            )

        def steps(asked: ComposedConfig) -> TrainingStep:
            return make_step_factory(asked, used, cuda=device == "cuda", device=device)()

        sizes = list_trial_sizes(plan)
        step = steps(with_patch_and_batch(request, plan, *sizes[0]))
        taken = [time_step(step, where)]  # compiles kernels
        if taken[0] > LIMIT_SECONDS:
            said = f"a step on {join_by_x(sizes[0][0])} voxels alone took {taken[0]:.0f} s"
            return StepTimeEstimate(device=name, why=said)
        begun, per_voxel = perf_counter(), 0.0
        for patch, batch in sizes:
            # Small patches take longer for each voxel: the guess falls as they grow.
            if perf_counter() - begun + per_voxel * batch * prod(patch) > LIMIT_SECONDS:
                whole_step = per_voxel * plan.batch * prod(plan.patch)
                return StepTimeEstimate(
                    device=name, why=f"a step may take up to {whole_step:.0f} s"
                )
            step = steps(with_patch_and_batch(request, plan, patch, batch))
            taken = [time_step(step, where)]
            per_voxel = taken[0] / (batch * prod(patch))
        while len(taken) < MOST_STEPS and sum(taken) < ENOUGH_SECONDS:
            taken.append(time_step(step, where))
    except Exception as error:  # a plan is for another machine, perhaps, and is good without it
        return StepTimeEstimate(device=name, why=summarize_error(error))
    later = taken[1:] or taken  # the first one makes the optimizer's state
    return StepTimeEstimate(device=name, seconds=sum(later) / len(later))


def with_patch_and_batch(
    request: ComposedConfig, plan: TrainingPlan, patch: Triple, batch: int
) -> ComposedConfig:
    """The planned run with another patch and batch."""
    return with_batch(with_patch(request, patch, plan.levels, plan.strategy), batch)


def time_step(step: TrainingStep, device: torch.device) -> float:
    """Run one step to its end."""
    begun = perf_counter()
    step.train(RandomInputs(2))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begun


def list_trial_sizes(plan: TrainingPlan) -> list[tuple[Triple, int]]:
    """Patches and batches to run, from the least that a network takes to those of the plan."""
    factor = plan.levels.factor if plan.levels.windows else (OWN_FACTOR,) * 3
    least = [min(n, f) for n, f in zip(plan.patch, factor, strict=True)]
    longest = max(range(3), key=lambda axis: plan.patch[axis] / factor[axis])
    least[longest] = min(plan.patch[longest], 2 * factor[longest])  # norms need two voxels
    parts = [
        [max(n // share, m) for n, m in zip(plan.patch, least, strict=True)] for share in (4, 2)
    ]
    sizes = [round_up_to_multiple(part, factor) for part in (least, *parts)]
    return [*((size, 1) for size in sizes if size != plan.patch), (plan.patch, plan.batch)]
