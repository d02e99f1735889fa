"""Where a run is: in every checkpoint, and, once one is loaded, in Lightning's counters.

Lightning's own counters depend on the hook in which a checkpoint was written, and some of what they
lead to is not what would have happened: an epoch's validation left out, a batch trained twice. So a
checkpoint says how far the run is in a few numbers, and the counters are made from these.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from unet3d.data.loading.loaders import TrainLoader
from unet3d.errors import UsageError
from unet3d.lit.callbacks.stopping import StoppingLimits


class ResumeState(Callback):
    """Behind the run are `batch` batches of an epoch; it moves when the optimizer has stepped.

    What a step draws at random, as dropout does, depends on (seed, epoch, batch, rank) alone.
    """

    def __init__(self, feed: TrainLoader, limits: StoppingLimits, *, seed: int):
        self.feed, self.limits, self.seed = feed, limits, seed
        self.epoch = self.batch = 0
        self.logged = 0  # steps that loggers have counted
        self.pending = False  # whether a validation comes before the next batch
        self.ending = False  # as the run's last, at a limit
        self.loaded = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.loaded:
            return
        self.loaded = False
        if not self.pending:
            self.feed.skip(self.batch)
        if self.batch == 0:
            trainer.fit_loop.restarting = False  # an epoch that begins is like any other
        elif self.pending and self.ending:
            trainer.check_val_every_n_epoch = 1
            trainer.val_check_batch = self.batch  # which need not be the epoch's last

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        place = (trainer.current_epoch * len(self.feed) + batch_idx) * trainer.world_size
        seed = hash((self.seed, place + trainer.global_rank))
        # As torch.manual_seed, which on a CPU notes the stack for a GPU that never comes: 1 ms.
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
            loop = trainer.fit_loop.epoch_loop
            self.epoch, self.batch = trainer.current_epoch, batch_idx + 1
            self.logged = loop._batches_that_stepped + 1
            self.ending = trainer.should_stop
            over = self.batch == len(self.feed) or self.ending
            self.pending = over and loop._should_check_val_epoch()

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
            "of": self.fixed_settings(),
        }

    def fixed_settings(self) -> dict[str, int]:
        """What must not change within a run, or a position would mean another one."""
        order = self.feed.order
        return {
            "seed": self.seed,
            "ranks": order.ranks,
            "data.batch_size": order.batch_size,
            "patches per epoch": order.samples,
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"][self.state_key]
        steps = checkpoint["global_step"]
        self.epoch, self.batch, self.ending = state["epoch"], state["batch"], state["ending"]
        self.logged, self.loaded = state["logged"], True
        # A limit that was raised has no last validation any more.
        self.pending = state["pending"] and (not self.ending or self.limits.reached(steps))
        if self.batch == len(self.feed) and not self.pending:
            self.epoch, self.batch = self.epoch + 1, 0
        checkpoint["loops"]["fit_loop"].update(self._counters(steps))

    def _counters(self, steps: int) -> dict[str, Any]:
        begun = self.epoch + (self.batch > 0)
        epoch = _counts(ready=begun, started=begun, processed=self.epoch, completed=self.epoch)
        behind = self.epoch * len(self.feed) + self.batch
        return {
            "epoch_progress": {"total": epoch, "current": dict(epoch)},
            "epoch_loop.batch_progress": {
                "total": _all(behind),
                "current": _all(self.batch),
                "is_last_batch": self.pending,
            },
            "epoch_loop.state_dict": {"_batches_that_stepped": self.logged - self.pending},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": _twice({"ready": steps, "completed": steps}),
                    "zero_grad": _twice({"ready": steps, "started": steps, "completed": steps}),
                }
            },
            "epoch_loop.val_loop.batch_progress": {  # as of one within its first batch, if pending
                "total": _counts(ready=1, started=1) if self.pending else _all(0),
                "current": _all(0),
                "is_last_batch": False,
            },
        }


def is_optimizer_step(trainer: pl.Trainer) -> bool:
    """Whether the batch that ends took an optimizer step, or only gathered gradients."""
    return not trainer.fit_loop._should_accumulate()


def purge_events_after(trainer: pl.Trainer, step: int) -> None:
    """Let TensorBoard not show what a run in this folder logged from a step on."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger._kwargs["purge_step"] = step


def get_logged_steps(position: ResumeState, checkpoint: dict[str, Any], where: Any) -> int:
    """How many steps a checkpoint's run has logged; refuse one of a run that counts otherwise."""
    states = checkpoint.get("callbacks")
    state = states.get(position.state_key) if isinstance(states, dict) else None
    counts, flags = ("epoch", "batch", "logged"), ("pending", "ending")
    known = dict.fromkeys(counts, int) | dict.fromkeys(flags, bool) | {"of": dict}
    if (
        not isinstance(state, dict)
        or any(type(state.get(name)) is not kind for name, kind in known.items())
        or type(checkpoint.get("global_step")) is not int
    ):
        raise UsageError(f"resume={where}: it says nothing of a run to go on with; init= takes it")
    for what, here in position.fixed_settings().items():
        there = state["of"].get(what)
        if there != here:
            raise UsageError(
                f"resume={where}: its run had {what} {there} and this one has {here}, so its "
                "place in the data means nothing here; use init= to begin anew from its weights"
            )
    return state["logged"]


def _counts(
    *, ready: int = 0, started: int = 0, processed: int = 0, completed: int = 0
) -> dict[str, int]:
    return {"ready": ready, "started": started, "processed": processed, "completed": completed}


def _all(n: int) -> dict[str, int]:
    return _counts(ready=n, started=n, processed=n, completed=n)


def _twice(counts: dict[str, int]) -> dict[str, Any]:
    return {"total": counts, "current": dict(counts)}
