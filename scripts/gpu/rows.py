"""Measure the rows of one part of the GPU report in this process; scripts.gpu.report starts it.

Each row is written to the results as soon as it is measured, so a process that crashes or is killed
loses only the row that it was measuring.
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

from unet3d.files import atomic_write

NEEDS_NEW_PROCESS = 75
"""Exit code after a CUDA error, which would make the remaining rows of this process fail too."""

Row = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The device, the folder and the time that a part has."""

    device: torch.device
    deadline: float  # time.time() at which this process is killed
    scratch: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU; a CPU rehearses everything in its smallest form."""
        return self.device.type == "cuda"

    @property
    def accelerator(self) -> str:
        """Return Lightning's name of the device."""
        return "gpu" if self.cuda else "cpu"

    @property
    def precision(self) -> str:
        """Return mixed fp16 on a GPU; a rehearsal is in float32."""
        return "16" if self.cuda else "32"

    @property
    def width(self) -> int:
        """Return the channels of networks at full resolution."""
        return 64 if self.cuda else 4

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


def read_parts(path: Path) -> dict[str, Any]:
    """Return the parts of a file of results."""
    return json.loads(path.read_text())["parts"]


def write_parts(path: Path, parts: dict[str, Any]) -> None:
    """Replace the parts of a file of results."""
    results = json.loads(path.read_text()) | {"parts": parts}
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(results, indent=1, default=str) + "\n")


def main() -> int:
    job = json.loads(sys.argv[1])
    path, device = Path(job["path"]), torch.device(job["device"])
    context = Context(device=device, deadline=job["deadline"], scratch=Path(job["scratch"]))
    parts = read_parts(path)
    result = parts[job["part"]]
    rows: dict[str, Row] = getattr(importlib.import_module(job["module"]), job["part"])(context)
    if device.type == "cpu":
        torch.set_num_threads(1)
        rows = dict(list(rows.items())[:1])  # a rehearsal
    for name in [name for name in rows if name not in {**result["rows"], **result["failed"]}]:
        if context.remaining_seconds() < job["min_seconds"]:
            return 0
        result["running"] = name
        write_parts(path, parts)
        start = time.perf_counter()
        code = 0
        try:
            row = rows[name]()
            result["rows"][name] = row | {"seconds": round(time.perf_counter() - start, 1)}
            wrong = ", wrong" if row.get("good") is False else ""
            print(f"    {name} ({result['rows'][name]['seconds']} s{wrong})", flush=True)
        except Exception as error:
            traceback.print_exc()
            result["failed"][name] = f"{type(error).__name__}: {error}"[:1000]
            print(f"    {name}: {result['failed'][name][:300]}", flush=True)
            if isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error):
                code = NEEDS_NEW_PROCESS
        del result["running"]
        write_parts(path, parts)
        if code:
            return code
        context.free_memory()
    result["state"] = "failed" if result["failed"] else "done"
    write_parts(path, parts)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # errors of CUDA and of workers at exit must not change the result
