"""The peak memory between `start` and `read`: reset each time, never the lifetime's."""

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

from unet3d.meter.record import MemoryRecord

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMeter:
    """Measures what a device holds at most; a CPU's figure is the process's resident memory."""

    def start(self, device: torch.device) -> None:
        """Forget what was before."""
        if device.type == "cuda":
            torch.cuda.init()  # a GPU that nobody has used yet has no peak to reset
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_resident_peak()

    def read(self, device: torch.device) -> MemoryRecord:
        """The peak since `start`."""
        if device.type == "cuda":
            return MemoryRecord(
                allocated=torch.cuda.max_memory_allocated(device),
                reserved=torch.cuda.max_memory_reserved(device),
                process=process_bytes(device),
            )
        return MemoryRecord(resident=resident_peak())


def _reset_resident_peak() -> None:
    # "5" resets the kernel's high-water mark of this process and touches nothing else (man 5 proc).
    try:
        CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or not permitted
        global _lifetime_peak_only
        _lifetime_peak_only = True


_lifetime_peak_only = False


def resident_peak() -> int | None:
    """The high-water mark of resident memory; None where it cannot be told for a single step."""
    if _lifetime_peak_only or not STATUS.exists():
        return None
    line = next(s for s in STATUS.read_text().splitlines() if s.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def process_bytes(device: torch.device) -> int | None:
    """What this process holds on the GPU, context and all; None where NVML cannot tell."""
    library = _nvml()
    if library is None:
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) != 0:
        return None
    count = ctypes.c_uint(1024)
    processes = (_ProcessInfo * count.value)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
        return None
    mine = [p.used for p in processes[: count.value] if p.pid == os.getpid()]
    return mine[0] if mine and mine[0] < 2**63 else None  # a container may hide process ids


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@lru_cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
