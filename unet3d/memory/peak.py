"""The peak memory between `start` and `read`: reset each time, never the lifetime's."""

from pathlib import Path

import torch

from unet3d import nvml
from unet3d.memory.record import MemoryRecord

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
                process=nvml.process_bytes(device),
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
