"""Describe this machine for a file of results that can be attached to an issue."""

from typing import Any

import torch

from unet3d.machine.gpus import list_gpus
from unet3d.machine.software import inspect_software


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of what runs on it; no names of users or folders."""
    software = inspect_software()
    versions = {"torch": software.torch, "cuda": software.cuda, "cudnn": software.cudnn}
    gpus = [gpu for gpu in list_gpus() if gpu.index == 0] if device.type == "cuda" else []
    gpu = gpus[0] if gpus else None
    return {
        "device": device.type,
        "gpu": None if gpu is None else gpu.name,
        "capability": None if gpu is None else gpu.capability,
        "memory_bytes": None if gpu is None else gpu.total,
        **versions,
        "triton": software.packages.get("triton"),
        "threads": torch.get_num_threads(),
    }
