"""`unet3d doctor`: inspect this machine, and find what limits the configured run on it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from unet3d import __version__
from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.fields import number, read_settings
from unet3d.doctor.benchmark import (
    describe_machine,
    list_failures,
    make_file_name,
    run_benchmark,
)
from unet3d.doctor.inspect import (
    MachineReport,
    RunEstimate,
    inspect_machine,
    inspect_run,
)
from unet3d.doctor.system import DiskSpace
from unet3d.files import write_output
from unet3d.machine import resolve_device
from unet3d.text import format_bytes
from unet3d.training.config import TrainConfig, read_training
from unet3d.training.machine_checks import Problem

UNKNOWN = "unknown"

KEYS = ("benchmark", "seconds", "format", "output", "trainer.accelerator")
"""Keys that leave open which job a benchmark measures."""

BENCHMARK_JOB = ("experiment=forum_small", "model=unet_small", "precision=16")
"""What a benchmark measures on a GPU unless another job is given: it fills one."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Which run to check this machine for."""

    training: TrainConfig
    format: Literal["table", "json"]
    output: Path | None
    benchmark: bool
    seconds: Annotated[float, number("above 0")]  # that the benchmark may take

    @property
    def has_job(self) -> bool:
        """Return whether overrides say what to run."""
        overrides = self.training.composition.overrides
        return any(override.partition("=")[0] not in KEYS for override in overrides)


def main(composed: ComposedConfig, folder: Path) -> int:
    """Print the report; return 1 if something would certainly stop the run."""
    settings = read_settings(DoctorConfig, composed.config, training=read_training(composed))
    if settings.benchmark:
        return print_benchmark(settings)
    machine = inspect_machine(settings.training, folder)
    run, problems = inspect_run(settings.training, folder, machine)
    if settings.format == "json":  # bytes; null if unknown
        content: dict[str, Any] = {"unet3d": __version__, **asdict(machine), "run": asdict(run)}
        content["problems"] = [asdict(problem) for problem in problems]
        text = json.dumps(content, indent=1)
    else:
        text = format_doctor_report(machine, run, problems)
    write_output(text, settings.output)
    return 1 if any(problem.is_fatal for problem in problems) else 0


def print_benchmark(settings: DoctorConfig) -> int:
    """Measure, and write the file; return 1 if something did not run as it should."""
    training = settings.training
    device = resolve_device(training.step.accelerator)
    if device == "cuda" and not settings.has_job:
        training = read_training(compose_config(BENCHMARK_JOB, "doctor"))
    machine = describe_machine(torch.device(device))
    file = settings.output or Path(make_file_name(machine))
    result = run_benchmark(
        training.step,
        machine,
        file,
        overrides=training.composition.overrides,
        seconds=settings.seconds,
        log=print,
    )
    if result["skipped"]:
        print(f"no time for {', '.join(result['skipped'])}: raise seconds=")
    print(f"wrote {file}: attach it to an issue to report a problem or a new GPU")
    return 1 if list_failures(result["rows"]) else 0


def format_doctor_report(
    machine: MachineReport, run: RunEstimate, problems: Sequence[Problem]
) -> str:
    """Return the report for people."""
    lines = [("- " if not p.is_fatal else "BLOCKER: ") + p.message for p in problems]
    found = [line for text in lines or ["no problems found"] for line in text.splitlines()]
    return "\n".join(
        [
            *align_columns([*make_software_rows(machine), *make_hardware_rows(machine)]),
            f"\nrun: {' '.join(run.overrides) or 'default options'}",
            *align_columns(make_run_rows(run)),
            "\nProblems",
            *(f"  {line}" for line in found),
        ]
    )


def align_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Align names and values."""
    return [f"  {name:20} {value}" for name, value in rows]


def make_software_rows(machine: MachineReport) -> list[tuple[str, str]]:
    """Return versions, and what compiles kernels."""
    s = machine.software
    build = f"CUDA {s.cuda}" if s.cuda else f"ROCm {s.rocm}" if s.rocm else "CPU only"
    packages = [f"{name} {version or '(not installed)'}" for name, version in s.packages.items()]
    half = len(packages) // 2
    headers = "" if s.python_headers else ", no Python headers"
    return [
        ("unet3d", f"{__version__}, Python {s.python}"),
        ("torch", f"{s.torch}, built for {build}"),
        ("cuDNN", s.cudnn or ("none" if s.cuda is None else UNKNOWN)),
        ("NCCL", s.nccl or "none"),
        ("packages", ", ".join(packages[:half])),
        ("", ", ".join(packages[half:])),
        ("compiler for CPUs", s.cpu_compiler or "no C++ compiler"),
        ("compiler for Triton", f"{s.triton_compiler or 'no C compiler'}{headers}"),
    ]


def make_hardware_rows(machine: MachineReport) -> list[tuple[str, str]]:
    """Return the driver, each GPU, cores, memory and disks."""
    gpus = [
        (
            f"GPU {gpu.index}",
            f"{gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free, "
            f"sm_{gpu.capability[0]}{gpu.capability[1]}",
        )
        for gpu in machine.gpus
    ]
    s = machine.system
    bf16 = "fast bf16" if s.fast_bf16 else "no fast bf16"
    limit = f", limited to {format_bytes(s.ram_limit)}" if s.ram_limit else ""
    return [
        ("driver", machine.software.driver or "no driver found"),
        *(gpus or [("GPU", "none")]),
        ("system", s.name),
        ("CPU", f"{s.cpu_model or UNKNOWN}, {s.cores} cores, {s.threads} threads, {bf16}"),
        ("RAM", f"{format_known_size(s.ram_free)} of {format_known_size(s.ram)} free{limit}"),
        ("/dev/shm", "none" if s.shm is None else format_disk_space(s.shm)),
        *((what, f"{format_disk_space(d)} in {d.folder}") for what, d in machine.disks.items()),
    ]


def make_run_rows(run: RunEstimate) -> list[tuple[str, str]]:
    """Return the run as it would be on this machine."""
    device = run.device or UNKNOWN
    if run.processes and run.processes > 1:
        device += f", {run.processes} processes"
    precision = UNKNOWN
    if run.precision is not None:
        precision = run.precision.used
        if run.precision.requested != precision:
            precision += f" (instead of {run.precision.requested}: {run.precision.reason})"
    peak, available = format_known_size(run.peak), format_known_size(run.available)
    rows = [("device", device), ("precision", precision)]
    rows.append(("estimated peak", f"{peak} of {available}"))
    if run.largest_batch is not None:
        batches = f"{run.batch_size}; at most {run.largest_batch} estimated to fit"
        rows.append(("batch size", batches))
    return rows


def format_disk_space(disk: DiskSpace) -> str:
    """Return free and total space."""
    return f"{format_bytes(disk.free)} of {format_bytes(disk.total)} free"


def format_known_size(nbytes: int | None) -> str:
    """Return bytes for people, or that they are unknown."""
    return UNKNOWN if nbytes is None else format_bytes(nbytes)
