"""What NVIDIA's driver tells about its GPUs, by ctypes; None where it cannot tell, never an error.

A device is torch's, or the UUID that `uuids` lists; torch's numbers are not the driver's.
"""

import ctypes
import os
from ctypes import byref
from dataclasses import dataclass
from functools import lru_cache

import torch

LIBRARY = "libnvidia-ml.so.1"
MOST = 1024
"""Processes that are looked at on a GPU, and bytes of a name."""

Device = torch.device | str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A GPU's memory in bytes, whoever holds it."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """Who holds memory on a GPU; a container hides names and sometimes ids."""

    pid: int
    name: str | None
    used: int | None


def get_driver_version() -> str | None:
    """The driver's version, as 580.65.06."""
    return _text("nvmlSystemGetDriverVersion")


def get_max_cuda_version() -> str | None:
    """The newest CUDA that this driver runs, as 13.0."""
    number = ctypes.c_int()
    if not _done("nvmlSystemGetCudaDriverVersion_v2", byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def list_gpu_uuids() -> list[str]:
    """The GPUs that the driver shows, whatever CUDA_VISIBLE_DEVICES hides from torch."""
    count, found = ctypes.c_uint(), []
    if not _done("nvmlDeviceGetCount_v2", byref(count)):
        return []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if _done("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), byref(handle)):
            uuid = _text("nvmlDeviceGetUUID", handle)
            found += [] if uuid is None else [uuid]
    return found


def get_gpu_name(device: Device) -> str | None:
    """As NVIDIA H100 80GB HBM3."""
    handle = _handle(device)
    return None if handle is None else _text("nvmlDeviceGetName", handle)


def get_compute_capability(device: Device) -> tuple[int, int] | None:
    """Of computing: (9, 0) is sm_90."""
    handle, major, minor = _handle(device), ctypes.c_int(), ctypes.c_int()
    if handle is None:
        return None
    if not _done("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor)):
        return None
    return major.value, minor.value


def memory(device: Device) -> Memory | None:
    """Of the whole GPU, or of the slice that a process has of it."""
    handle, told = _handle(device), _MemoryInfo()
    if handle is None or not _done("nvmlDeviceGetMemoryInfo", handle, byref(told)):
        return None
    return Memory(total=told.total, free=told.free)


def get_utilization(device: Device) -> int | None:
    """The percentage of the driver's last sample (up to a second) in which a kernel was running."""
    handle, told = _handle(device), _Utilisation()
    if handle is None or not _done("nvmlDeviceGetUtilizationRates", handle, byref(told)):
        return None
    return told.gpu


def list_processes(device: Device) -> list[Process] | None:
    """Who computes or draws on a GPU, the largest first."""
    handle = _handle(device)
    if handle is None:
        return None
    told: dict[int, int | None] = {}
    answers = [
        _running(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle)
        for kind in ("Compute", "Graphics")
    ]
    for answer in answers:
        told |= answer or {}
    if answers[0] is None:
        return None
    found = [
        Process(pid=pid, name=_text("nvmlSystemGetProcessName", ctypes.c_uint(pid)), used=used)
        for pid, used in told.items()
    ]
    return sorted(found, key=lambda process: -(process.used or 0))


def process_bytes(device: Device) -> int | None:
    """What this process holds on a GPU, context and all; a container may hide process ids."""
    handle = _handle(device)
    told = None if handle is None else _running("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    return None if told is None else told.get(os.getpid())


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilisation(ctypes.Structure):
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


def _running(question: str, handle: ctypes.c_void_p) -> dict[int, int | None] | None:
    """Process ids and what each holds."""
    count, told = ctypes.c_uint(MOST), (_ProcessInfo * MOST)()
    if not _done(question, handle, byref(count), told):
        return None
    # All bits set: not available, as for a process of another container.
    return {p.pid: p.used if p.used < 2**63 else None for p in told[: count.value]}


def _handle(device: Device) -> ctypes.c_void_p | None:
    """What the driver calls a device."""
    if isinstance(device, str):
        names = (device,)
    elif device.type != "cuda" or _library() is None or not torch.cuda.is_available():
        return None
    else:
        uuid = torch.cuda.get_device_properties(device).uuid
        names = (f"GPU-{uuid}", f"MIG-{uuid}")  # torch does not say which of the two it is
    return next((handle for n in names if (handle := _known(n)) is not None), None)


@lru_cache
def _known(uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = _done("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(handle))
    return handle if found else None


def _text(question: str, *about: object) -> str | None:
    answer = ctypes.create_string_buffer(MOST)
    if not _done(question, *about, answer, ctypes.c_uint(MOST)):
        return None
    return answer.value.decode(errors="replace") or None


def _done(question: str, *arguments: object) -> bool:
    """Whether the driver has answered; an old one does not know every question."""
    function = getattr(_library(), question, None)
    return function is not None and function(*arguments) == 0


@lru_cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):  # there is no driver, or one that is not NVIDIA's
        return None
