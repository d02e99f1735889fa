"""Learning-rate schedules over the fraction of the run that is done; conf/scheduler selects one."""

import math
from typing import Literal, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unet3d.errors import UsageError


class Schedule(Protocol):
    """What LRSchedule applies."""

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        ...


class Constant:
    """A constant rate, after a linear warmup over a fraction of the run."""

    def __init__(self, warmup: float = 0.1):
        self.warmup = check_warmup(warmup)

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return compute_warmup_factor(done, self.warmup)


class Poly:
    """Polynomial decay, (1 - done) ** power, after a linear warmup over a fraction of the run."""

    def __init__(self, power: float = 0.9, warmup: float = 0.1):
        if not power > 0:
            raise UsageError(f"scheduler.power must be > 0, got {power}")
        self.power, self.warmup = power, check_warmup(warmup)

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return compute_warmup_factor(done, self.warmup) * (1 - done) ** self.power


class Cosine:
    """Cosine decay from 1 to 0, after a linear warmup over a fraction of the run."""

    def __init__(self, warmup: float = 0.1):
        self.warmup = check_warmup(warmup)

    def __call__(self, done: float) -> float:
        """Return the factor on the peak learning rate at `done` (0..1) of the run."""
        return compute_warmup_factor(done, self.warmup) * (1 + math.cos(math.pi * done)) / 2


class ReduceOnPlateau(ReduceLROnPlateau):
    """torch's ReduceLROnPlateau, with the name of the metric that it follows."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        monitor: str = "val/dice",
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ):
        super().__init__(
            optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
        )
        self.monitor = monitor


def check_warmup(warmup: float) -> float:
    """Return a warmup that is a fraction of the run; refuse others."""
    if not 0 <= warmup < 1:
        raise UsageError(f"scheduler.warmup must be in [0, 1), got {warmup}")
    return warmup


def compute_warmup_factor(done: float, warmup: float) -> float:
    """Return the factor of a linear warmup; the first step's is not 0."""
    return min(1.0, (done + 1e-3) / (warmup + 1e-3))
