"""The strategies that a network takes, and which of them `checkpointing=auto` stands for."""

from dataclasses import replace

import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.build.objects import network
from unet3d.build.request import Request, conf_folder
from unet3d.build.step import step_maker
from unet3d.machine.device import Precision
from unet3d.machine.memory import available_bytes
from unet3d.meter.fit import CONTEXT
from unet3d.meter.predict import Prediction, predict
from unet3d.types import HasBlocks, KeepsByLevel, Misuse

LADDER = ("none", "skips", "lean", "leanest")


def rungs(request: Request) -> tuple[str, ...]:
    """From the least work to the least memory."""
    with FakeTensorMode():
        model = network(request)
    if isinstance(model, KeepsByLevel):
        return LADDER
    return ("none", "blocks") if isinstance(model, HasBlocks) else ("none",)


def higher(request: Request) -> tuple[str, ...]:
    """Those that keep less than the configured one does."""
    known = rungs(request)
    chosen = request.choices.get("checkpointing", "none")
    return known[known.index(chosen) + 1 :] if chosen in known else ()


def decided(request: Request, used: Precision, *, cuda: bool) -> Request:
    """The request with the first rung that is predicted to fit the device, if it asks for `auto`.

    The last one, if none of them does.
    """
    if request.choices.get("checkpointing") != "auto":
        return request
    total = None
    if not cuda or torch.cuda.is_available():
        total = available_bytes(torch.device("cuda" if cuda else "cpu"))
    known = rungs(request)
    if total is None:
        raise Misuse(
            "checkpointing=auto goes by the memory of the GPU, and there is none here: give "
            f"checkpointing={', '.join(known)} or trainer.accelerator=cpu"
        )
    for rung in known[:-1]:
        trial = _on(request, rung)
        if taken(predict(step_maker(trial, used, cuda=cuda), cuda=cuda)) + CONTEXT <= total:
            return trial
    return _on(request, known[-1])


def taken(prediction: Prediction) -> int:
    """What a step takes from the device: on a CPU there is no cache that reserves more."""
    peak = prediction.peak
    return peak.reserved or peak.allocated or 0


def _on(request: Request, rung: str) -> Request:
    config = request.config.copy()
    config.checkpointing = OmegaConf.load(conf_folder() / "checkpointing" / f"{rung}.yaml")
    return replace(request, config=config, choices={**request.choices, "checkpointing": rung})
