"""Build Lightning's trainer and its callbacks: RunCallbacks says in which order a step runs."""

import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from unet3d.errors import UsageError
from unet3d.machine import TRUE_HALF_TYPES, Precision
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.report import make_figure_title
from unet3d.model.weights import cast_to_half
from unet3d.report.comparison import KEYS_WITHOUT_EFFECT
from unet3d.signals import SignalListener
from unet3d.training.callbacks.checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
)
from unet3d.training.callbacks.dashboard import RunLogger
from unet3d.training.callbacks.progress import ProgressBar, ProgressLines
from unet3d.training.callbacks.resume_state import ResumeState
from unet3d.training.callbacks.step_records import Curves, StepMemory, StepTimer
from unet3d.training.callbacks.stopping import EarlyStopping, Preemption, StoppingLimits
from unet3d.training.callbacks.training_warnings import TrainingWarnings, suggest_overrides
from unet3d.training.callbacks.weight_averaging import WeightAveraging
from unet3d.training.config import TrainConfig, list_choices
from unet3d.training.datamodule import Prefetch, VolumeDataModule
from unet3d.training.distributed import CudaGraphStrategy, choose_environment
from unet3d.training.module import SegmentationModule
from unet3d.types import LIGHTNING_PRECISIONS


class RunCallbacks:
    """All callbacks, `ordered` as Lightning calls them; those that other code reads have names.

    In each hook Lightning calls the callbacks in this order, those that save checkpoints at the
    end, and then the module. An optimizer step is:

    1. on_train_batch_start: the meters start, random numbers are seeded, and last.ckpt is saved if
       it is due, with the state after the step before.
    2. forward (training_step): the loss is read from the device, with all that ranks agree on and
       whether the last gradients were finite: the only time that the host waits for the device.
       A batch with a loss that is not finite skips the step.
    3. backward. With accumulated gradients, 4 and 5 follow the last batch alone.
    4. on_before_optimizer_step, configure_gradient_clipping: the head warmup drops gradients, then
       all are checked and clipped.
    5. optimizer_step: the weights change, gradients are freed, the moving average follows; then
       the schedule sets the next learning rate.
    6. on_train_batch_end: the next batch is fetched while a GPU still computes; then the callbacks
       record the step (memory, time, curves), decide whether it was the last (limits), note the
       position from which a run resumes (resume_state, which reads that decision), and save and
       exit if a signal asks for it (Preemption, which saves that position).
    7. The step is logged; a validation follows where one is due. Its scores are recorded before
       early stopping and best.ckpt use them.
    """

    def __init__(
        self,
        data: VolumeDataModule,
        precision: Precision,
        module: SegmentationModule,
        limits: StoppingLimits,
        *,
        config: dict[str, Any],
        folder: Path,
        signals: SignalListener | None,
    ):
        settings, step = data.settings, data.settings.step
        self.limits, bar = limits, settings.trainer.show_progress_bar
        graphed_pass = module.step.graphed_pass
        self.memory = StepMemory({} if graphed_pass is None else graphed_pass.peaks)
        self.timing = StepTimer()
        self.dashboard = RunLogger(
            config,
            select_hparams(settings, config),
            make_figure_title(step),
            list(module.metric.scored_classes),
        )
        self.curves = Curves()
        suggest = partial(suggest_overrides, settings)
        self.training_warnings = TrainingWarnings(limits, self.curves.loss, suggest)
        # With equal tiles, strategies of fused blocks give equal steps; so do the plain ones.
        is_plain = getattr(module.model, "retention", None) is None
        fixed = {
            "head_warmup": step.head_warmup,
            "lr_factors": dict(step.lr_factors),
            "ema_decay": step.ema_decay,
            "kind of device": data.device.type,
            "precision in use": precision.used,
            "blocks of the network": "plain" if is_plain else "fused",
        }
        self.resume_state = ResumeState(data, limits, fixed)
        self.last = LastCheckpoint(
            folder / "checkpoints", limits.ranks, settings.save_every_seconds
        )
        shows_bar = sys.stdout.isatty() if bar == "auto" else bar
        self.ordered: list[Callback] = [
            *([Prefetch()] if data.device.type == "cuda" else []),
            *([] if step.ema_decay is None else [WeightAveraging(step.ema_decay)]),
            self.memory,
            self.timing,
            self.dashboard,
            self.curves,
            self.training_warnings,
            limits,
            self.resume_state,
            # Before others end: Lightning's EMAWeightAveraging puts its average into the network.
            LambdaCallback(on_train_end=lambda trainer, _: self.last.save(trainer)),
            *build_configured(data.settings),
            *([] if signals is None else [Preemption(signals, limits.ranks, self.last.save)]),
            (ProgressBar if shows_bar else ProgressLines)(limits),
            self.last,
        ]

    def set_estimate(self, estimate: MemoryEstimate | None) -> None:
        """Show the estimate of a step beside what is measured."""
        self.memory.estimated = None if estimate is None else estimate.peak
        self.dashboard.estimate = estimate


