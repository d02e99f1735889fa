"""`unet3d plan data=... budget_gib=...`: what to train on a data set, as an experiment to edit."""

import re
from pathlib import Path

from unet3d.cli.suggest import parse_device_budget
from unet3d.config.compose import ComposedConfig
from unet3d.data.preprocessing.resampling import axis_names
from unet3d.errors import UsageError
from unet3d.report.dataset_summary import draw_dataset_summary, summarize_dataset
from unet3d.units import format_bytes
from unet3d.workflows.planning.planner import (
    STEPS,
    TrainingPlan,
    explain_limits,
    find_constant_border,
    inspect_dataset,
    join_by_x,
    make_plan,
    plan_schedule,
    render_experiment,
)
from unet3d.workflows.planning.step_time import StepTimeEstimate, measure_step_time


def main(request: ComposedConfig, folder: Path) -> int:
    """Look at the data, search, and write the experiment and a picture beside it."""
    cfg = request.config
    if not re.fullmatch(r"[A-Za-z0-9_-]+", str(cfg.name)):
        raise UsageError(f"name must be of letters, digits, - and _, got {cfg.name!r}")
    path = Path("conf") / "experiment" / f"{cfg.name}.yaml"
    if path.exists() and not cfg.overwrite:
        raise UsageError(f"{path} is there already: choose another name=, or overwrite=true")
    budget = parse_device_budget(cfg.budget_gib)
    told = inspect_dataset(request)
    left_out = [f"left out: {reason}" for reason in told.left_out]
    about = summarize_dataset(told.prints, told.classes, axis_names(cfg.data.orientation))
    print(*left_out, about, sep="\n")
    found = make_plan(request, told, budget)
    said = [*summarize_plan(found, budget), *explain_limits(request, found)]
    if values := find_constant_border(told, request):
        span = " to ".join(dict.fromkeys(f"{value:.4g}" for value in values))
        said.append(f"volumes have a constant border ({span}): data.background=auto is planned, so")
        said.append("that crop and normalization leave it out")
    said += schedule_lines(request, found)
    if cfg.measure_time:
        said.append(time_line(measure_step_time(request, found)))
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = ["@package _global_", *about.splitlines(), *said]
    path.write_text(
        "".join(f"# {line}\n" for line in comments) + render_experiment(request, told, found)
    )
    draw_dataset_summary(told.prints, told.classes, told.channels, path.with_suffix(".png"))
    print(*said, "", f"wrote {path} and {path.with_suffix('.png')}", sep="\n")
    print(f"unet3d train experiment={cfg.name}")
    return 0


def summarize_plan(found: TrainingPlan, budget: int) -> list[str]:
    """The plan in words."""
    windows = " ".join("x".join(map(str, w)) for w in found.levels.windows)
    return [
        f"spacing {join_by_x(found.spacing_mm)} mm; the median case has {join_by_x(found.median)} voxels",
        f"patch {join_by_x(found.patch)}, batch {found.batch}, {' '.join(found.strategy)}",
        f"{len(found.levels.kernels)} levels, pooling {windows}",
        f"a step is predicted to reserve {format_bytes(found.peak.reserved or 0)} of {format_bytes(budget)}",
    ]


def schedule_lines(request: ComposedConfig, found: TrainingPlan) -> list[str]:
    """How long a run is, and how often it is validated."""
    patches, epochs = plan_schedule(request, found)
    often = "every epoch" if epochs == 1 else f"every {epochs} epochs"
    return [f"{STEPS:,} steps; an epoch has {patches} patches per case; validation {often}"]


def time_line(timing: StepTimeEstimate) -> str:
    """What a run takes of time, or why that is not known."""
    if timing.seconds is None:
        return f"time not measured on {timing.device}: {timing.why}"
    whole = duration(STEPS * timing.seconds)
    return (
        f"a step takes {timing.seconds:.2g} s on {timing.device}: {STEPS:,} steps take {whole}, "
        "beside validation"
    )


def duration(seconds: float) -> str:
    """In the unit that a person would use.

    >>> duration(90), duration(9000), duration(300000)
    ('2 minutes', '2.5 hours', '3.5 days')
    """
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 86400 else f"{seconds / 86400:.1f} days"
