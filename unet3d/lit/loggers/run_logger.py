"""The one interface by which callbacks reach every logger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import Logger


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a logger shows of a run before its first step."""

    config: str  # YAML
    choices: Mapping[str, str | int | float]  # hyperparameters in which runs differ
    final_metrics: Sequence[str]  # by which runs are compared, under `final/`
    device: str


@runtime_checkable
class RunLogger(Protocol):
    """A logger that shows more of a run than curves. Called on rank 0 only."""

    def start(self, facts: RunFacts, step: int) -> None:
        """Show the config and the hyperparameters."""
        ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a point to each curve, as Lightning's loggers do."""
        ...

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Show an RGB image (H, W, 3) of bytes."""
        ...

    def forget_after(self, step: int) -> None:
        """Drop or hide what earlier runs in this folder logged at `step` and later.

        Called before anything is logged.
        """
        ...

    def flush(self) -> None:
        """Write what was logged so far: a checkpoint that continues from it is saved next."""
        ...

    def close(self, *, finished: bool) -> None:
        """End the run's log; unless it is `finished`, it may be resumed.

        Lightning's `finalize` comes before the final metrics.
        """
        ...


class OtherLogger:
    """A logger of Lightning's or a user's: curves and hyperparameters, no images."""

    def __init__(self, logger: Logger):
        self.logger = logger

    def start(self, facts: RunFacts, step: int) -> None:
        """Log the hyperparameters."""
        self.logger.log_hyperparams(dict(facts.choices))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics."""
        self.logger.log_metrics(metrics, step)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Do nothing: Lightning's loggers have no method for it."""

    def forget_after(self, step: int) -> None:
        """Do nothing: a resumed run logs the steps since its checkpoint again."""

    def flush(self) -> None:
        """Write what was logged so far."""
        self.logger.save()

    def close(self, *, finished: bool) -> None:
        """Write the final metrics; Lightning has called `finalize` before them."""
        self.logger.save()


def list_run_loggers(trainer: pl.Trainer) -> list[RunLogger]:
    """Return the trainer's loggers; on other ranks than 0 none."""
    if not trainer.is_global_zero:
        return []
    loggers: list[Any] = trainer.loggers
    return [x if isinstance(x, RunLogger) else OtherLogger(x) for x in loggers]
