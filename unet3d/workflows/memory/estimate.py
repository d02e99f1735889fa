"""Predictions for a config: what it costs as it is, and with one thing changed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from unet3d.config.compose import ComposedConfig, compose_config
from unet3d.config.instantiate import fill_from_dataset, summarize_error
from unet3d.errors import UsageError
from unet3d.machine.device import PRECISIONS, Precision, resolve_precision
from unet3d.memory.estimate import MemoryEstimate, estimate_step
from unet3d.workflows.memory.strategies import list_leaner_strategies, resolve_strategy
from unet3d.workflows.memory.training_step import make_step_factory


def estimate_memory(request: ComposedConfig, volume: Sequence[int] | None = None) -> MemoryEstimate:
    """The predicted cost: for CUDA unless trainer.accelerator=cpu, whatever this machine is."""
    cfg = request.config
    fill_from_dataset(cfg)
    cuda = str(cfg.trainer.accelerator) != "cpu"
    used = parse_cuda_precision(cfg) if cuda else resolve_precision(cfg.precision, "cpu")
    request = resolve_strategy(request, used, cuda=cuda)
    return trace_step(request, used, cuda=cuda, volume=volume)


def trace_step(
    request: ComposedConfig, used: Precision, *, cuda: bool, volume: Sequence[int] | None
) -> MemoryEstimate:
    """A prediction, or in one line why this network cannot have one."""
    if request.config.compile:
        raise UntraceableError(
            "compile=true: what a compiled step takes is not predicted, and the first one takes "
            "minutes; lean blocks run as plain modules, which take more memory"
        )
    try:
        return estimate_step(make_step_factory(request, used, cuda=cuda, volume=volume), cuda=cuda)
    except UsageError:
        raise
    except Exception as error:  # what a network does may be beyond tensors without values
        raise UntraceableError(
            f"a step of this network cannot be traced: {summarize_error(error)}"
        ) from error


class UntraceableError(UsageError):
    """The network looks at values, or is compiled, or cannot take this patch."""


def parse_cuda_precision(cfg: DictConfig) -> Precision:
    """What a GPU does with the precision that is asked for: just that."""
    name = str(cfg.precision)
    if name not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    return Precision(name, name)


def with_overrides(request: ComposedConfig, *overrides: str) -> ComposedConfig:
    """The same request as if these overrides had been typed behind its own."""
    return compose_config([*request.overrides, *overrides], request.verb)


def format_scaled_patch(patch: Sequence[int], share: float) -> str:
    """A patch of about `share` of each side, in steps of 8 voxels, as an override's value.

    >>> format_scaled_patch([320, 150, 26], 0.5), format_scaled_patch([320, 150, 26], 1)
    ('[160,72,16]', '[320,150,26]')
    """
    sides = [n if share == 1 else max(8, round(n * share / 8) * 8) for n in patch]
    return f"[{','.join(map(str, sides))}]"


def make_figure_title(request: ComposedConfig) -> str:
    """Of a picture of its predicted step."""
    chosen = ", ".join(
        f"{group}={request.choices[group]}"
        for group in ("model", "pool", "checkpointing")
        if group in request.choices
    )
    return f"one training step, predicted: {chosen}, precision={request.config.precision}"


def with_batch(request: ComposedConfig, batch_size: int) -> ComposedConfig:
    """The same request with another batch."""
    config = request.config.copy()
    config.data.batch_size = batch_size
    return replace(request, config=config)


def rank_savings(request: ComposedConfig, now: MemoryEstimate) -> list[tuple[str, int]]:
    """(override, bytes that it saves), for the changes that cost no quality, the best first."""
    found = []
    for override in list_saving_overrides(request):
        try:
            other = estimate_memory(with_overrides(request, override))
        except UsageError:
            continue  # not for this network
        saved = (now.peak.allocated or 0) - (other.peak.allocated or 0)
        if saved > 0:
            found.append((override, saved))
    return sorted(found, key=lambda item: -item[1])


def list_saving_overrides(request: ComposedConfig) -> Iterator[str]:
    """Overrides that keep what is learned and may lower the peak."""
    yield from (f"checkpointing={rung}" for rung in list_leaner_strategies(request))
    if str(request.config.precision) == "32":
        yield "precision=bf16"
    if request.choices.get("model", "").startswith("naive_"):
        yield f"model={request.choices['model'].replace('naive', 'unet')}"
