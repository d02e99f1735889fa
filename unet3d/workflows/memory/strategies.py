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

LADDER = ("none", "skips", "lean", "leanest")


def list_strategies(request: ComposedConfig) -> tuple[str, ...]:
    """From the least work to the least memory."""
    with FakeTensorMode():
        model = build_network(request)
    if isinstance(model, HasRetentionPolicy):
        return LADDER
    return ("none", "blocks") if isinstance(model, HasBlocks) else ("none",)


def list_leaner_strategies(request: ComposedConfig) -> tuple[str, ...]:
    """Those that keep less than the configured one does."""
    known = list_strategies(request)
    chosen = request.choices.get("checkpointing", "none")
    return known[known.index(chosen) + 1 :] if chosen in known else ()


def resolve_auto_strategy(
    request: ComposedConfig, used: Precision, *, cuda: bool
) -> ComposedConfig:
    """The request with the first rung that is predicted to fit the device, if it asks for `auto`.

    The last one, if none of them does.
    """
    if request.choices.get("checkpointing") != "auto":
        return request
    total = None
    if not cuda or torch.cuda.is_available():
        total = get_available_bytes(torch.device("cuda" if cuda else "cpu"))
    known = list_strategies(request)
    if total is None:
        raise UsageError(
            "checkpointing=auto goes by the memory of the GPU, and there is none here: give "
            f"checkpointing={', '.join(known)} or trainer.accelerator=cpu"
        )
    for rung in known[:-1]:
        trial = _on(request, rung)
        if (
            get_device_bytes(estimate_step(make_step_factory(trial, used, cuda=cuda), cuda=cuda))
            + CONTEXT
            <= total
        ):
            return trial
    return _on(request, known[-1])


def get_device_bytes(prediction: MemoryEstimate) -> int:
    """What a step takes from the device: on a CPU there is no cache that reserves more."""
    peak = prediction.peak
    return peak.reserved or peak.allocated or 0


def _on(request: ComposedConfig, rung: str) -> ComposedConfig:
    config = request.config.copy()
    config.checkpointing = OmegaConf.load(get_config_dir() / "checkpointing" / f"{rung}.yaml")
    return replace(request, config=config, choices={**request.choices, "checkpointing": rung})
