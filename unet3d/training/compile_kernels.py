"""Compile the Triton kernels of a step in parallel, before the first step needs them."""

import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from unet3d.errors import summarize_error
from unet3d.machine import Precision, count_usable_cores, describe_missing_kernels
from unet3d.memory.estimate import list_launches
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import make_step_factory
from unet3d.triton_kernels import compile_kernels

SLOW_SECONDS = 2.0
"""Kernels from Triton's cache are ready sooner."""


def prepare_kernels(
    config: StepConfig,
    precision: Precision,
    device: torch.device,
    network: nn.Module,
    log: Callable[[str], None],
) -> None:
    """Compile what is not in Triton's cache; say how long it took.

    A network that fake tensors cannot follow compiles its kernels when it launches them.
    """
    has_kernels = device.type == "cuda" and describe_missing_kernels(device.type) is None
    if not has_kernels or config.compile or find_spec("triton") is None:
        return
    started = time.monotonic()
    try:
        launches = list_launches(make_step_factory(config, precision, cuda=True, network=network))
    except Exception as error:
        log(f"GPU kernels are compiled in the first step: {summarize_error(error)}")
        return
    if not launches:
        return
    log("preparing GPU kernels")
    count = compile_kernels(launches, device, threads=count_usable_cores())
    seconds = time.monotonic() - started
    if seconds >= SLOW_SECONDS:
        log(f"compiled {count} GPU kernels in {seconds:.0f} s; the next run finds them in a cache")
