"""Measure the peak memory of a piece of work, and how busy a GPU is."""

import ctypes
import gc
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from unet3d.control_groups import read_lines

try:
    import pynvml  # ty: ignore[import-not-found]
except ModuleNotFoundError:
    pynvml: Any = None


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory peaks in bytes; None where the device has no such figure."""

    allocated: int | None = None  # tensors on the GPU
    reserved: int | None = None  # what the caching allocator reserved on the GPU for them
    reserved_at_most: int | None = None  # of an estimate: with other kernels of cuDNN
    process: int | None = None  # all of the process on the GPU, as nvidia-smi reports it
    resident: int | None = None  # all of the process, as the operating system reports it
    above_start: int | None = None  # resident beyond that with which training began: tensors

    def __or__(self, other: "MemoryRecord") -> "MemoryRecord":
        """Return the peaks over two phases that run one after the other."""
        a, b = self.known(), other.known()
        return MemoryRecord(**b | {k: max(v, b.get(k, v)) for k, v in a.items()})

    def known(self) -> dict[str, int]:
        """Return the figures that the device has."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @property
    def headline(self) -> int | None:
        """Return the figure to show where only one is shown."""
        return self.resident if self.allocated is None else self.allocated


STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

PROCESS_QUERY_SECONDS = 1.0
"""Seconds between queries of the driver, which take longer than those of torch's allocator."""


class PeakMeter:
    """Measures the peak memory of a device; for the CPU, the resident memory of the process."""

    def __init__(self) -> None:
        self.process_bytes: int | None = None  # on the GPU, as the driver reports them
        self.queried_at = -inf
        self.resets_resident = True

    def start(self, device: torch.device) -> None:
        """Reset the peak."""
        if device.type == "cuda":
            torch.cuda.init()  # an uninitialized GPU has no peak to reset
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:  # "5" resets this process's high-water mark and nothing else (man 5 proc)
            CLEAR_REFS.write_text("5", "utf-8")
        except OSError:  # not Linux, or not permitted
            self.resets_resident = False

    def read(self, device: torch.device) -> MemoryRecord:
        """Return the peak since `start`."""
        if device.type != "cuda":
            return MemoryRecord(resident=read_resident_peak() if self.resets_resident else None)
        now = time.monotonic()
        if now - self.queried_at >= PROCESS_QUERY_SECONDS:
            self.process_bytes, self.queried_at = query_process_bytes(device), now
        return MemoryRecord(
            allocated=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            process=self.process_bytes,
        )


def release_freed_memory() -> None:
    """Give back to the system what earlier runs in this process have freed, where glibc can."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def read_resident_peak() -> int | None:
    """Return the peak of resident memory; None where the system does not report it."""
    peak = next((line for line in read_lines(STATUS) if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) * 1024


def query_process_bytes(device: torch.device) -> int | None:
    """Return the bytes of this process on a GPU with its context, as NVIDIA's bindings know them.

    None: they are not installed, or know nothing; containers may hide the id of a process.
    """
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)


def get_utilization(device: torch.device) -> int | None:
    """Return the percentage of the last sample (up to 1 s) in which a kernel was running."""
    try:
        return torch.cuda.utilization(device)
    except Exception:  # no bindings, or a GPU that the driver does not sample
        return None
