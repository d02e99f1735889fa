"""The GPUs of this machine, as NVIDIA's driver and torch report them."""

import os
from dataclasses import dataclass, replace

import torch

from unet3d import nvml
from unet3d.machine.software import call_or_none


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; values that are not reported are None."""

    name: str | None
    uuid: str | None
    index: int | None  # torch's index; None: not visible to torch
    total: int | None
    free: int | None
    capability: tuple[int, int] | None
    utilization: int | None  # percent
    other_processes: list[nvml.Process] | None  # other processes that hold its memory


def list_gpus() -> list[Gpu]:
    """Return the GPUs that the driver lists, and those that only torch reports."""
    indices = map_torch_indices()
    listed = [query_nvml(uuid, indices.pop(uuid, None)) for uuid in nvml.list_gpu_uuids()]
    return [*listed, *(query_torch(index) for index in indices.values())]


def map_torch_indices() -> dict[str, int]:
    """Return torch's index of each GPU by UUID; a MIG slice has its own."""
    if not torch.cuda.is_available():
        return {}
    indices = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        indices[f"GPU-{getattr(properties, 'uuid', index)}"] = index
    return indices


def query_nvml(device: nvml.Device, index: int | None) -> Gpu:
    """Return what the driver reports about a GPU."""
    memory, processes = nvml.get_memory(device), nvml.list_processes(device)
    return Gpu(
        name=nvml.get_gpu_name(device),
        uuid=device if isinstance(device, str) else None,
        index=index,
        total=None if memory is None else memory.total,
        free=None if memory is None else memory.free,
        capability=nvml.get_compute_capability(device),
        utilization=nvml.get_utilization(device),
        other_processes=None
        if processes is None
        else [p for p in processes if p.pid != os.getpid()],
    )


def query_torch(index: int) -> Gpu:
    """Return what torch reports about a MIG slice, or about any GPU without NVIDIA's library."""
    device = torch.device("cuda", index)
    gpu, properties = query_nvml(device, index), torch.cuda.get_device_properties(index)
    free = gpu.free
    if free is None:
        info = call_or_none(lambda: torch.cuda.mem_get_info(index))
        free = None if info is None else info[0]
    return replace(
        gpu,
        name=gpu.name or properties.name,
        uuid=str(getattr(properties, "uuid", "")) or None,
        total=gpu.total or properties.total_memory,
        free=free,
        capability=gpu.capability or (properties.major, properties.minor),
    )
