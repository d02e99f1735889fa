"""Predictions for a config: what it costs as it is, and with one thing changed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from unet3d.build.objects import describe, first_line
from unet3d.build.request import Request, composed
from unet3d.build.rungs import decided, higher
from unet3d.build.step import step_maker
from unet3d.machine.device import PRECISIONS, Precision, precision
from unet3d.meter.predict import Prediction, predict
from unet3d.types import Misuse


def forecast(request: Request, volume: Sequence[int] | None = None) -> Prediction:
    """The predicted cost: for CUDA unless trainer.accelerator=cpu, whatever this machine is."""
    cfg = request.config
    describe(cfg)
    cuda = str(cfg.trainer.accelerator) != "cpu"
    used = cuda_precision(cfg) if cuda else precision(cfg.precision, "cpu")
    request = decided(request, used, cuda=cuda)
    return traced(request, used, cuda=cuda, volume=volume)


def traced(
    request: Request, used: Precision, *, cuda: bool, volume: Sequence[int] | None
) -> Prediction:
    """A prediction, or in one line why this network cannot have one."""
    if request.config.compile:
        raise Untraceable(
            "compile=true: what a compiled step takes is not predicted, and the first one takes "
            "minutes; lean blocks run as plain modules, which take more memory"
        )
    try:
        return predict(step_maker(request, used, cuda=cuda, volume=volume), cuda=cuda)
    except Misuse:
        raise
    except Exception as error:  # what a network does may be beyond tensors without values
        raise Untraceable(
            f"a step of this network cannot be traced: {first_line(error)}"
        ) from error


class Untraceable(Misuse):
    """The network looks at values, or is compiled, or cannot take this patch."""


def cuda_precision(cfg: DictConfig) -> Precision:
    """What a GPU does with the precision that is asked for: just that."""
    name = str(cfg.precision)
    if name not in PRECISIONS:
        raise Misuse(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    return Precision(name, name)


def changed(request: Request, *overrides: str) -> Request:
    """The same request as if these overrides had been typed behind its own."""
    return composed([*request.overrides, *overrides], request.verb)


def scaled(patch: Sequence[int], share: float) -> str:
    """A patch of about `share` of each side, in steps of 8 voxels, as an override's value.

    >>> scaled([320, 150, 26], 0.5), scaled([320, 150, 26], 1)
    ('[160,72,16]', '[320,150,26]')
    """
    sides = [n if share == 1 else max(8, round(n * share / 8) * 8) for n in patch]
    return f"[{','.join(map(str, sides))}]"


def step_title(request: Request) -> str:
    """Of a picture of its predicted step."""
    chosen = ", ".join(
        f"{group}={request.choices[group]}"
        for group in ("model", "pool", "checkpointing")
        if group in request.choices
    )
    return f"one training step, predicted: {chosen}, precision={request.config.precision}"


def with_batch(request: Request, batch_size: int) -> Request:
    """The same request with another batch."""
    config = request.config.copy()
    config.data.batch_size = batch_size
    return replace(request, config=config)


def savings(request: Request, now: Prediction) -> list[tuple[str, int]]:
    """(override, bytes that it saves), for the changes that cost no quality, the best first."""
    found = []
    for override in candidates(request):
        try:
            other = forecast(changed(request, override))
        except Misuse:
            continue  # not for this network
        saved = (now.peak.allocated or 0) - (other.peak.allocated or 0)
        if saved > 0:
            found.append((override, saved))
    return sorted(found, key=lambda item: -item[1])


def candidates(request: Request) -> Iterator[str]:
    """Overrides that keep what is learned and may lower the peak."""
    yield from (f"checkpointing={rung}" for rung in higher(request))
    if str(request.config.precision) == "32":
        yield "precision=bf16"
    if request.choices.get("model", "").startswith("forum_"):
        yield f"model={request.choices['model'].replace('forum', 'unet')}"
