"""Which checkpointing strategies a network supports, and which one `auto` stands for."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.checkpointing.recompute import find_blocks
from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES, Precision, get_available_bytes
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.memory.step.build import build_network
from unet3d.memory.step.config import StepConfig
from unet3d.memory.step.training_step import make_step_factory
from unet3d.types import HasRetention

LARGEST_TILE_MIB = 256
"""Larger tiles launch hardly fewer kernels: most maps are one tile then."""

FUSED_STRATEGIES = ("fused", "skips", "lean", "leanest")


def list_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that the network supports, from the least work to the least memory."""
    with FakeTensorMode():
        model = build_network(config)
    if isinstance(model, HasRetention):
        return FUSED_STRATEGIES
    return ("none", "blocks") if find_blocks(model) else ("none",)


def list_leaner_strategies(config: StepConfig) -> tuple[str, ...]:
    """Return the strategies that need less memory than the configured one."""
    strategies, current = list_strategies(config), config.strategy
    if config.compile:  # compiled, fused blocks run as `none`
        strategies = tuple(name for name in strategies if name not in FUSED_STRATEGIES)
    if current == "none" and "fused" in strategies:
        return strategies
    return strategies[strategies.index(current) + 1 :] if current in strategies else ()


def resolve_fused(config: StepConfig) -> StepConfig:
    """Replace `checkpointing=fused` for a network without fused blocks."""
    if config.strategy != "fused" or "fused" in list_strategies(config):
        return config
    return config.with_strategy("none")


def resolve_strategy(config: StepConfig, precision: Precision, *, cuda: bool) -> StepConfig:
    """Replace `checkpointing=auto`, and `fused` for a network without fused blocks or compiled.

    `auto` becomes the first strategy that is estimated to fit the device, or the leanest if none
    is; on a GPU with room for them, with the largest tiles, which launch the fewest kernels.
    """
    if config.compile and config.strategy in ("auto", *FUSED_STRATEGIES):
        return config.with_strategy("none")  # what the blocks run when compiled
    if config.strategy != "auto":
        return resolve_fused(config)
    strategies = list_strategies(config)
    available = None
    if not cuda or torch.cuda.is_available():
        available = get_available_bytes(torch.device("cuda" if cuda else "cpu"))
    if available is None:
        raise UsageError(
            "checkpointing=auto needs to know the GPU's memory, and this machine has no GPU: use "
            f"checkpointing={', '.join(strategies)} or trainer.accelerator=cpu"
        )
    budget = available - CUDA_CONTEXT_BYTES

    def fits(candidate: StepConfig) -> bool:
        step = make_step_factory(candidate, precision, cuda=cuda)
        return get_device_bytes(estimate_step(step, cuda=cuda, validates=False)) <= budget

    for name in strategies[:-1]:
        candidate = config.with_strategy(name)
        if fits(candidate):
            larger = config.with_strategy(name, tile_mib=LARGEST_TILE_MIB)
            has_room = cuda and name in FUSED_STRATEGIES and fits(larger)
            return larger if has_room else candidate
    return config.with_strategy(strategies[-1])


def get_device_bytes(estimate: MemoryEstimate) -> int:
    """Return what a step takes of the device; on a CPU no caching allocator reserves more."""
    peak = estimate.peak
    return peak.reserved or peak.allocated or 0
