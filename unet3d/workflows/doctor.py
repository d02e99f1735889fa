"""What this machine is, and what of it limits the configured run."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from unet3d import nvml
from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import fill_from_dataset, instantiate, summarize_error
from unet3d.errors import UsageError
from unet3d.machine import preflight as machine
from unet3d.machine.device import Precision, resolve_device, resolve_precision
from unet3d.machine.distributed_env import read_ranks
from unet3d.machine.gpus import Gpu, list_gpus
from unet3d.machine.memory import get_available_bytes
from unet3d.machine.preflight import Problem
from unet3d.machine.software import Software, call_or_none, inspect_software
from unet3d.machine.system import DiskSpace, System, get_disk_space, inspect_system
from unet3d.units import GIB, format_bytes
from unet3d.workflows.memory.estimate import UntraceableError, estimate_memory
from unet3d.workflows.memory.oom_advice import format_oom_warning
from unet3d.workflows.memory.strategies import get_device_bytes, resolve_strategy
from unet3d.workflows.memory.suggest import find_largest_batch
from unet3d.workflows.training.preflight import count_local_processes, find_problems


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """All that was found."""

    system: System
    software: Software
    driver: str | None
    driver_cuda: str | None  # the newest that it runs
    gpus: list[Gpu]
    rooms: dict[str, DiskSpace]  # where files go: runs, prepared volumes, kernels


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """What the configured run would be on this machine; None: it cannot be told."""

    words: list[str]
    device: str | None
    processes: int | None
    precision: Precision | None
    peak: int | None  # predicted bytes of a step
    room: int | None  # bytes that the device has
    batch: int
    largest_batch: int | None  # that is predicted to fit a GPU


def inspect_machine(request: ComposedConfig, folder: Path) -> MachineReport:
    """Look at everything."""
    places = {"runs": folder, "prepared volumes": Path(request.config.data.cache)}
    return MachineReport(
        system=inspect_system(),
        software=inspect_software(),
        driver=nvml.get_driver_version(),
        driver_cuda=nvml.get_max_cuda_version(),
        gpus=call_or_none(list_gpus) or [],
        rooms={what: get_disk_space(place) for what, place in places.items()},
    )


def inspect_run(
    request: ComposedConfig, folder: Path, here: MachineReport
) -> tuple[RunEstimate, list[Problem]]:
    """The run, and what limits it, what stops it first."""
    cfg, found = request.config, list[Problem]()
    device = count = used = peak = space = best = None
    with collect_errors(found):
        device = resolve_device(str(cfg.trainer.accelerator))
        used = resolve_precision(cfg.precision, device)
    with collect_errors(found):
        read_ranks(cfg.trainer.launch)
        count = count_local_processes(cfg)
    if device is not None and used is not None:
        space = get_available_device_bytes(device, here.gpus[:count])
        with collect_errors(found):
            request = resolve_strategy(with_device(device, request), used, cuda=device == "cuda")
            channels, augment = resolve_in_channels(request), instantiate(cfg.augmentation)
            found += find_problems(
                request,
                used,
                device=device,
                processes=count or 1,
                folder=folder,
                channels=channels,
                augment=augment,
            )
            peak = get_device_bytes(estimate_memory(request))
        if peak is not None and space is not None:
            with collect_errors(found):
                found += find_memory_problems(request, space)
                best = find_largest_batch(request, space) if device == "cuda" else None
        found += find_performance_problems(cfg, used, device, here)
    job = RunEstimate(
        words=list(request.overrides),
        device=device,
        processes=count,
        precision=used,
        peak=peak,
        room=space,
        batch=cfg.data.batch_size,
        largest_batch=None if best is None else best[0],
    )
    return job, sorted(found, key=lambda lack: not lack.stop)


@contextmanager
def collect_errors(found: list[Problem]) -> Generator[None]:
    """What goes wrong would stop the run as well: it is noted, and the rest still looked at."""
    try:
        yield
    except UntraceableError as reason:
        found.append(Problem(str(reason)))
    except Exception as error:
        named = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        found.append(Problem(f"{named}{summarize_error(error)}", stop=True))


def with_device(device: str, request: ComposedConfig) -> ComposedConfig:
    """The request with `auto` resolved, so that it is predicted for the device that is here."""
    config = request.config.copy()
    config.trainer.accelerator = "gpu" if device == "cuda" else device
    return replace(request, config=config)


def resolve_in_channels(request: ComposedConfig) -> int:
    """As the config says, or else the data set; data that is made when missing is not made here."""
    fill_from_dataset(request.config)
    return request.config.data.in_channels


def get_available_device_bytes(device: str, taken: Sequence[Gpu]) -> int | None:
    """What a process may take: of GPUs that others hold as well, what is left."""
    left = [gpu.free for gpu in taken if count_bytes_held_by_others(gpu) and gpu.free is not None]
    known = get_available_bytes(torch.device(device))
    return min([*left, known]) if known is not None else None


def count_bytes_held_by_others(gpu: Gpu) -> int:
    """What others hold of a GPU, but for the little that a driver and a screen take."""
    if gpu.number is None or gpu.total is None or gpu.free is None:
        return 0
    used = gpu.total - gpu.free
    return used if used > GIB else 0


def find_memory_problems(request: ComposedConfig, space: int) -> list[Problem]:
    """What is predicted not to fit, with what would."""
    choice = request.config.memory.if_too_large
    lines = format_oom_warning(estimate_memory(request), request, space, stop=False)
    return [Problem("\n".join(lines), stop=choice == "stop")] if lines else []


def find_performance_problems(
    cfg: DictConfig, used: Precision, device: str, here: MachineReport
) -> list[Problem]:
    """What would not stop a run, and makes it slower or smaller than it could be."""
    system = here.system
    found = find_cpu_problems(cfg, here) if device == "cpu" else find_gpu_problems(here)
    if used.used != used.asked:
        found.append(Problem(f"precision={used.asked} is computed as {used.used}: {used.why}"))
    cores = min(system.cores, system.cores_limit or system.cores)
    if system.threads > max(1, round(cores)):
        found.append(
            Problem(
                f"torch computes on {system.threads} threads, and {cores:g} cores may be used: set "
                f"OMP_NUM_THREADS={max(1, int(cores))}"
            )
        )
    if cfg.data.num_workers > cores:
        found.append(
            Problem(f"{cfg.data.num_workers} workers (data.num_workers=) on {cores:g} cores")
        )
    cache = machine.check_writable(Path(cfg.data.cache))
    return found if cache is None else [*found, cache]


def find_cpu_problems(cfg: DictConfig, here: MachineReport) -> list[Problem]:
    """Why there is no GPU, and what a CPU needs."""
    software = here.software
    why = "trainer.accelerator=cpu" if str(cfg.trainer.accelerator) == "cpu" else "no GPU"
    found = [Problem(f"{why}: training takes the CPU's {here.system.cores} cores")]
    driver = machine.check_driver(software.cuda, driver=here.driver, runs=here.driver_cuda)
    found += [] if driver is None else [driver]
    if software.cpu_compiler is None:
        found.append(
            Problem(
                "no C++ compiler (g++, or CXX=...): poolings and lean blocks run in plain torch, "
                "slowly"
            )
        )
    return found


def find_gpu_problems(here: MachineReport) -> list[Problem]:
    """What else is on the GPUs, and what their kernels need."""
    software = here.software
    triton = machine.check_triton(
        software.packages["triton"],
        compiler=software.triton_compiler,
        headers=software.python_headers,
    )
    return [
        *([] if triton is None else [triton]),
        *(
            Problem(
                f"{format_bytes(count_bytes_held_by_others(gpu))} of GPU {gpu.number}'s {format_bytes(gpu.total or 0)} are held"
                f"{describe_processes(gpu.others or [])}: {format_bytes(gpu.free or 0)} are left"
            )
            for gpu in here.gpus
            if count_bytes_held_by_others(gpu)
        ),
    ]


def describe_processes(processes: Iterable[nvml.Process]) -> str:
    """Who they are."""
    named = [
        f"{p.name or 'a process'} ({p.pid}" + (f", {format_bytes(p.used)})" if p.used else ")")
        for p in processes
    ]
    return f" by {', '.join(named[:3])}{', ...' if len(named) > 3 else ''}" if named else ""
