"""Learning-rate schedules over the fraction of the run that is done, and torch's schedulers."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError
from unet3d.training.callbacks.stopping import check_mode


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


class FractionSchedule(LambdaLR):
    """A schedule of unet3d, whose rate does not depend on the number of steps."""

    def recompute(self) -> None:
        """Set the rates again: the limits of a resumed run may have changed."""
        for group, rate, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(0)


def build_scheduler(
    factory: Factory, optimizer: Optimizer, fraction_done: Callable[[], float]
) -> LRScheduler:
    """Build the scheduler of a schedule of unet3d, or one of torch."""
    if not isinstance(factory.target, type):
        raise UsageError(f"scheduler._target_ must be a class, got {factory.target}")
    if not issubclass(factory.target, LRScheduler):
        schedule = factory()
        return FractionSchedule(optimizer, lambda step: schedule(fraction_done()))
    for key in ("base_lr", "max_lr"):  # OneCycleLR and CyclicLR set them for all groups alike
        if isinstance(rate := factory.arguments.get(key), int | float):
            rates = [rate * group.get("lr_factor", 1.0) for group in optimizer.param_groups]
            factory = factory.bind(**{key: rates})
    if not issubclass(factory.target, ReduceLROnPlateau):
        return factory(optimizer=optimizer)
    arguments = dict(factory.arguments)
    monitor = arguments.pop("monitor", "val/dice")
    check_mode("scheduler.mode", monitor, arguments.get("mode", "min"))
    scheduler = replace(factory, arguments=arguments)(optimizer=optimizer)
    scheduler.monitor = monitor  # the metric that it follows, which the module reads
    return scheduler


def get_rate(optimizer: Optimizer) -> float:
    """Return the current learning rate, without the factors of groups that have one."""
    return max(float(g["lr"]) / (g.get("lr_factor", 1.0) or 1) for g in optimizer.param_groups)
