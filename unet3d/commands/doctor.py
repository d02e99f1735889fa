"""`unet3d doctor`: inspect this machine, and find what limits the configured run on it."""

import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.cuda.nccl
from torch.utils import collect_env

from unet3d import __version__
from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.fields import number, read_settings
from unet3d.control_groups import count_usable_cores
from unet3d.cpp_kernels import find_compiler
from unet3d.errors import UsageError, summarize_error
from unet3d.files import find_existing_dir, write_output
from unet3d.machine import (
    Precision,
    describe_missing_kernels,
    get_available_bytes,
    get_cpu_model,
    has_fast_bf16,
    read_meminfo,
    resolve_device,
    resolve_precision,
)
from unet3d.memory.benchmark import list_failures, run_benchmark
from unet3d.memory.estimate import UntraceableError, get_device_bytes
from unet3d.memory.fit import (
    FUSED_STRATEGIES,
    estimate_configured_step,
    find_largest_batch,
    resolve_strategy,
)
from unet3d.memory.oom_advice import format_oom_warning
from unet3d.step.build import complete_step
from unet3d.text import MIB, format_bytes
from unet3d.training.config import TrainConfig, parse_train_config
from unet3d.training.launch import read_process_rank
from unet3d.training.machine_checks import (
    SHM,
    Problem,
    check_writable,
    count_local_processes,
    find_problems,
)

PACKAGES = (
    *("lightning", "hydra-core", "monai", "tensorboard", "nibabel", "numpy", "scipy", "matplotlib"),
    *("triton",),
)

KEYS = ("benchmark", "seconds", "format", "output", "trainer.accelerator")
"""Keys that leave open which job a benchmark measures."""

BENCHMARK_JOB = ("experiment=example_small", "model=unet_small", "precision=16")
"""What a benchmark measures on a GPU unless another job is given: it fills one."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Which run to check this machine for."""

    training: TrainConfig
    format: Literal["table", "json"]
    output: Path | None
    benchmark: bool
    seconds: Annotated[float, number("above 0")]  # that the benchmark may take


def main(composed: ComposedConfig, folder: Path) -> int:
    """Print the report; return 1 if something would certainly stop the run."""
    settings = read_settings(DoctorConfig, composed.config, training=parse_train_config(composed))
    if settings.benchmark:
        return measure_and_save_benchmark(settings)
    machine = inspect_machine(settings.training, folder)
    run, problems = inspect_run(settings.training, folder, machine)
    content: dict[str, Any] = {"unet3d": __version__, **machine, "run": asdict(run)}
    if settings.format == "json":  # bytes; null if unknown
        content["problems"] = [asdict(problem) for problem in problems]
        write_output(json.dumps(content, indent=1), settings.output)
    else:
        write_output(format_doctor_report(content, problems), settings.output)
    return 1 if any(problem.is_fatal for problem in problems) else 0


def measure_and_save_benchmark(settings: DoctorConfig) -> int:
    """Measure, and write the file; return 1 if something did not run as it should."""
    training = settings.training
    device = resolve_device(training.step.accelerator)
    words = training.composition.overrides
    if device == "cuda" and all(word.partition("=")[0] in KEYS for word in words):
        training = parse_train_config(compose_config(BENCHMARK_JOB, "doctor"))
    machine = describe_machine(torch.device(device))
    name = "-".join(machine.get("gpu", device).lower().split())
    file = settings.output or Path(f"unet3d-benchmark-{name}.json")
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


def format_doctor_report(content: Mapping[str, Any], problems: Sequence[Problem]) -> str:
    """Return the report for people: a section for each entry, and what limits the run."""
    lines = []
    for section, facts in content.items():
        if isinstance(facts, dict):
            rows = [(name, format_fact(fact)) for name, fact in facts.items()]
            lines += [section, *(f"  {name:20} {text}" for name, text in rows)]
        else:
            lines.append(f"{section:22} {format_fact(facts)}")
    found = [("BLOCKER: " if p.is_fatal else "- ") + p.message for p in problems]
    lines.append("problems")
    lines += [f"  {line}" for text in found or ["no problems found"] for line in text.split("\n")]
    return "\n".join(lines)


