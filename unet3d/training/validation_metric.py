"""A metric of validation by which callbacks decide."""

from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as pl

from unet3d.errors import UsageError


@dataclass(frozen=True)
class ValidationMetric:
    """A logged metric, and whether more or less of it is better."""

    name: str
    mode: Literal["max", "min"]

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UsageError(f"the mode of {self.name} is max or min, got {self.mode}")

    def read(self, trainer: pl.Trainer) -> float:
        """Return the value of the last validation."""
        known = trainer.callback_metrics
        if self.name not in known:
            names = ", ".join(sorted(name for name in known if name.startswith("val/")))
            raise UsageError(f"no metric {self.name}; a validation logs {names}")
        return float(known[self.name])

    def is_better(self, value: float, best: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better than the best one by more than `by`; NaN is not."""
        if best is None:
            return value == value
        return value - best > by if self.mode == "max" else best - value > by
