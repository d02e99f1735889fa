"""Measure the rows of one part of the GPU report in this process; scripts.gpu.report starts it.

The job is read as JSON from stdin. Each row is appended to a file as soon as it is measured, so a
process that crashes or is killed loses only the row that it was measuring.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

NEEDS_NEW_PROCESS = 75
"""Exit code after a CUDA error, which would make the remaining rows of this process fail too."""

Row = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The device, the folders and the time that a part has."""

    device: torch.device
    tiny: bool  # a rehearsal: everything in its smallest form
    deadline: float  # time.time() at which this process is killed
    scratch: Path
    data: Path  # folder of the datasets

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def remaining_seconds(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.time()

    def free_memory(self) -> None:
        """Free unused tensors, cached blocks and the workspaces of cuBLAS."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.cuda:
            torch.cuda.synchronize()


def is_cuda_error(error: BaseException) -> bool:
    """Whether an error may affect later rows of the same process."""
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return isinstance(error, kinds) or "CUDA" in str(error)


def main() -> int:
    job = json.load(sys.stdin)
    context = Context(
        device=torch.device(job["device"]),
        tiny=job["tiny"],
        deadline=job["deadline"],
        scratch=Path(job["scratch"]),
        data=Path(job["data"]),
    )
    if context.tiny:
        torch.set_num_threads(1)
    events = Path(job["events"])

    def record(**event: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps(event, default=str) + "\n")

    rows: dict[str, Row] = getattr(importlib.import_module(job["module"]), job["part"])(context)
    record(names=list(rows))
    for name, measure in rows.items():
        if name in job["skip"]:
            continue
        if context.remaining_seconds() < job["min_seconds"]:
            break
        record(started=name)
        start = time.perf_counter()
        try:
            value = measure()
            record(name=name, value=value, seconds=round(time.perf_counter() - start, 1))
        except Exception as error:
            traceback.print_exc()
            record(name=name, error=f"{type(error).__name__}: {error}"[:1000])
            if is_cuda_error(error):
                return NEEDS_NEW_PROCESS
        context.free_memory()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # errors of CUDA and of workers at exit must not change the result
