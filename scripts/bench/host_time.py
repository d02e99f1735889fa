"""Time what the host does in a training step on CUDA, without a GPU.

    python -m scripts.bench.host_time

The step of `scripts.bench.step model` runs on one core of the CPU, with as many tiles but with
tensors so small that hardly anything is computed. Convolutions return empty memory. Triton compiles
its kernels for an H100; a launch takes Triton's own time, without that of the driver. Networks take
turns. Results are written to benchmarks/<name>-step.json.
"""

import statistics
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from scripts.bench.step import (
    AS_WRITTEN,
    TILE_SIZES_MIB,
    Factory,
    build_cuda_step,
    get_result_path,
    list_forum_networks,
    make_parser,
    update_results,
)
from unet3d.simulated_cuda import simulate_cuda
from unet3d.types import HasRetention
from unet3d.units import MIB
from unet3d.workflows.memory.training_step import NullListener, TrainingStep

LAST = torch.channels_last_3d

SIZE, FULL_SIZE, FULL_WIDTH = [320, 8, 8], [320, 150, 26], 64
STRATEGIES = ("fused", "lean")


class Driver:
    """Stands for Triton's driver of an H100; launching a kernel counts it."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": 232448,
                "multiprocessor_count": 132,
                "warpSize": 32,
            },
            load_binary=lambda *_: (1, 1, 32, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what launches a kernel."""

        def launch(*_: Any) -> None:
            self.launches += 1

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def stub_convolutions() -> torch.library.Library:
    """Let convolutions return empty memory at once, as they do on a GPU."""
    library = torch.library.Library("aten", "IMPL")

    def convolution(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, *_: Any
    ) -> Tensor:
        kernel = weight.shape[2:]
        axes = zip(x.shape[2:], kernel, stride, padding, strict=True)
        size = [(n + 2 * p - k) // s + 1 for n, k, s, p in axes]
        is_last = x.is_contiguous(memory_format=LAST) or weight.is_contiguous(memory_format=LAST)
        format = LAST if is_last else torch.contiguous_format
        return torch.empty((len(x), len(weight), *size), dtype=x.dtype, memory_format=format)

    def convolution_backward(
        g: Tensor, x: Tensor, weight: Tensor, bias: Any, *arguments: Any
    ) -> tuple[Tensor | None, ...]:
        wanted = arguments[-1]
        like = (x, weight, weight[:, 0, 0, 0, 0])
        return tuple(
            torch.empty_like(t) if want else None for t, want in zip(like, wanted, strict=True)
        )

    library.impl("convolution", convolution, "CPU")
    library.impl("convolution_backward", convolution_backward, "CPU")
    return library


def shrink_tiles(make: Factory, tile_mib: int) -> nn.Module:
    """Build a network whose maps have as many tiles as those of full size."""
    model = make()
    if isinstance(model, HasRetention) and model.retention is not None:
        fraction = prod(SIZE) / prod(FULL_SIZE) / FULL_WIDTH * 2  # float32 instead of float16
        tile_bytes = int(tile_mib * MIB * fraction)
        model.retention = replace(model.retention, tile_bytes=tile_bytes)
    return model


def time_host(rounds: int) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of a step's host, relative to plain modules in the same round."""
    from triton.runtime import driver

    mock, library = Driver(), stub_convolutions()
    driver.set_active(cast(Any, mock))
    torch.set_num_threads(1)
    networks = list_forum_networks("small", 1)
    steps: dict[str, TrainingStep] = {}
    rows: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    variants = {AS_WRITTEN: (AS_WRITTEN, 0)}
    variants |= {f"{s}, {mib} MiB": (s, mib) for s in STRATEGIES for mib in TILE_SIZES_MIB}
    with simulate_cuda():
        for name, (strategy, mib) in variants.items():
            torch.manual_seed(0)
            make = partial(shrink_tiles, networks[strategy], mib)
            size = [40, *SIZE[1:]] if name == AS_WRITTEN else SIZE  # it has no tiles
            step = steps[name] = build_cuda_step(make, size, 2, "32")
            for _ in range(3):
                step.train(NullListener())
            mock.launches = 0
            step.train(NullListener())
            rows[name] = {"triton_launches": mock.launches}
        for _ in range(rounds):
            for name, step in steps.items():
                start = time.process_time()
                step.train(NullListener())
                seconds[name].append(time.process_time() - start)
    del library
    for name, row in rows.items():
        pairs = zip(seconds[name], seconds[AS_WRITTEN], strict=True)
        row["host_ms"] = round(1e3 * statistics.median(seconds[name]), 2)
        row["ratio"] = round(statistics.median(own / plain for own, plain in pairs), 2)
    return rows


def main() -> int:
    parser = make_parser("scripts.bench.host_time", __doc__)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = time_host(options.rounds)
    for name, row in rows.items():
        print(f"{name}: {row['host_ms']:.1f} ms, {row['ratio']:.2f}x")
    path = get_result_path(options)
    update_results(path, {"host": rows})
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