def build_configured(settings: TrainConfig) -> list[Callback]:
    """Build the callbacks of the config group; without validation there is no best checkpoint."""
    built = []
    for name, factory in settings.callbacks.items():
        callback = factory()
        if isinstance(callback, StochasticWeightAveraging):
            raise UsageError(f"callbacks.{name} averages after best.ckpt is chosen: use ema_decay=")
        if settings.fold is None and isinstance(callback, EarlyStopping):
            raise UsageError(f"callbacks.{name} needs validation cases, fold=none has none")
        if settings.fold is not None or not isinstance(callback, BestCheckpoint):
            built.append(callback)
    return built


def select_hparams(settings: TrainConfig, config: dict[str, Any]) -> dict[str, str | int | float]:
    """Return the main options, and what else the command line sets, for TensorBoard's HParams.

    Few, since TensorBoard shows only the first columns until more are ticked.
    """
    choices, overrides = list_choices(settings), settings.composition.overrides
    main = ("model", "pool", "checkpointing")
    hparams: dict[str, Any] = {key: choices[key] for key in main if key in choices}
    for key in sorted(o.lstrip("+~").partition("=")[0] for o in overrides):
        value: Any = choices.get(key, config)
        for part in key.split(".") if value is config else ():
            value = value.get(part) if isinstance(value, dict) else None
        if key not in KEYS_WITHOUT_EFFECT and value is not None:
            hparams[key] = value if isinstance(value, int | float) else str(value)
    return hparams | {"precision": settings.step.precision}


class TrueHalfPrecision(HalfPrecision):
    """Keep weights and activations in half precision; batch and instance norms stay in float32."""

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return cast_to_half(module, TRUE_HALF_TYPES[self.precision])


def build_trainer(
    data: VolumeDataModule,
    precision: Precision,
    callbacks: list[Callback],
    folder: Path,
    *,
    uses_graphs: bool,
) -> pl.Trainer:
    """Build the trainer; limits of steps and time are enforced by a callback: StoppingLimits."""
    silence_lightning()
    trainer, device, process = data.settings.trainer, data.device, data.process
    plugins: list[Any] = [AtomicCheckpointIO(), choose_environment(process, trainer.launch)]
    arguments: dict[str, Any] = {"sync_batchnorm": False}
    if precision.used in ("16-true", "bf16-true"):
        plugins.append(TrueHalfPrecision(precision.used))
    else:
        arguments["precision"] = LIGHTNING_PRECISIONS[precision.used]
    if trainer.check_val_every_n_epoch == "auto":
        arguments["check_val_every_n_epoch"] = 1  # until the sizes of the volumes are known
    if process.world_size > 1:
        # Lightning uses the device of this process only. The process group exists already.
        devices = [device] * process.local_world_size
        make_ddp = partial(DDPStrategy, gradient_as_bucket_view=True)
        make_strategy = CudaGraphStrategy if uses_graphs else make_ddp
        arguments |= {
            "strategy": make_strategy(parallel_devices=devices),
            "num_nodes": process.world_size // process.local_world_size,
            "sync_batchnorm": trainer.sync_batchnorm,
        }
    return trainer.factory(
        accelerator=device.type,
        devices=[device.index] if device.type == "cuda" else 1,
        max_epochs=-1 if trainer.max_epochs is None else trainer.max_epochs,
        max_steps=-1,
        max_time=None,
        callbacks=callbacks,
        logger=[logger(save_dir=folder) for logger in data.settings.loggers.values()],
        plugins=plugins,
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        use_distributed_sampler=False,
        **arguments,
    )


def seed_run(settings: TrainConfig) -> None:
    """Seed the run, and allow or forbid a GPU to round the factors of float32 products to TF32."""
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32


def silence_lightning() -> None:
    """Silence all messages of Lightning except warnings that a user can act on."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    for message in (
        r".*isinstance\(treespec, LeafSpec\).*",  # caused by Lightning itself, with torch >= 2.13
        r".*exists and is not empty.*",  # a resumed run continues in its folder
        r".*call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped first step
    ):
        warnings.filterwarnings("ignore", message)
