"""Query NVIDIA's driver (NVML) through ctypes; unknown values are None, never an error.

A device is a torch.device, or a UUID from `list_gpu_uuids`: torch's indices are not the driver's.
"""

import ctypes
import os
from ctypes import byref
from dataclasses import dataclass
from functools import lru_cache

import torch

LIBRARY = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
MAX_SIZE = 1024
"""Processes per GPU that can be listed, and bytes of a name."""

Device = torch.device | str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Total and free bytes of a GPU."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process with memory on a GPU; containers hide names and sometimes process ids."""

    pid: int
    name: str | None
    used: int | None


def get_driver_version() -> str | None:
    """Return the driver's version, such as 580.65.06."""
    return _text("nvmlSystemGetDriverVersion")


def get_max_cuda_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as 13.0."""
    number = ctypes.c_int()
    if not _call("nvmlSystemGetCudaDriverVersion_v2", byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def list_gpu_uuids() -> list[str]:
    """Return the UUIDs of all GPUs, also of those that CUDA_VISIBLE_DEVICES hides from torch."""
    count, uuids = ctypes.c_uint(), []
    if not _call("nvmlDeviceGetCount_v2", byref(count)):
        return []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), byref(handle)):
            uuid = _text("nvmlDeviceGetUUID", handle)
            uuids += [] if uuid is None else [uuid]
    return uuids


def get_gpu_name(device: Device) -> str | None:
    """Return the product name, such as NVIDIA H100 80GB HBM3."""
    handle = _handle(device)
    return None if handle is None else _text("nvmlDeviceGetName", handle)


def get_compute_capability(device: Device) -> tuple[int, int] | None:
    """Return the compute capability, such as (9, 0) for sm_90."""
    handle, major, minor = _handle(device), ctypes.c_int(), ctypes.c_int()
    if handle is None:
        return None
    if not _call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor)):
        return None
    return major.value, minor.value


def get_memory(device: Device) -> Memory | None:
    """Return the memory of a GPU or of a MIG slice."""
    handle, info = _handle(device), _MemoryInfo()
    if handle is None or not _call("nvmlDeviceGetMemoryInfo", handle, byref(info)):
        return None
    return Memory(total=info.total, free=info.free)


def get_utilization(device: Device) -> int | None:
    """Return the percentage of the last sample (up to 1 s) in which a kernel was running."""
    handle, rates = _handle(device), _Utilization()
    if handle is None or not _call("nvmlDeviceGetUtilizationRates", handle, byref(rates)):
        return None
    return rates.gpu


def list_processes(device: Device) -> list[Process] | None:
    """Return the compute and graphics processes on a GPU, largest memory first."""
    handle = _handle(device)
    if handle is None:
        return None
    compute = _query_processes("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    if compute is None:
        return None
    graphics = _query_processes("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
    processes = [
        Process(pid=pid, name=_text("nvmlSystemGetProcessName", ctypes.c_uint(pid)), used=used)
        for pid, used in (compute | (graphics or {})).items()
    ]
    return sorted(processes, key=lambda process: -(process.used or 0))


def get_process_bytes(device: Device) -> int | None:
    """Return the bytes of this process on a GPU with its context; None if its id is hidden."""
    handle = _handle(device)
    if handle is None:
        return None
    processes = _query_processes("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    return None if processes is None else processes.get(os.getpid())


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _query_processes(function: str, handle: ctypes.c_void_p) -> dict[int, int | None] | None:
    """Return the bytes of each process by its id."""
    count, infos = ctypes.c_uint(MAX_SIZE), (_ProcessInfo * MAX_SIZE)()
    if not _call(function, handle, byref(count), infos):
        return None
    # NVML sets all bits if a value is not available, as for processes of other containers.
    return {p.pid: p.used if p.used < 2**63 else None for p in infos[: count.value]}


def _handle(device: Device) -> ctypes.c_void_p | None:
    """Return the driver's handle of a device."""
    if isinstance(device, str):
        uuids = (device,)
    elif device.type != "cuda" or _library() is None or not torch.cuda.is_available():
        return None
    else:
        uuid = torch.cuda.get_device_properties(device).uuid
        uuids = (f"GPU-{uuid}", f"MIG-{uuid}")  # torch does not tell which it is
    return next((handle for name in uuids if (handle := _find_handle(name)) is not None), None)


@lru_cache
def _find_handle(uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    return handle if _call("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(handle)) else None


def _text(function: str, *arguments: object) -> str | None:
    buffer = ctypes.create_string_buffer(MAX_SIZE)
    if not _call(function, *arguments, buffer, ctypes.c_uint(MAX_SIZE)):
        return None
    return buffer.value.decode(errors="replace") or None


def _call(name: str, *arguments: object) -> bool:
    """Call a function of NVML, which an old driver may not have; return whether it succeeded."""
    function = getattr(_library(), name, None)
    return function is not None and function(*arguments) == 0


@lru_cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):  # no driver, or a broken one
        return None
