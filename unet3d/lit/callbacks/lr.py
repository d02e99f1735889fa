"""Callbacks that apply a learning-rate schedule."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unet3d.errors import RunError
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.lightning_internals import is_optimizer_step
from unet3d.lit.lr_schedule import Schedule
from unet3d.lit.step_values import log_values
from unet3d.lit.validation_metric import ValidationMetric


class LRSchedule(Callback):
    """Set the learning rate at the start of each optimizer step."""

    def __init__(self, schedule: Schedule, limits: StoppingLimits):
        self.schedule, self.limits = schedule, limits

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        done = self.limits.fraction_done(trainer)
        factor = self.schedule(done)
        for optimizer in trainer.optimizers:
            rates = [group["initial_lr"] * factor for group in optimizer.param_groups]
            set_rates(optimizer, rates, done)
        lr = trainer.optimizers[0].param_groups[0]["initial_lr"] * factor
        log_values(pl_module, {"train/lr": lr})


class TorchSchedule(Callback):
    """Apply a scheduler of torch, which steps after each optimizer step.

    A ReduceLROnPlateau steps after each validation, by its attribute `monitor` or val/dice.
    """

    def __init__(self, make_scheduler: Callable[..., LRScheduler], limits: StoppingLimits):
        self.make_scheduler, self.limits = make_scheduler, limits
        self.scheduler: LRScheduler | None = None
        self.loaded: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scheduler = self.make_scheduler(optimizer=trainer.optimizers[0])
        if self.loaded:
            self.scheduler.load_state_dict(self.loaded)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        rates = [float(rate) for rate in self._get().get_last_lr()]
        set_rates(trainer.optimizers[0], rates, self.limits.fraction_done(trainer))
        log_values(pl_module, {"train/lr": rates[0]})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        scheduler = self._get()
        if not isinstance(scheduler, ReduceLROnPlateau) and is_optimizer_step(trainer):
            self._step(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        scheduler = self._get()
        if not isinstance(scheduler, ReduceLROnPlateau) or trainer.sanity_checking:
            return
        metric = ValidationMetric(getattr(scheduler, "monitor", "val/dice"), scheduler.mode)
        self._step(trainer, metric.read(trainer))

    def _get(self) -> LRScheduler:
        assert self.scheduler is not None  # from on_fit_start on
        return self.scheduler

    def _step(self, trainer: pl.Trainer, *metric: float) -> None:
        """Let the scheduler step from the rates that it has set, which may be used in part."""
        scheduler: Any = self._get()
        rates = scheduler.get_last_lr()
        for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
            set_rate(group, float(rate))
        try:
            scheduler.step(*metric)
        except ValueError as error:  # OneCycleLR after its last step
            raise RunError(f"scheduler: {error}") from error
        rates = map(float, scheduler.get_last_lr())
        set_rates(trainer.optimizers[0], rates, self.limits.fraction_done(trainer))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def set_rates(optimizer: Optimizer, rates: Iterable[float], done: float) -> None:
    """Set every group's learning rate to its rate times its factor, or to 0 until it starts.

    `done` is the fraction of the run.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        starts = done >= group.get("starts_at", 0)
        set_rate(group, rate * group.get("lr_factor", 1.0) if starts else 0.0)


def get_rate_fraction(optimizer: Optimizer) -> float:
    """Return the current learning rate as a fraction of the initial one."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / (group["initial_lr"] * group.get("lr_factor", 1.0) or 1)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; a fused or capturable optimizer may hold a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
