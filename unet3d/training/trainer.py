"""Build Lightning's trainer."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from unet3d.errors import UsageError, summarize_error
from unet3d.machine import Precision, ProcessRank, resolve_device
from unet3d.model.half_precision import cast_to_half
from unet3d.training.callbacks.progress import ProgressBar
from unet3d.training.checkpoints import AtomicCheckpointIO
from unet3d.training.config import TrainConfig
from unet3d.training.distributed import choose_environment
from unet3d.training.lightning_internals import get_half_dtype


class TrueHalfPrecision(HalfPrecision):
    """Keep weights and activations in half precision; batch and instance norms stay in float32."""

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return cast_to_half(module, get_half_dtype(self))


def build_trainer(
    settings: TrainConfig,
    precision: Precision,
    callbacks: list[pl.Callback],
    *,
    device: torch.device,
    folder: Path,
    process: ProcessRank,
) -> pl.Trainer:
    """Build the trainer; limits of steps and time are enforced by a callback: StoppingLimits."""
    silence_lightning()
    trainer = settings.trainer
    plugins: list[Any] = [AtomicCheckpointIO(), choose_environment(process, trainer.launch)]
    arguments: dict[str, Any] = {"sync_batchnorm": False}
    if precision.used in ("16-true", "bf16-true"):
        plugins.append(TrueHalfPrecision(precision.used))
    else:
        arguments["precision"] = precision.lightning
    if process.world_size > 1:
        # Of the devices, Lightning takes that of this process. The process group exists already.
        devices = [device] * process.local_world_size
        arguments |= {
            "strategy": DDPStrategy(parallel_devices=devices, gradient_as_bucket_view=True),
            "num_nodes": process.world_size // process.local_world_size,
            "sync_batchnorm": trainer.sync_batchnorm,
        }
    loggers = [logger(save_dir=folder) for logger in settings.loggers.values()]
    try:
        return trainer.factory(
            accelerator=device.type,
            devices=[device.index] if device.type == "cuda" else 1,
            max_epochs=-1 if trainer.max_epochs is None else trainer.max_epochs,
            max_steps=-1,
            max_time=None,
            callbacks=callbacks,
            logger=loggers,
            plugins=plugins,
            default_root_dir=folder,
            enable_model_summary=False,
            enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
            use_distributed_sampler=False,
            **arguments,
        )
    except MisconfigurationException as error:
        raise UsageError(f"trainer: {summarize_error(error)}") from error


def seed_run(settings: TrainConfig) -> None:
    """Seed the run, and allow or forbid a GPU to round the factors of float32 products to TF32."""
    pl.seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32


def find_device(settings: TrainConfig, process: ProcessRank) -> torch.device:
    """Return the device on which a process trains; it becomes the process's GPU."""
    kind = resolve_device(settings.step.accelerator)
    if kind != "cuda":
        return torch.device(kind)
    num_gpus = torch.cuda.device_count()
    if process.world_size > 1 and num_gpus > 1:  # SLURM's --gpus-per-task shows each process one
        if num_gpus < process.local_world_size:
            raise UsageError(
                f"{process.local_world_size} processes on this machine, but rank {process.rank} "
                f"sees {num_gpus} GPUs: start one process per GPU"
            )
        torch.cuda.set_device(process.local_rank)
    return torch.device(kind, torch.cuda.current_device())


def silence_lightning() -> None:
    """Silence all messages of Lightning except warnings that a user can act on."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers.*",  # data.num_workers sets their number
        r".*isinstance\(treespec, LeafSpec\).*",  # caused by Lightning itself, with torch >= 2.13
        r".*The number of training batches .* is smaller than the logging interval.*",
        r".*have no `val_dataloader`.*",  # fold=none
        r".*exists and is not empty.*",  # a resumed run continues in its folder
        r".*`IterableDataset` has `__len__` defined.*",
        r".*GPU available but not used.*",  # trainer.accelerator=cpu asks for it
        r".*The `srun` command is available on your system but is not used.*",  # see trainer.launch
        r".*call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped first step
        r".*It is recommended to use `self.log\(.*sync_dist=True.*",  # all ranks are combined
    ):
        warnings.filterwarnings("ignore", message)
