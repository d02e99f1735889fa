"""The strategies that a network takes, and which of them `checkpointing=auto` stands for."""

from dataclasses import replace

import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.config.compose import ComposedConfig, get_config_dir
from unet3d.config.instantiate import build_network
from unet3d.errors import UsageError
from unet3d.machine.device import Precision
from unet3d.machine.memory import get_available_bytes
from unet3d.memory.batch_search import CONTEXT
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.types import HasBlocks, HasRetentionPolicy
from unet3d.workflows.memory.training_step import make_step_factory

LEAN_STRATEGIES = ("fused", "skips", "lean", "leanest")


def list_strategies(request: ComposedConfig) -> tuple[str, ...]:
    """From the least work to the least memory."""
    with FakeTensorMode():
        model = build_network(request)
    if isinstance(model, HasRetentionPolicy):
        return LEAN_STRATEGIES
    return ("none", "blocks") if isinstance(model, HasBlocks) else ("none",)


def list_leaner_strategies(request: ComposedConfig) -> tuple[str, ...]:
    """Those that keep less than the configured one does."""
    known = list_strategies(request)
    chosen = request.choices.get("checkpointing", "fused")
    return known[known.index(chosen) + 1 :] if chosen in known else ()


def resolve_strategy(request: ComposedConfig, used: Precision, *, cuda: bool) -> ComposedConfig:
    """Replace `checkpointing=auto`, and `fused` for a network without fused blocks.

    `auto` becomes the first strategy that is predicted to fit the device, or the leanest if none is.
    """
    chosen = request.choices.get("checkpointing", "fused")
    if chosen not in ("auto", "fused"):
        return request
    known = list_strategies(request)
    if chosen == "fused":
        return request if "fused" in known else _with_strategy(request, "none")
    total = None
    if not cuda or torch.cuda.is_available():
        total = get_available_bytes(torch.device("cuda" if cuda else "cpu"))
    if total is None:
        raise UsageError(
            "checkpointing=auto needs to know the GPU's memory, and this machine has no GPU: use "
            f"checkpointing={', '.join(known)} or trainer.accelerator=cpu"
        )
    for strategy in known[:-1]:
        trial = _with_strategy(request, strategy)
        estimate = estimate_step(make_step_factory(trial, used, cuda=cuda), cuda=cuda)
        if get_device_bytes(estimate) + CONTEXT <= total:
            return trial
    return _with_strategy(request, known[-1])


def get_device_bytes(estimate: MemoryEstimate) -> int:
    """Return what a step takes of the device; a CPU has no caching allocator that reserves more."""
    peak = estimate.peak
    return peak.reserved or peak.allocated or 0


def _with_strategy(request: ComposedConfig, strategy: str) -> ComposedConfig:
    config = request.config.copy()
    config.checkpointing = OmegaConf.load(get_config_dir() / "checkpointing" / f"{strategy}.yaml")
    return replace(request, config=config, choices={**request.choices, "checkpointing": strategy})
