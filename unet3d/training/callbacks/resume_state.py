"""The position of a run, saved in every checkpoint, from which training resumes bit for bit.

Lightning's own counters depend on the hook in which a checkpoint was saved; resumed from them, a
run may skip an epoch's validation or train on a batch twice. So they are computed from the
position of the training loader after the last optimizer step.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.lightning_internals import (
    build_fit_loop_state,
    get_logger_step,
    is_optimizer_step,
    is_validation_epoch,
)


def list_numbers(module: LightningModule) -> dict[str, dict[str, float]]:
    """Return the numbers that are attributes of loss, network and their parts, by path and name."""
    parts: dict[str, Any] = {part: getattr(module, part) for part in ("loss", "model")}
    return {
        part: {
            f"{path}.{name}": value if type(value) in (bool, int) else float(value)
            for path, inner in whole.named_modules()
            for name, value in vars(inner).items()
            if isinstance(value, bool | int | float) and name != "training"
        }
        for part, whole in parts.items()
    }


class ResumeState(Callback):
    """Save and restore the position of the training loader, and what follows from it.

    Random numbers within a step, such as dropout's, depend on (seed, epoch, batch, rank) alone. A
    resumed run must have the same `fixed` values, or it would be another experiment.
    """

    def __init__(self, data: VolumeDataModule, limits: StoppingLimits, fixed: Mapping[str, Any]):
        self.data, self.limits, self.fixed = data, limits, fixed
        self.position = {"epoch": 0, "batch": 0}  # of the loader, after the last optimizer step
        self.logged = 0  # steps that loggers have recorded
        self.pending = False  # whether a validation is due before the next batch
        self.ending = False  # whether that is the run's last validation, at a limit
        self.loaded_batch: int | None = None  # of its epoch, at which a resumed run begins
        self.loaded: Mapping[str, Any] = {}  # the state that was saved
        self.accumulation: int | None = None  # that a callback had set, for the next batch
        self.numbers: dict[str, dict[str, float]] = {}  # before callbacks change them
        self.evaluating: list[str] = []  # parts of the network that train as in evaluation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.numbers = list_numbers(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batch, self.loaded_batch = self.loaded_batch, None
        if batch == 0:
            trainer.fit_loop.restarting = False  # the epoch starts from its first batch
        elif batch is not None and self.pending and self.ending:
            trainer.check_val_every_n_epoch = 1
            trainer.val_check_batch = batch  # may be before the epoch's last
        # Callbacks do this as an epoch begins, which a run resumed within it does not do.
        if "frozen" in self.loaded:
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(name not in self.loaded["frozen"])
        for part in self.numbers:
            for name, value in self.loaded.get(part, {}).items():
                path, _, key = name.rpartition(".")
                setattr(getattr(pl_module, part).get_submodule(path), key, value)
        for path in self.loaded.get("evaluating", []):
            pl_module.get_submodule(path).training = False
        if self.loaded.get("clip_norm") is not None:
            trainer.gradient_clip_val = self.loaded["clip_norm"]
        if batch is not None and 0 < batch < len(self.data.train_loader):
            self.accumulation = self.loaded.get("accumulation")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.accumulation is not None:  # not earlier: Lightning's scheduler would refuse it
            trainer.accumulate_grad_batches, self.accumulation = self.accumulation, None
        batches = trainer.current_epoch * len(self.data.train_loader) + batch_idx
        number = batches * trainer.world_size + trainer.global_rank
        seed = hash((self.data.settings.seed, number))
        # torch.manual_seed takes 1 ms: without a GPU it records the stack for a lazy CUDA call.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if is_optimizer_step(trainer):
            self.evaluating = [path for path, m in pl_module.named_modules() if not m.training]
            self.position = self.data.train_loader.state_dict()
            self.logged = get_logger_step(trainer) + 1
            self.ending = trainer.should_stop
            epoch_ends = self.data.train_loader.batch == len(self.data.train_loader) or self.ending
            self.pending = epoch_ends and is_validation_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.pending = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "logged": self.logged,
            "pending": self.pending,
            "ending": self.ending,
            "fixed_settings": self.fixed_settings(),
        }

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        accumulation = trainer.accumulate_grad_batches
        is_set = accumulation != self.data.settings.step.micro_batches
        clip_norm = trainer.gradient_clip_val
        checkpoint["callbacks"][self.state_key] |= {
            "frozen": [name for name, p in pl_module.named_parameters() if not p.requires_grad],
            "accumulation": accumulation if is_set else None,
            "evaluating": self.evaluating,
            **{
                part: {k: value for k, value in now.items() if value != self.numbers[part].get(k)}
                for part, now in list_numbers(pl_module).items()
            },
            "clip_norm": None if clip_norm is None else float(clip_norm),
        }

    def fixed_settings(self) -> dict[str, Any]:
        """Return what a resumed run must share besides its config."""
        order = self.data.train_loader.epoch_sampler
        return {
            "seed": self.data.settings.seed,
            "number of processes": order.world_size,
            "data.batch_size": order.batch_size,
            "patches per epoch": order.samples,
            **self.fixed,
            "cases": self.data.digest_cases(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state, steps = checkpoint["callbacks"][self.state_key], checkpoint["global_step"]
        self.position, self.logged, self.loaded = state["position"], state["logged"], state
        self.ending = state["ending"]
        epoch, batch = self.position["epoch"], self.position["batch"]
        # If the limit has been raised, its last validation is no longer due.
        self.pending = state["pending"] and (not self.ending or self.limits.is_reached(steps))
        if batch == len(self.data.train_loader) and not self.pending:
            epoch, batch = epoch + 1, 0
        self.loaded_batch = batch
        counters = trainer.fit_loop.state_dict()
        counters.update(
            build_fit_loop_state(
                epoch=epoch,
                batch=batch,
                batches_per_epoch=len(self.data.train_loader),
                optimizer_steps=steps,
                logger_step=self.logged - self.pending,
                validation_pending=self.pending,
            )
        )
        checkpoint["loops"] = {"fit_loop": counters}
        # Lightning would restore its own within an epoch, but not between two.
        self.data.train_loader.load_state_dict(self.position)
