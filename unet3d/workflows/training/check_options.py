"""Build what depends on options alone, and drop it: what they get wrong is said before any work.

A run builds it again once its volumes are preprocessed, which may take hours.
"""

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import UsageError
from unet3d.lit.callbacks.lr import TorchSchedule
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.loss.adapter import check_loss
from unet3d.machine.device import Precision
from unet3d.machine.distributed_env import ProcessRank
from unet3d.metric.dice import Dice
from unet3d.workflows.evaluation.metrics import build_metrics, select_class_metrics
from unet3d.workflows.shared.dataset import ResolvedDataset, build_layout, resolve_dataset
from unet3d.workflows.shared.loss import build_loss
from unet3d.workflows.shared.optimizer import make_optimizer_factory
from unet3d.workflows.training.callbacks import build_configured, build_lr_schedule
from unet3d.workflows.training.trainer import build_trainer


def check_options(
    settings: TrainingSettings, precision: Precision, dataset: ResolvedDataset, folder: Path
) -> None:
    """Refuse options that the classes of a run do not take; the network's are checked elsewhere."""
    settings.checkpointing()
    check_loss(build_loss(settings), dataset.num_outputs)
    optimizer = make_optimizer_factory(settings, precision)([nn.Parameter(torch.zeros(1))])
    check_optimizer(optimizer)
    schedule = build_lr_schedule(settings.scheduler, StoppingLimits())
    if isinstance(schedule, TorchSchedule):
        check_schedule(schedule.make_scheduler(optimizer=optimizer), optimizer)
    facts = {
        "folder": folder / "checkpoints",
        "class_names": dataset.classes,
        "orientation": settings.data.orientation,
        "spacing_mm": {},
    }
    callbacks = build_configured(settings, facts=facts, has_validation=settings.fold is not None)
    known = list_metrics(settings, dataset)
    for factory in (settings.scheduler, *settings.callbacks.values()):
        if "monitor" in factory.arguments:
            check_monitor(f"{factory.key}.monitor", str(factory.arguments["monitor"]), known)
    build_trainer(
        replace(settings, trainer=replace(settings.trainer, sync_batchnorm=False)),
        device="cpu",
        precision=precision,
        callbacks=callbacks,
        folder=folder,
        process=ProcessRank(),
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that divides by 0 where a gradient is 0."""
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.zeros_like(weight)
    optimizer.step(lambda: 0.0)
    if not weight.isfinite().all():
        raise UsageError(
            f"optimizer: a step of {type(optimizer).__name__} with a gradient of 0 makes a weight "
            f"of 0 {weight.item()}: check optimizer.eps, which must be above 0, and optimizer.lr"
        )


def check_schedule(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Refuse a schedule that fails in a step; one of a single step may end there."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    optimizer.step()
    try:
        scheduler.step()
    except ArithmeticError as error:
        raise UsageError(f"scheduler: {type(scheduler).__name__}: {error}") from error
    except ValueError:  # OneCycleLR after its last step
        return


def check_monitor(key: str, name: str, known: Set[str] | None) -> None:
    """Refuse to follow a metric that no validation logs; of other metrics, steps may log any."""
    if known is not None and name not in known and (name.startswith("val/") or "/" not in name):
        raise UsageError(f"{key} must be one of {', '.join(sorted(known))}, got {name!r}")


def check_search_monitor(settings: TrainingSettings, name: str) -> None:
    """Refuse to search with a metric that a trial with these settings does not log."""
    dataset = resolve_dataset(settings.data, build_layout(settings.data).describe())
    check_monitor("monitor", name, list_metrics(settings, dataset))


def list_metrics(settings: TrainingSettings, dataset: ResolvedDataset) -> Set[str] | None:
    """Return the names of what a validation logs: means, and scores of each class.

    None if they are not known, as those of a user's metrics.
    """
    metrics = build_metrics(settings.metrics, dataset.regions)
    of_classes = select_class_metrics(metrics)
    if len(of_classes) < len(metrics) or settings.allow_targets:
        return None
    scores = [
        "dice",
        "iou",
        "hd95_mm",
        *(score for metric in of_classes for score in metric.scores),
    ]
    classes = [f"/{name}" for name in Dice(dataset.classes, dataset.regions).scored_classes]
    ratios = {f"val/volume_ratio{name}" for name in classes}
    return {f"val/{score}{name}" for score in scores for name in ("", *classes)} | ratios
