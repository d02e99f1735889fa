"""Build the Lightning module: network, loss, metrics, inference, optimizer and schedule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unet3d.checkpoint_file import FORMAT_VERSION
from unet3d.data.dataset import ResolvedDataset, get_network_sizes
from unet3d.data.preprocessing.statistics import summarize_statistics
from unet3d.evaluation.options import build_metrics
from unet3d.inference.sliding_window import SlidingWindow, choose_decision
from unet3d.kernel_cache import set_compiler_caches
from unet3d.loss.adapter import check_loss
from unet3d.machine import Precision
from unet3d.memory.step.config import list_data_values
from unet3d.memory.step.optimizer import find_heads, group_parameters, make_optimizer_factory
from unet3d.metric.case_scores import CaseScores, ValidationHD95
from unet3d.metric.dice import Dice
from unet3d.training.config import TrainConfig
from unet3d.training.cuda_graph import CudaGraphs, RecordedPass
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.module import SegmentationModule
from unet3d.training.schedules import build_scheduler


def build_module(
    settings: TrainConfig,
    precision: Precision,
    network: nn.Module,
    dataset: ResolvedDataset,
    *,
    spacing_mm: Mapping[str, Sequence[float]],
    fraction_done: Callable[[Any], float],
    graphs: CudaGraphs | None,
) -> SegmentationModule:
    """Build the module; `spacing_mm` holds the spacing of each validation case."""
    step = settings.step
    step.checkpointing().apply(network)
    if step.compile:
        set_compiler_caches()
        network.compile()  # in place: names and checkpoints do not change
    loss = step.build_loss()
    check_loss(loss, dataset.num_outputs)
    recorded_pass = None
    if graphs is not None:
        accumulates = step.micro_batches > 1
        recorded_pass = RecordedPass(network, loss, graphs, accumulates=accumulates)
    make_optimizer = make_optimizer_factory(step.optimizer, precision)
    # Refuse what the network or the classes do not take before any volume is read.
    group_parameters(network, step.head_warmup, step.lr_factors)
    example = make_optimizer([nn.Parameter(torch.zeros(1))])
    build_scheduler(settings.scheduler, example, lambda: 0.0)
    metric = Dice(dataset.classes, dataset.regions)
    extra = build_metrics(settings.metrics, dataset.regions)
    return SegmentationModule(
        model=network,
        loss=loss,
        metric=metric,
        validation_hd95=(
            ValidationHD95(metric.scored_classes, spacing_mm) if settings.validate_hd95 else None
        ),
        case_scores=CaseScores(extra, metric.scored_classes, spacing_mm) if extra else None,
        sliding_window=SlidingWindow(
            list(step.data.patch_size),
            decide=choose_decision(dataset.regions, dataset.region_labels),
            overlap=step.windows.overlap,
            batch_size=step.windows.batch_size,
        ),
        optimizer=lambda: make_optimizer(
            group_parameters(network, step.head_warmup, step.lr_factors)
        ),
        scheduler=lambda optimizer, done: build_scheduler(settings.scheduler, optimizer, done),
        fraction_done=fraction_done,
        head_warmup=step.head_warmup,
        heads=find_heads(network) if step.head_warmup else set(),
        max_skipped_steps=settings.max_skipped_steps,
        recorded_pass=recorded_pass,
        unknown_classes=step.data.unknown_classes,
    )


def make_config_record(settings: TrainConfig) -> dict[str, Any]:
    """Return the config from which the network can be built again; the settings are complete."""
    step, resolved = settings.step, settings.resolved
    in_channels, num_outputs = get_network_sizes(step.data)
    model = step.network.bind(in_channels=in_channels, num_outputs=num_outputs).model
    return {
        **resolved,
        "model": {**resolved["model"], **model.arguments},
        "data": {**resolved["data"], **list_data_values(step.data)},
        "loss": dict(step.loss.arguments),
        "checkpointing": dict(step.checkpointing.arguments),
    }


def make_metadata(
    config: dict[str, Any], dataset: ResolvedDataset, data: VolumeDataModule
) -> dict[str, Any]:
    """Return what a checkpoint says about its network and the data that it was trained on."""
    statistics = summarize_statistics([volume.summary.statistics for volume in data.training])
    return {
        "format_version": FORMAT_VERSION,
        "config": config,
        "classes": list(dataset.classes),
        "channels": list(dataset.channels),
        "regions": config["data"]["regions"],
        "region_labels": config["data"]["region_labels"],
        "preprocessing": data.preprocessing.to_dict(),
        "training_statistics": statistics.to_dict(),
        # Of the network's input; None: the augmentation, of a user's class, does not say.
        "mirroring_axes": getattr(data.augment, "mirroring_axes", None),
    }
