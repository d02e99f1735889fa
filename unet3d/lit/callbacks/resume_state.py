"""The position of a run, saved in every checkpoint, from which training resumes bit for bit.

Lightning's own counters depend on the hook in which a checkpoint was saved; resumed from them, a
run may skip an epoch's validation or train on a batch twice. So a checkpoint holds the position in
a few numbers, and Lightning's counters are computed from these.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from unet3d.data.loading.loaders import TrainLoader
from unet3d.errors import UsageError
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.experiment import find_differences, list_compared
from unet3d.lit.lightning_internals import (
    build_fit_loop_state,
    get_logger_step,
    is_optimizer_step,
    is_validation_epoch,
)
from unet3d.lit.loggers.run_logger import list_run_loggers
from unet3d.lit.state_types import is_count, matches


class ResumeState(Callback):
    """Save and restore the position: `epoch`, and the `batch` batches of it that are done.

    The position advances when the optimizer has stepped. Random numbers within a step, such as
    dropout's, depend on (seed, epoch, batch, rank) alone. A resumed run must have the same `fixed`
    values, or it would be another experiment.
    """

    def __init__(
        self,
        train_loader: TrainLoader,
        limits: StoppingLimits,
        *,
        seed: int,
        fixed: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.train_loader, self.limits, self.seed = train_loader, limits, seed
        self.fixed = fixed
        self.epoch = self.batch = 0
        self.logged = 0  # steps that loggers have recorded
        self.pending = False  # whether a validation is due before the next batch
        self.ending = False  # whether that is the run's last validation, at a limit
        self.loaded = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.loaded:
            return
        self.loaded = False
        if not self.pending:
            self.train_loader.skip_batches(self.batch)
        if self.batch == 0:
            trainer.fit_loop.restarting = False  # the epoch starts from its first batch
        elif self.pending and self.ending:
            trainer.check_val_every_n_epoch = 1
            trainer.val_check_batch = self.batch  # may be before the epoch's last

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batches = trainer.current_epoch * len(self.train_loader) + batch_idx
        seed = hash((self.seed, batches * trainer.world_size + trainer.global_rank))
        # torch.manual_seed takes 1 ms: without a GPU it records the stack for a lazy CUDA call.
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if is_optimizer_step(trainer):
            self.epoch, self.batch = trainer.current_epoch, batch_idx + 1
            self.logged = get_logger_step(trainer) + 1
            self.ending = trainer.should_stop
            epoch_ends = self.batch == len(self.train_loader) or self.ending
            self.pending = epoch_ends and is_validation_epoch(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.pending = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "logged": self.logged,
            "pending": self.pending,
            "ending": self.ending,
            "fixed_settings": self.fixed_settings(),
        }

    def fixed_settings(self) -> dict[str, Any]:
        """Return what a resumed run must share besides its config."""
        order = self.train_loader.epoch_sampler
        return {
            "seed": self.seed,
            "number of processes": order.world_size,
            "data.batch_size": order.batch_size,
            "patches per epoch": order.samples,
            **self.fixed,
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"][self.state_key]
        steps = checkpoint["global_step"]
        self.epoch, self.batch, self.ending = state["epoch"], state["batch"], state["ending"]
        self.logged, self.loaded = state["logged"], True
        # If the limit has been raised, its last validation is no longer due.
        self.pending = state["pending"] and (not self.ending or self.limits.is_reached(steps))
        if self.batch == len(self.train_loader) and not self.pending:
            self.epoch, self.batch = self.epoch + 1, 0
        # Of the loops in the file nothing is used.
        counters = trainer.fit_loop.state_dict()
        counters.update(
            build_fit_loop_state(
                epoch=self.epoch,
                batch=self.batch,
                batches_per_epoch=len(self.train_loader),
                optimizer_steps=steps,
                logger_step=self.logged - self.pending,
                validation_pending=self.pending,
            )
        )
        checkpoint["loops"] = {"fit_loop": counters}


def purge_events_after(trainer: pl.Trainer, step: int) -> None:
    """Drop what earlier runs in this folder logged from `step` on."""
    for logger in list_run_loggers(trainer):
        logger.forget_after(step)


def get_logged_steps(
    position: ResumeState, checkpoint: dict[str, Any], path: Any, now: Mapping[str, Any]
) -> int:
    """Return how many steps a checkpoint's run has logged; refuse one that cannot be resumed.

    `now` is the metadata that this run saves in its checkpoints.
    """
    states = checkpoint.get("callbacks")
    state = states.get(position.state_key) if isinstance(states, dict) else None
    if not _is_complete(state) or not is_count(checkpoint.get("global_step")):
        raise UsageError(
            f"resume={path}: it holds weights but no training state; use init_from= to start a "
            "new run from them"
        )
    metadata = checkpoint.get("unet3d")
    saved = list_compared(metadata if isinstance(metadata, dict) else {}, state["fixed_settings"])
    different = find_differences(saved, list_compared(now, position.fixed_settings()))
    if different:
        it = "it" if len(different) == 1 else "them"
        raise UsageError(
            f"resume={path}: this is another experiment than the one that saved the checkpoint: "
            f"{'; '.join(different)}: set {it} back, or use init_from= to start a new run from its "
            "weights"
        )
    if state["batch"] > len(position.train_loader):
        raise UsageError(
            f"resume={path}: it was saved after batch {state['batch']} of an epoch that has "
            f"{len(position.train_loader)}: use init_from= to start a new run from its weights"
        )
    return state["logged"]


def _is_complete(state: Any) -> TypeGuard[dict[str, Any]]:
    types = {
        **dict.fromkeys(("epoch", "batch", "logged"), int),
        **dict.fromkeys(("pending", "ending"), bool),
        "fixed_settings": dict,
    }
    return (
        isinstance(state, dict)
        and all(matches(state.get(k), t) for k, t in types.items())
        and matches(state["fixed_settings"].get("cases", {}), {str: {str: str}})
    )
