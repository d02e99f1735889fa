"""`unet3d doctor`: what this machine is, and what of it limits the configured run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unet3d import __version__
from unet3d.cli.app import write_output
from unet3d.config.compose import ComposedConfig
from unet3d.errors import UsageError
from unet3d.machine.gpus import Gpu
from unet3d.machine.preflight import Problem
from unet3d.machine.system import DiskSpace
from unet3d.units import format_bytes
from unet3d.workflows.doctor import (
    MachineReport,
    RunEstimate,
    describe_processes,
    inspect_machine,
    inspect_run,
)

UNKNOWN = "not known"


def main(request: ComposedConfig, folder: Path) -> int:
    """Look, then tell; 1 if something stops the run for sure."""
    cfg = request.config
    if cfg.format not in ("table", "json"):
        raise UsageError(f"format must be table or json, got {cfg.format!r}")
    here = inspect_machine(request, folder)
    job, limits = inspect_run(request, folder, here)
    write_output(
        (doctor_report_to_json if cfg.format == "json" else format_doctor_report)(
            here, job, limits
        ),
        cfg.output,
    )
    return 1 if any(lack.stop for lack in limits) else 0


def doctor_report_to_json(here: MachineReport, job: RunEstimate, limits: Sequence[Problem]) -> str:
    """For bug reports and other programs: sizes in bytes, null is not known."""
    found: dict[str, Any] = {"unet3d": __version__, **asdict(here), "run": asdict(job)}
    return json.dumps(found | {"limits": [asdict(lack) for lack in limits]}, indent=1)


def format_doctor_report(here: MachineReport, job: RunEstimate, limits: Sequence[Problem]) -> str:
    """For people."""
    rows = [*software_rows(here), *gpu_rows(here), *system_rows(here)]
    words = " ".join(job.words) or "the default job"
    said = [("- " if not lack.stop else "STOPS IT: ") + lack.what for lack in limits]
    return "\n".join(
        [
            *two_columns(rows),
            "",
            f"the run: {words}",
            *two_columns(job_rows(job)),
            "",
            "what limits it",
            *(
                f"  {line}"
                for text in said or ["nothing that was looked for"]
                for line in text.splitlines()
            ),
        ]
    )


def two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns."""
    return [f"  {name:17} {said}" for name, said in rows]


def software_rows(here: MachineReport) -> list[tuple[str, str]]:
    """Versions, and what compiles kernels."""
    s = here.software
    built = f"CUDA {s.cuda}" if s.cuda else f"ROCm {s.rocm}" if s.rocm else "CPUs alone"
    others = [f"{name} {version or '(not installed)'}" for name, version in s.packages.items()]
    half = len(others) // 2
    headers = "" if s.python_headers else ", but no Python headers"
    return [
        ("unet3d", f"{__version__}, Python {s.python}"),
        ("torch", f"{s.torch}, built for {built}"),
        ("cuDNN", s.cudnn or ("none" if s.cuda is None else UNKNOWN)),
        (
            "between processes",
            ", ".join([f"NCCL {s.nccl}"] * bool(s.nccl) + ["gloo"] * s.gloo) or "nothing",
        ),
        ("packages", ", ".join(others[:half])),
        ("", ", ".join(others[half:])),
        ("kernels for CPUs", s.cpu_compiler or "no C++ compiler"),
        ("kernels for GPUs", f"{s.triton_compiler or 'no C compiler'}{headers}, for Triton"),
    ]


def gpu_rows(here: MachineReport) -> list[tuple[str, str]]:
    """The driver, and a row or two for each GPU."""
    runs = f", runs CUDA {here.driver_cuda} at most" if here.driver_cuda else ""
    rows = [("driver", f"{here.driver}{runs}" if here.driver else "none that answers")]
    for gpu in here.gpus:
        rows.append((f"GPU {'-' if gpu.number is None else gpu.number}", gpu_row(gpu)))
        rows += [("", f"held{describe_processes(gpu.others)}")] if gpu.others else []
    return rows if here.gpus else [*rows, ("GPU", "none")]


def gpu_row(gpu: Gpu) -> str:
    """One GPU in a line."""
    parts = [
        gpu.name or UNKNOWN,
        f"{format_known_size(gpu.free)} of {format_known_size(gpu.total)} free",
    ]
    parts += [f"sm_{gpu.capability[0]}{gpu.capability[1]}"] if gpu.capability else []
    parts += [] if gpu.utilisation is None else [f"busy {gpu.utilisation} % of the time"]
    parts += ["torch does not use it"] if gpu.number is None else []
    return ", ".join(parts)


def system_rows(here: MachineReport) -> list[tuple[str, str]]:
    """Cores, memory, files."""
    s = here.system
    cores = f"{s.cores} of {s.cores_there or UNKNOWN} cores"
    cores += f", {s.cores_limit:g} cores' worth of time" if s.cores_limit else ""
    bf16 = "fast bf16" if s.fast_bf16 else "no fast bf16"
    limit = f", limit {format_bytes(s.ram_limit)}" if s.ram_limit else ""
    swap = (
        "none"
        if s.swap == 0
        else f"{format_known_size(s.swap_free)} of {format_known_size(s.swap)} free"
    )
    return [
        ("system", s.name + (f", in a container ({s.container})" if s.container else "")),
        *([("started by", s.launcher)] if s.launcher else []),
        ("processor", f"{s.processor or UNKNOWN}, {cores}, {s.threads} threads, {bf16}"),
        ("RAM", f"{format_known_size(s.ram_free)} of {format_known_size(s.ram)} free{limit}"),
        ("swap", swap),
        ("/dev/shm", UNKNOWN if s.shared is None else format_disk_space(s.shared)),
        ("open files", f"{s.open_files}, {s.open_files_most} at most"),
        *(
            (what, f"{format_disk_space(room)} in {room.folder}")
            for what, room in here.rooms.items()
        ),
    ]


def job_rows(job: RunEstimate) -> list[tuple[str, str]]:
    """The run as it would be here."""
    device = job.device or UNKNOWN
    if job.processes and job.processes > 1:
        device += f", {job.processes} processes"
    precision = UNKNOWN
    if job.precision is not None:
        precision = job.precision.used
        asked = f", {job.precision.asked} was asked for: {job.precision.why}"
        precision += asked if job.precision.asked != precision else ""
    rows = [("device", device), ("precision", precision)]
    rows.append(
        (
            "predicted",
            f"{format_known_size(job.peak)} of {format_known_size(job.room)} at the peak of a step",
        )
    )
    if job.largest_batch is not None:
        rows.append(("batch", f"{job.batch}; {job.largest_batch} is the largest predicted to fit"))
    return rows


def format_disk_space(room: DiskSpace) -> str:
    """A place for files in a few words."""
    return f"{format_bytes(room.free)} of {format_bytes(room.total)} free"


def format_known_size(nbytes: int | None) -> str:
    """Bytes for people."""
    return UNKNOWN if nbytes is None else format_bytes(nbytes)
