"""The rows of one part of the GPU's report, measured in this process: started by gpu_report.py.

What to do comes as JSON on stdin. Each row that is found is appended to a file at once, so that a
process that dies or is killed loses the row that was under way and no other.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

AGAIN = 75
"""Exit code: the rows that are left want a fresh process, since an error of CUDA stays."""

Row = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Where:
    """On what a part is measured, and with what."""

    device: torch.device
    tiny: bool  # a rehearsal: everything in its smallest form
    until: float  # the clock's time at which the process will be ended
    scratch: Path
    data: Path  # where data sets lie

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that there still are."""
        return self.until - time.time()

    def clean(self) -> None:
        """As in a new process: no tensor, no cache, no workspace of cuBLAS."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.cuda:
            torch.cuda.synchronize()


def spoilt(error: BaseException) -> bool:
    """Whether a process had better be left after this."""
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return isinstance(error, kinds) or "CUDA" in str(error)


def main() -> int:
    order = json.load(sys.stdin)
    where = Where(
        device=torch.device(order["device"]),
        tiny=order["tiny"],
        until=order["until"],
        scratch=Path(order["scratch"]),
        data=Path(order["data"]),
    )
    if where.tiny:
        torch.set_num_threads(1)
    told = Path(order["told"])

    def tell(**what: Any) -> None:
        with told.open("a") as file:
            file.write(json.dumps(what, default=str) + "\n")

    rows: dict[str, Row] = getattr(importlib.import_module(order["module"]), order["part"])(where)
    tell(names=list(rows))
    for name, row in rows.items():
        if name in order["skip"]:
            continue
        if where.left() < order["least"]:
            break
        tell(begun=name)
        begun = time.perf_counter()
        try:
            value = row()
            tell(name=name, value=value, seconds=round(time.perf_counter() - begun, 1))
        except Exception as error:
            traceback.print_exc()
            tell(name=name, error=f"{type(error).__name__}: {error}"[:1000])
            if spoilt(error):
                return AGAIN
        where.clean()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what CUDA and workers do at the end must not change what was measured