def format_fact(fact: Any) -> str:
    """Return a fact in a line; large numbers are bytes.

    >>> format_fact({"folder": "/runs", "total": 2**31, "free": None}), format_fact([9, True])
    ('folder /runs, total 2.0 GiB, free -', '9, yes')
    """
    if isinstance(fact, dict):
        return ", ".join(f"{name} {format_fact(part)}" for name, part in fact.items())
    if isinstance(fact, list | tuple):
        return ", ".join(map(format_fact, fact)) or "-"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, int) and fact >= MIB:
        return format_bytes(fact)
    return "-" if fact in (None, "") else str(fact)


def find_program(command: str | None) -> str | None:
    """Return the path of a command's program; None if it is not found."""
    return None if command is None else shutil.which(command.split()[0])


def get_disk_space(folder: Path) -> dict[str, Any]:
    """Return total and free bytes of the file system where a folder is or would be created."""
    usage = shutil.disk_usage(find_existing_dir(folder))
    return {"folder": str(folder), "total": usage.total, "free": usage.free}


def describe_system() -> dict[str, Any]:
    """Return resources of this machine, in bytes unless they are counts; None: unknown."""
    return {
        "name": platform.platform(),
        "cpu_model": get_cpu_model(),
        "cores": count_usable_cores(),  # that this process may use
        "threads": torch.get_num_threads(),
        "fast_bf16": has_fast_bf16(),
        "ram": read_meminfo().get("MemTotal"),
        "ram_free": get_available_bytes(torch.device("cpu")),
        "shm": get_disk_space(SHM) if SHM.is_dir() else None,
    }


def describe_software() -> dict[str, Any]:
    """Return versions and paths of programs on this machine; None: missing."""
    has_nccl = torch.distributed.is_nccl_available()
    triton_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    installed = {package.name.lower(): package.version for package in distributions()}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,  # that torch is built for
        "rocm": torch.version.hip,
        "cudnn": format_cudnn_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "cpu_compiler": find_program(find_compiler()),
        "triton_compiler": find_program(triton_compiler),  # builds its launchers
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "packages": {name: installed.get(name) for name in PACKAGES},
    }


def format_cudnn_version() -> str | None:
    """Return cuDNN's version with dots: 91002 is 9.10.2."""
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:  # another version than torch was built with is installed
        return summarize_error(error)
    return None if number is None else f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}"


def list_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that torch finds; none if their driver is broken."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"index": index, "name": properties.name, "total": total, "free": free}
        gpus.append({**gpu, "capability": (properties.major, properties.minor)})
    return gpus


@dataclass(kw_only=True)
class RunEstimate:
    """What the configured run would be on this machine; None: unknown."""

    overrides: list[str]
    device: str | None = None
    processes: int | None = None
    precision: Precision | None = None
    peak: int | None = None  # estimated bytes of a step
    available: int | None = None  # bytes of the device
    batch_size: int
    largest_batch: int | None = None  # estimated to fit in a GPU


def inspect_machine(settings: TrainConfig, folder: Path) -> dict[str, Any]:
    """Inspect hardware, software, and the disks that the run would write to."""
    folders = {"runs": folder, "preprocessed volumes": settings.data.cache}
    return {
        "system": describe_system(),
        "software": describe_software(),
        "gpus": list_gpus(),
        "disks": {what: get_disk_space(path) for what, path in folders.items()},
    }


