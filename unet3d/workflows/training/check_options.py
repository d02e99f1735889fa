"""Build what depends on options alone, and drop it: what they get wrong is said before any work.

A run builds it again once its volumes are preprocessed, which may take hours.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from unet3d.config.settings.training import TrainingSettings
from unet3d.lit.callbacks.lr import TorchSchedule
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.loss.adapter import check_loss
from unet3d.machine.device import Precision
from unet3d.machine.distributed_env import ProcessRank
from unet3d.workflows.evaluation.metrics import build_metrics
from unet3d.workflows.shared.dataset import ResolvedDataset
from unet3d.workflows.shared.loss import build_loss
from unet3d.workflows.shared.optimizer import make_optimizer_factory
from unet3d.workflows.training.callbacks import build_configured, build_lr_schedule
from unet3d.workflows.training.trainer import build_trainer


def check_options(
    settings: TrainingSettings, precision: Precision, dataset: ResolvedDataset, folder: Path
) -> None:
    """Refuse options that the classes of a run do not take; the network's are checked elsewhere."""
    check_loss(build_loss(settings), dataset.num_outputs)
    build_metrics(settings.metrics, dataset.regions)
    optimizer = make_optimizer_factory(settings, precision)([nn.Parameter(torch.zeros(1))])
    schedule = build_lr_schedule(settings.scheduler, StoppingLimits())
    if isinstance(schedule, TorchSchedule):
        schedule.make_scheduler(optimizer=optimizer)
    facts = {
        "folder": folder / "checkpoints",
        "class_names": dataset.classes,
        "orientation": settings.data.orientation,
        "spacing_mm": {},
    }
    callbacks = build_configured(settings, facts=facts, has_validation=settings.fold is not None)
    build_trainer(
        replace(settings, trainer=replace(settings.trainer, sync_batchnorm=False)),
        device="cpu",
        precision=precision,
        callbacks=callbacks,
        folder=folder,
        process=ProcessRank(),
    )
