"""Inspect this machine, and find what limits the configured run on it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unet3d.data.config import DataConfig
from unet3d.doctor.system import (
    DiskSpace,
    Gpu,
    Software,
    System,
    get_disk_space,
    inspect_software,
    inspect_system,
    list_gpus,
)
from unet3d.errors import UsageError, summarize_error
from unet3d.machine import (
    Precision,
    describe_missing_kernels,
    get_available_bytes,
    read_process_rank,
    resolve_device,
    resolve_precision,
)
from unet3d.memory.estimate import UntraceableError
from unet3d.memory.from_config import estimate_memory
from unet3d.memory.oom_advice import format_oom_warning
from unet3d.memory.step.build import complete_step
from unet3d.memory.strategies import FUSED_STRATEGIES, get_device_bytes, resolve_strategy
from unet3d.planning.suggest import find_largest_batch
from unet3d.text import GIB, format_bytes
from unet3d.training.config import TrainConfig
from unet3d.training.machine_checks import Problem, check_writable
from unet3d.training.preflight import count_local_processes, find_problems


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """Hardware, software and disks."""

    system: System
    software: Software
    gpus: list[Gpu]
    disks: dict[str, DiskSpace]  # by what is written there


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """What the configured run would be on this machine; None: unknown."""

    overrides: list[str]
    device: str | None
    processes: int | None
    precision: Precision | None
    peak: int | None  # estimated bytes of a step
    available: int | None  # bytes of the device
    batch_size: int
    largest_batch: int | None  # estimated to fit in a GPU


def inspect_machine(settings: TrainConfig, folder: Path) -> MachineReport:
    """Inspect everything."""
    folders = {"runs": folder, "preprocessed volumes": settings.data.cache}
    return MachineReport(
        system=inspect_system(),
        software=inspect_software(),
        gpus=list_gpus(),
        disks={what: get_disk_space(folder) for what, folder in folders.items()},
    )


def inspect_run(
    settings: TrainConfig, folder: Path, report: MachineReport
) -> tuple[RunEstimate, list[Problem]]:
    """Return the run, and what limits it; what stops it comes first."""
    problems = list[Problem]()
    step, requested = settings.step, settings.step.accelerator
    device = processes = precision = peak = available = largest = None
    with collect_errors(problems):
        device = resolve_device(requested)
        precision = resolve_precision(step.precision, device)
    with collect_errors(problems):
        read_process_rank(settings.trainer.launch)
        processes = count_local_processes(settings)
    if device is not None and precision is not None:
        cuda = device == "cuda"
        first = int(requested.partition(":")[2] or 0)  # of cuda:N
        available = get_available_device_bytes(device, report.gpus[first:][:processes])
        with collect_errors(problems):
            # auto is estimated for a GPU
            step = complete_step(replace(step, accelerator=device))
            step = resolve_strategy(step, precision, cuda=cuda)
            problems += find_problems(
                replace(settings, step=step),
                precision,
                device=device,
                processes=processes or 1,
                folder=folder,
                is_fused=step.strategy in FUSED_STRATEGIES,
            )
            peak = get_device_bytes(estimate_memory(step, validates=False))
        if peak is not None and available is not None:
            with collect_errors(problems):
                lines = format_oom_warning(estimate_memory(step), step, available)
                is_fatal = settings.memory.if_too_large == "error"
                problems += [Problem("\n".join(lines), is_fatal=is_fatal)] if lines else []
                largest = find_largest_batch(step, available) if cuda else None
        problems += find_performance_problems(
            settings.data, precision, device, report, requested=requested
        )
    estimate = RunEstimate(
        overrides=list(settings.composition.overrides),
        device=device,
        processes=processes,
        precision=precision,
        peak=peak,
        available=available,
        batch_size=settings.data.batch_size,
        largest_batch=None if largest is None else largest[0],
    )
    return estimate, sorted(problems, key=lambda problem: not problem.is_fatal)


@contextmanager
def collect_errors(problems: list[Problem]) -> Generator[None]:
    """Add an error to the problems and continue: it would stop the run, too."""
    try:
        yield
    except UntraceableError as reason:
        problems.append(Problem(str(reason)))
    except Exception as error:
        name = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        problems.append(Problem(f"{name}{summarize_error(error)}", is_fatal=True))


def get_available_device_bytes(device: str, gpus: Sequence[Gpu]) -> int | None:
    """Return what a process may take: of GPUs in use by others, what is free."""
    free = [gpu.free for gpu in gpus if count_bytes_held_by_others(gpu)]
    available = get_available_bytes(torch.device(device))
    return None if available is None else min([*free, available])


def count_bytes_held_by_others(gpu: Gpu) -> int:
    """Return what others hold of a GPU, ignoring the little that a driver and a screen take."""
    used = gpu.total - gpu.free
    return used if used > GIB else 0


def find_performance_problems(
    data: DataConfig,
    precision: Precision,
    device: str,
    report: MachineReport,
    *,
    requested: str,
) -> list[Problem]:
    """Return what would make a run slower or smaller than it could be.

    `requested` is the user's trainer.accelerator, which is auto by default.
    """
    cores, workers = report.system.cores, data.num_workers
    missing, problems = describe_missing_kernels(device), list[Problem]()
    if missing is not None:
        problems.append(Problem(missing))
    elif device == "cpu":
        problems += find_cpu_problems(requested, report)
    if device == "cuda":
        problems += find_gpu_problems(report)
    if precision.used != precision.requested:
        problems.append(
            Problem(f"precision={precision.requested} runs as {precision.used}: {precision.reason}")
        )
    if workers > cores:
        problems.append(
            Problem(
                f"data.num_workers={workers} exceeds the {cores} available cores: lower it to "
                f"{cores}"
            )
        )
    cache = check_writable(data.cache)
    return problems if cache is None else [*problems, cache]


def find_cpu_problems(requested: str, report: MachineReport) -> list[Problem]:
    """Return why no GPU is used, and what the CPU does not support."""
    reason = "trainer.accelerator=cpu" if requested == "cpu" else "no GPU found"
    problems = [Problem(f"{reason}: training runs on {report.system.cores} CPU cores")]
    if report.software.cpu_compiler is None:
        problems.append(
            Problem(
                "no C++ compiler (install g++, or set CXX): pooling layers and fused blocks run in "
                "plain PyTorch, slowly"
            )
        )
    return problems


def find_gpu_problems(report: MachineReport) -> list[Problem]:
    """Return what else uses the GPUs, and what their kernels are missing."""
    software = report.software
    triton = check_triton(
        software.packages["triton"],
        compiler=software.triton_compiler,
        headers=software.python_headers,
    )
    problems = [] if triton is None else [triton]
    for gpu in report.gpus:
        held = count_bytes_held_by_others(gpu)
        if held:
            total, free = format_bytes(gpu.total), format_bytes(gpu.free)
            problems.append(
                Problem(
                    f"other processes hold {format_bytes(held)} of GPU {gpu.index}'s {total}: "
                    f"{free} are free (nvidia-smi lists them)"
                )
            )
    return problems


def check_triton(installed: str | None, *, compiler: str | None, headers: bool) -> Problem | None:
    """Check that Triton can compile the GPU kernels of pooling layers and fused blocks."""
    if installed is None:
        return Problem(
            "Triton is not installed: pooling layers and fused blocks run slowly, in plain torch; "
            "install triton"
        )
    missing = [] if compiler else ["a C compiler (gcc, or CC=...)"]
    missing += [] if headers else ["Python's headers (python3-dev)"]
    if not missing:
        return None
    return Problem(
        f"Triton {installed} compiles kernels on first use: install " + " and ".join(missing)
    )