def inspect_run(
    settings: TrainConfig, folder: Path, machine: Mapping[str, Any]
) -> tuple[RunEstimate, list[Problem]]:
    """Return the run, and what limits it; what stops it comes first."""
    run = RunEstimate(
        overrides=list(settings.composition.overrides), batch_size=settings.data.batch_size
    )
    problems = list[Problem]()
    step = settings.step
    with collect_errors(problems):
        run.device = resolve_device(step.accelerator)
        run.precision = resolve_precision(step.precision, run.device)
    with collect_errors(problems):
        read_process_rank(settings.trainer.launch)
        run.processes = count_local_processes(settings)
    device, precision = run.device, run.precision
    if device is not None and precision is not None:
        cuda = device == "cuda"
        run.available = get_available_bytes(torch.device(device))
        with collect_errors(problems):
            # auto is estimated for a GPU
            step = complete_step(replace(step, accelerator=device))
            step = resolve_strategy(step, precision, cuda=cuda)
            problems += find_problems(
                replace(settings, step=step),
                precision,
                device=device,
                processes=run.processes or 1,
                folder=folder,
                is_fused=step.strategy in FUSED_STRATEGIES,
            )
            estimate = estimate_configured_step(step)
            run.peak = get_device_bytes(estimate)
            if run.available is not None:
                lines = format_oom_warning(estimate, step, run.available)
                is_fatal = settings.memory.if_too_large == "error"
                problems += [Problem("\n".join(lines), is_fatal=is_fatal)] if lines else []
                largest = find_largest_batch(step, run.available) if cuda else None
                run.largest_batch = None if largest is None else largest[0]
        problems += find_performance_problems(settings, precision, device, machine)
    return run, sorted(problems, key=lambda problem: not problem.is_fatal)


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


def find_performance_problems(
    settings: TrainConfig, precision: Precision, device: str, machine: Mapping[str, Any]
) -> list[Problem]:
    """Return what would make a run slower or smaller than it could be."""
    data, requested = settings.data, settings.step.accelerator
    cores, software = machine["system"]["cores"], machine["software"]
    messages = [describe_missing_kernels(device)]
    if device == "cpu":
        reason = "trainer.accelerator=cpu" if requested == "cpu" else "no GPU found"
        messages.append(f"{reason}: training runs on {cores} CPU cores")
        if software["cpu_compiler"] is None:
            messages.append(
                "no C++ compiler (install g++, or set CXX): pooling layers and fused blocks run in "
                "plain PyTorch, slowly"
            )
    if device == "cuda":
        messages.append(describe_missing_triton(software))
    if precision.used != precision.requested:
        messages.append(
            f"precision={precision.requested} runs as {precision.used}: {precision.reason}"
        )
    if data.num_workers > cores:
        messages.append(
            f"data.num_workers={data.num_workers} exceeds the {cores} available cores: lower it to "
            f"{cores}"
        )
    problems = [Problem(message) for message in messages if message is not None]
    cache = check_writable(data.cache)
    return problems if cache is None else [*problems, cache]


def describe_missing_triton(software: Mapping[str, Any]) -> str | None:
    """Say what the GPU kernels of pooling layers and fused blocks need; None: nothing."""
    installed = software["packages"]["triton"]
    if installed is None:
        return (
            "Triton is not installed: pooling layers and fused blocks run slowly, in plain torch; "
            "install triton"
        )
    missing = [] if software["triton_compiler"] else ["a C compiler (gcc, or CC=...)"]
    missing += [] if software["python_headers"] else ["Python's headers (python3-dev)"]
    names = " and ".join(missing)
    return f"Triton {installed} compiles kernels on first use: install {names}" if names else None


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of what runs on it; no names of users or folders."""
    software, facts = describe_software(), dict[str, Any]()
    if device.type == "cuda":
        gpu = list_gpus()[torch.cuda.current_device()]
        facts = {"gpu": gpu["name"], "capability": gpu["capability"], "memory_bytes": gpu["total"]}
    facts |= {name: software[name] for name in ("torch", "cuda", "cudnn")}
    facts |= {"triton": software["packages"]["triton"], "threads": torch.get_num_threads()}
    return {"device": device.type, **facts}
