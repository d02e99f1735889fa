"""Describe this machine for a file of results that can be attached to an issue."""

from typing import Any

import torch

from unet3d.machine.gpus import list_gpus
from unet3d.machine.memory import read_meminfo
from unet3d.machine.software import inspect_software
from unet3d.machine.system import count_usable_cores, get_cpu_model, get_os_name
from unet3d.units import format_bytes


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of what runs on it; no names of users or folders."""
    software = inspect_software()
    versions = {"torch": software.torch, "cuda": software.cuda, "cudnn": software.cudnn}
    gpu = None
    if device.type == "cuda":
        gpu = next((g for g in list_gpus() if g.index == torch.cuda.current_device()), None)
    return {
        "device": device.type,
        "gpu": None if gpu is None else gpu.name,
        "capability": None if gpu is None else gpu.capability,
        "memory_bytes": None if gpu is None else gpu.total,
        **versions,
        "triton": software.packages.get("triton"),
        "threads": torch.get_num_threads(),
    }


def summarize_machine() -> dict[str, str]:
    """Return system, processor, memory and GPUs for people to read; no names of users or hosts."""
    memory = read_meminfo().get("MemTotal")
    facts = {
        "system": get_os_name(),
        "processor": f"{get_cpu_model() or 'unknown'}, {count_usable_cores()} usable cores",
        "memory": None if memory is None else format_bytes(memory),
        "GPU": ", ".join(gpu.name or "unknown" for gpu in list_gpus()),
        "CUDA": torch.version.cuda,
    }
    return {name: fact for name, fact in facts.items() if fact}
