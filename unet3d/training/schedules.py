"""Learning-rate schedules over the fraction of the run that is done, and torch's schedulers."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError


class Constant:
    """A constant rate, after a linear warmup over a fraction of the run."""

    def __init__(self, warmup: float = 0.1):
        if not 0 <= warmup < 1:
            raise UsageError(f"scheduler.warmup must be in [0, 1), got {warmup}")
        self.warmup = warmup

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return min(1.0, (done + 1e-3) / (self.warmup + 1e-3))  # the first step's is not 0


class Poly(Constant):
    """Polynomial decay, (1 - done) ** power, after the warmup."""

    def __init__(self, power: float = 0.9, warmup: float = 0.1):
        super().__init__(warmup)
        if not power > 0:
            raise UsageError(f"scheduler.power must be > 0, got {power}")
        self.power = power

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return super().__call__(done) * (1 - done) ** self.power


class Cosine(Constant):
    """Cosine decay from 1 to 0, after the warmup."""

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return super().__call__(done) * (1 + math.cos(math.pi * done)) / 2


class RunSchedule(LRScheduler):
    """A scheduler of torch that follows the fraction of the run, which may end by time."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Callable[[float], float],
        fraction_done: Callable[[], float],
    ):
        self.schedule, self.fraction_done = schedule, fraction_done
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = self.schedule(self.fraction_done())
        return [rate * factor for rate in self.base_lrs]

    def refresh(self) -> None:
        """Apply the schedule where a resumed run begins: its limits may have changed."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {k: v for k, v in state.items() if k not in ("schedule", "fraction_done")}


def build_scheduler(
    factory: Factory, optimizer: Optimizer, fraction_done: Callable[[], float]
) -> LRScheduler:
    """Build the scheduler of a schedule of unet3d, or one of torch."""
    if not issubclass(factory.target, LRScheduler):
        return RunSchedule(optimizer, factory(), fraction_done)
    if "max_lr" in factory.arguments:  # OneCycleLR sets it for all groups alike
        peak = factory.arguments["max_lr"]
        rates = [peak * group.get("lr_factor", 1.0) for group in optimizer.param_groups]
        factory = factory.bind(max_lr=rates)
    if not issubclass(factory.target, ReduceLROnPlateau):
        return factory(optimizer=optimizer)
    arguments = dict(factory.arguments)
    monitor = arguments.pop("monitor", "val/dice")
    scheduler = replace(factory, arguments=arguments)(optimizer=optimizer)
    scheduler.monitor = monitor  # the metric that it follows, which the module reads
    return scheduler


def get_rate(optimizer: Optimizer) -> float:
    """Return the current learning rate, without the factors of groups that have one."""
    return max(float(g["lr"]) / (g.get("lr_factor", 1.0) or 1) for g in optimizer.param_groups)
