"""What this machine is, and what of it limits the configured run."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from unet3d import nvml
from unet3d.build.fitting import largest
from unet3d.build.forecast import Untraceable, forecast
from unet3d.build.misfit import misfit_lines
from unet3d.build.objects import describe, first_line, make
from unet3d.build.preflight import lacks, processes
from unet3d.build.request import Request
from unet3d.build.rungs import decided, taken
from unet3d.machine import preflight as machine
from unet3d.machine.device import Precision, accelerator, precision
from unet3d.machine.gpus import Gpu, gpus
from unet3d.machine.memory import available_bytes
from unet3d.machine.preflight import Lack
from unet3d.machine.ranks import ranks_of
from unet3d.machine.software import Software, software, tried
from unet3d.machine.system import Room, System, room, system
from unet3d.types import GIB, Misuse, size


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that was found."""

    system: System
    software: Software
    driver: str | None
    driver_cuda: str | None  # the newest that it runs
    gpus: list[Gpu]
    rooms: dict[str, Room]  # where files go: runs, prepared volumes, kernels


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the configured run would be on this machine; None: it cannot be told."""

    words: list[str]
    device: str | None
    processes: int | None
    precision: Precision | None
    peak: int | None  # predicted bytes of a step
    room: int | None  # bytes that the device has
    batch: int
    largest_batch: int | None  # that is predicted to fit a GPU


def machine_of(request: Request, folder: Path) -> Machine:
    """Look at everything."""
    places = {"runs": folder, "prepared volumes": Path(request.config.data.cache)}
    return Machine(
        system=system(),
        software=software(),
        driver=nvml.driver(),
        driver_cuda=nvml.cuda(),
        gpus=tried(gpus) or [],
        rooms={what: room(place) for what, place in places.items()},
    )


def job_of(request: Request, folder: Path, here: Machine) -> tuple[Job, list[Lack]]:
    """The run, and what limits it, what stops it first."""
    cfg, found = request.config, list[Lack]()
    device = count = used = peak = space = best = None
    with noting(found):
        device = accelerator(str(cfg.trainer.accelerator))
        used = precision(cfg.precision, device)
    with noting(found):
        ranks_of(cfg.trainer.launch)
        count = processes(cfg)
    if device is not None and used is not None:
        space = room_of(device, here.gpus[:count])
        with noting(found):
            request = decided(on(device, request), used, cuda=device == "cuda")
            channels, augment = channels_of(request), make(cfg.augmentation)
            found += lacks(
                request,
                used,
                device=device,
                processes=count or 1,
                folder=folder,
                channels=channels,
                augment=augment,
            )
            peak = taken(forecast(request))
        if peak is not None and space is not None:
            with noting(found):
                found += misfit(request, space)
                best = largest(request, space) if device == "cuda" else None
        found += slower(cfg, used, device, here)
    job = Job(
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
def noting(found: list[Lack]) -> Generator[None]:
    """What goes wrong would stop the run as well: it is noted, and the rest still looked at."""
    try:
        yield
    except Untraceable as reason:
        found.append(Lack(str(reason)))
    except Exception as error:
        named = "" if isinstance(error, Misuse) else f"{type(error).__name__}: "
        found.append(Lack(f"{named}{first_line(error)}", stop=True))


def on(device: str, request: Request) -> Request:
    """The request with `auto` resolved, so that it is predicted for the device that is here."""
    config = request.config.copy()
    config.trainer.accelerator = "gpu" if device == "cuda" else device
    return replace(request, config=config)


def channels_of(request: Request) -> int:
    """As the config says, or else the data set; data that is made when missing is not made here."""
    describe(request.config)
    return request.config.data.in_channels


def room_of(device: str, taken: Sequence[Gpu]) -> int | None:
    """What a process may take: of GPUs that others hold as well, what is left."""
    left = [gpu.free for gpu in taken if held(gpu) and gpu.free is not None]
    known = available_bytes(torch.device(device))
    return min([*left, known]) if known is not None else None


def held(gpu: Gpu) -> int:
    """What others hold of a GPU, but for the little that a driver and a screen take."""
    if gpu.number is None or gpu.total is None or gpu.free is None:
        return 0
    used = gpu.total - gpu.free
    return used if used > GIB else 0


def misfit(request: Request, space: int) -> list[Lack]:
    """What is predicted not to fit, with what would."""
    choice = request.config.meter.on_misfit
    lines = misfit_lines(forecast(request), request, space, stop=False)
    return [Lack("\n".join(lines), stop=choice == "stop")] if lines else []


def slower(cfg: DictConfig, used: Precision, device: str, here: Machine) -> list[Lack]:
    """What would not stop a run, and makes it slower or smaller than it could be."""
    system = here.system
    found = of_cpu(cfg, here) if device == "cpu" else of_gpus(here)
    if used.used != used.asked:
        found.append(Lack(f"precision={used.asked} is computed as {used.used}: {used.why}"))
    cores = min(system.cores, system.cores_limit or system.cores)
    if system.threads > max(1, round(cores)):
        found.append(
            Lack(
                f"torch computes on {system.threads} threads, and {cores:g} cores may be used: set "
                f"OMP_NUM_THREADS={max(1, int(cores))}"
            )
        )
    if cfg.data.num_workers > cores:
        found.append(Lack(f"{cfg.data.num_workers} workers (data.num_workers=) on {cores:g} cores"))
    cache = machine.writable(Path(cfg.data.cache))
    return found if cache is None else [*found, cache]


def of_cpu(cfg: DictConfig, here: Machine) -> list[Lack]:
    """Why there is no GPU, and what a CPU needs."""
    software = here.software
    why = "trainer.accelerator=cpu" if str(cfg.trainer.accelerator) == "cpu" else "no GPU"
    found = [Lack(f"{why}: training takes the CPU's {here.system.cores} cores")]
    driver = machine.driver_for(software.cuda, driver=here.driver, runs=here.driver_cuda)
    found += [] if driver is None else [driver]
    if software.cpu_compiler is None:
        found.append(
            Lack(
                "no C++ compiler (g++, or CXX=...): poolings and lean blocks run in plain torch, "
                "slowly"
            )
        )
    return found


def of_gpus(here: Machine) -> list[Lack]:
    """What else is on the GPUs, and what their kernels need."""
    software = here.software
    triton = machine.triton(
        software.packages["triton"],
        compiler=software.triton_compiler,
        headers=software.python_headers,
    )
    return [
        *([] if triton is None else [triton]),
        *(
            Lack(
                f"{size(held(gpu))} of GPU {gpu.number}'s {size(gpu.total or 0)} are held"
                f"{by(gpu.others or [])}: {size(gpu.free or 0)} are left"
            )
            for gpu in here.gpus
            if held(gpu)
        ),
    ]


def by(processes: Iterable[nvml.Process]) -> str:
    """Who they are."""
    named = [
        f"{p.name or 'a process'} ({p.pid}" + (f", {size(p.used)})" if p.used else ")")
        for p in processes
    ]
    return f" by {', '.join(named[:3])}{', ...' if len(named) > 3 else ''}" if named else ""
