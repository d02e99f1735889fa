"""The GPUs of this machine: as its driver shows them, and as torch does."""

import os
from dataclasses import dataclass

import torch

from unet3d import nvml
from unet3d.machine.software import call_or_none


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One of them; None is what is not told."""

    name: str | None
    uuid: str | None
    number: int | None  # torch's; None: torch does not use it
    total: int | None
    free: int | None
    capability: tuple[int, int] | None
    utilisation: int | None  # percent
    others: list[nvml.Process] | None  # that hold memory


def list_gpus() -> list[Gpu]:
    """Those that the driver shows, with torch's number, and those that torch alone tells of."""
    numbers = map_torch_indices()
    shown = [query_nvml(uuid, numbers.pop(uuid, None)) for uuid in nvml.list_gpu_uuids()]
    return [*shown, *(query_torch(number) for number in numbers.values())]


def map_torch_indices() -> dict[str, int]:
    """What torch calls each GPU, by UUID; a slice of a GPU has one of its own."""
    if not torch.cuda.is_available():
        return {}
    found = {}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found[f"GPU-{getattr(properties, 'uuid', number)}"] = number
    return found


def query_nvml(device: nvml.Device, number: int | None) -> Gpu:
    """All that the driver tells."""
    memory, running = nvml.memory(device), nvml.list_processes(device)
    return Gpu(
        name=nvml.get_gpu_name(device),
        uuid=device if isinstance(device, str) else None,
        number=number,
        total=None if memory is None else memory.total,
        free=None if memory is None else memory.free,
        capability=nvml.get_compute_capability(device),
        utilisation=nvml.get_utilization(device),
        others=None if running is None else [p for p in running if p.pid != os.getpid()],
    )


def query_torch(number: int) -> Gpu:
    """A slice, or any GPU where NVIDIA's library is missing."""
    device = torch.device("cuda", number)
    told, properties = query_nvml(device, number), torch.cuda.get_device_properties(number)
    free = told.free
    if free is None:
        asked = call_or_none(lambda: torch.cuda.mem_get_info(number))
        free = None if asked is None else asked[0]
    return Gpu(
        name=told.name or properties.name,
        uuid=str(getattr(properties, "uuid", "")) or None,
        number=number,
        total=told.total or properties.total_memory,
        free=free,
        capability=told.capability or (properties.major, properties.minor),
        utilisation=told.utilisation,
        others=told.others,
    )
