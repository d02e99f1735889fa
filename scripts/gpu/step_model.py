"""Model the time of a training step on a GPU from its operations: a roofline.

    python -m scripts.gpu.step_model OVERRIDES [--gpu h100]    prints JSON

An operation takes the GPU the longest of three times: that of its floating-point operations at the
rate that convolutions reach, that of its bytes at the memory's bandwidth, and that of an empty
kernel. Operations run one after another. Meanwhile the host launches them; the longer of both times
is that of the step. Caches, clocks that fall under load and waiting for data are not modeled.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.gpu.operations import Operation, count_operations
from unet3d.config.compose import compose_config
from unet3d.machine import Precision
from unet3d.memory.fit import resolve_strategy
from unet3d.memory.traced_step import make_step_factory
from unet3d.training.config import parse_train_config

ACHIEVED_BANDWIDTH = 0.8
"""Fraction of the memory bandwidth that a kernel which only copies reaches."""


@dataclass(frozen=True)
class GpuSpec:
    """Peak rates of a GPU without sparsity, and what convolutions reach of them."""

    name: str
    half_tflops: float  # float16 or bfloat16 with sums in float32
    tf32_tflops: float  # equal to float32 where the GPU has no TF32
    float32_tflops: float
    bandwidth_tb: float  # TB/s of its memory
    conv_efficiency: float  # fraction of the peak rate that convolutions reach
    kernel_us: float  # the least time of a kernel


# fmt: off
GPUS = {  # half, TF32, float32 TFLOP/s; TB/s; efficiency of convolutions; us
    "h200": GpuSpec("NVIDIA H200", 989, 495, 67, 4.8, 0.475, 2.0),
    "h100": GpuSpec("NVIDIA H100 SXM", 989, 495, 67, 3.35, 0.475, 2.0),
    "a100": GpuSpec("NVIDIA A100 80 GB", 312, 156, 19.5, 2.04, 0.575, 2.3),
    "v100": GpuSpec("NVIDIA V100", 125, 15.7, 15.7, 0.9, 0.575, 2.3),
    "t4": GpuSpec("NVIDIA T4", 65, 8.1, 8.1, 0.32, 0.5, 2.3),
    "rtx4090": GpuSpec("NVIDIA GeForce RTX 4090", 165, 82.6, 82.6, 1.01, 0.675, 2.0),
    "rtx3090": GpuSpec("NVIDIA GeForce RTX 3090", 71, 35.6, 35.6, 0.94, 0.675, 2.0),
}
# fmt: on
"""By the name that users type."""

TRITON_LAUNCH_US, TORCH_LAUNCH_US = 55.0, 18.0
"""Microseconds of the host per launch of Triton and of torch, with all of the Python around it.

They were measured on one core of an AMD EPYC.
"""


def model_step_time(operations: Sequence[Operation], gpu: GpuSpec, *, tf32: bool) -> dict[str, Any]:
    """Model the time of these operations on a GPU."""
    gpu_ms = sum(compute_gpu_ms(o, gpu, tf32) for o in operations)
    host_ms = sum(compute_host_ms(o) for o in operations)
    return {
        "gpu": gpu.name,
        "launches": sum(o.launches for o in operations),
        "flops": sum(o.flops for o in operations),  # of convolutions and matrix products
        "bytes": sum(o.nbytes for o in operations),  # that kernels read and write
        "gpu_ms": gpu_ms,
        "host_ms": host_ms,
        "step_ms": max(gpu_ms, host_ms),
    }


def compute_gpu_ms(operation: Operation, gpu: GpuSpec, tf32: bool) -> float:
    """Return the milliseconds that an operation takes the GPU."""
    if not operation.launches:
        return 0.0
    tflops = gpu.tf32_tflops if tf32 else gpu.float32_tflops
    if operation.dtype in (torch.float16, torch.bfloat16):
        tflops = gpu.half_tflops
    seconds = max(
        operation.flops / (tflops * 1e12 * gpu.conv_efficiency),
        operation.nbytes / (gpu.bandwidth_tb * 1e12 * ACHIEVED_BANDWIDTH),
        gpu.kernel_us * 1e-6,
    )
    return 1e3 * (seconds + (operation.launches - 1) * gpu.kernel_us * 1e-6)


def compute_host_ms(operation: Operation) -> float:
    """Return the milliseconds that an operation takes the host."""
    is_triton = operation.name.startswith("unet3d::")
    return operation.launches * (TRITON_LAUNCH_US if is_triton else TORCH_LAUNCH_US) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the model of a step as JSON."""
    parser = argparse.ArgumentParser(description="Model the time of a training step on a GPU.")
    parser.add_argument("overrides", nargs="*", help="settings of `unet3d train`")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    options = parser.parse_args(arguments)
    settings = parse_train_config(compose_config(options.overrides, "train"))
    precision = Precision(settings.step.precision, settings.step.precision)
    step = resolve_strategy(settings.step, precision, cuda=True)
    operations = count_operations(make_step_factory(step, precision, cuda=True))
    print(json.dumps(model_step_time(operations, GPUS[options.gpu], tf32=settings.tf32)))


if __name__ == "__main__":
    main()
