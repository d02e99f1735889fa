"""Warnings about a run that does not learn: classes never predicted, a loss that stays flat."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.config.values import format_duration
from unet3d.report.training_warnings import (
    LEARNED_DICE,
    LOW_DICE,
    LOW_LR_FRACTION,
    MIN_VALIDATIONS,
    SILENT_FRACTION,
    LossHistory,
    SuggestedOverrides,
    detect_late_rise,
    format_divergence_warning,
    format_ended_early_warning,
    format_ended_rising_warning,
    format_loss_plateau_warning,
    format_low_dice_warning,
    format_never_predicted_warning,
)
from unet3d.training.limits import StoppingLimits
from unet3d.training.module import SegmentationModule
from unet3d.training.schedules import get_rate_fraction


class TrainingWarnings(Callback):
    """Print a line when a problem appears or is gone; `warnings` lists those that remain.

    `suggest(out_of_time=...)` returns what to try; `absent` holds sentences about classes that no
    label contains. All ranks have the same confusion matrices but their own losses; rank 0 prints.
    """

    def __init__(
        self,
        limits: StoppingLimits,
        suggest: Callable[..., SuggestedOverrides],
        absent: Sequence[str] = (),
    ):
        self.limits, self.suggest, self.absent = limits, suggest, absent
        self.losses = LossHistory()
        self.dice: list[float] = []  # mean Dice of each validation
        self.unpredicted: dict[str, int] = {}  # class: validations in a row without a voxel of it
        self.low: dict[str, int] = {}  # class: validations in a row with a Dice below LOW_DICE
        self.active: list[str] = []  # problems that have been printed and still hold

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: SegmentationModule, *_: Any
    ) -> None:
        self.losses.add(trainer.global_step, pl_module.nonfinite_guard.loss)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: SegmentationModule) -> None:
        if trainer.sanity_checking:
            return
        scores, voxels = pl_module.metric.compute(), pl_module.metric.voxels()
        self.dice.append(scores["dice"])
        for name, (reference, predicted) in voxels.items():
            missing = reference > 0 and predicted == 0
            self.unpredicted[name] = self.unpredicted.get(name, 0) + 1 if missing else 0
            low = scores[f"dice/{name}"] < LOW_DICE  # False for NaN
            self.low[name] = self.low.get(name, 0) + 1 if low else 0
        lr_factor = get_rate_fraction(trainer.optimizers[0])
        steps, skipped = trainer.global_step, pl_module.nonfinite_guard.skipped
        divergence = self._describe_divergence(steps, skipped)
        if self._appears("divergence", divergence is not None, due=True):
            pl_module.print(f"step {steps}: {divergence}")
        if self._disappears("divergence", divergence is None):
            pl_module.print(f"step {steps}: the training no longer diverges")
        if divergence is not None:
            return
        for line in self._describe_changes(self.limits.fraction_done(trainer), lr_factor, voxels):
            pl_module.print(f"step {steps}: {line}")

    def _describe_changes(
        self, done: float, lr_factor: float, voxels: dict[str, tuple[int, int]]
    ) -> Iterator[str]:
        for name, (reference, predicted) in voxels.items():
            counts = f"{predicted:,} voxels of the validation set, {reference:,} in the reference"
            if self._appears(
                f"unpredicted {name}", self._is_missing(name), done >= SILENT_FRACTION
            ):
                validations = self.unpredicted[name]
                yield f"{name} is not predicted: {counts}, {validations} validations in a row"
            if self._disappears(f"unpredicted {name}", self.unpredicted[name] == 0):
                yield f"{name} is predicted now: {counts}"
            # A low rate in a warmup does not count.
            late = done > 0.5 and lr_factor <= LOW_LR_FRACTION
            if self._appears(f"low {name}", self._is_misplaced(name), late):
                yield (
                    f"the learning rate is down to {100 * lr_factor:.0f}% of its peak, but the "
                    f"Dice of {name} is still below {LOW_DICE}, "
                    f"{self.low[name]} validations in a row"
                )
            if self._disappears(f"low {name}", self.low[name] == 0):
                yield f"the Dice of {name} is above {LOW_DICE} now"
        if self._appears("loss", self._find_flat_loss() is not None, done >= SILENT_FRACTION):
            yield from self._describe_loss()

    def _is_missing(self, name: str) -> bool:
        return self.unpredicted[name] >= MIN_VALIDATIONS

    def _is_misplaced(self, name: str) -> bool:
        return self.low[name] >= MIN_VALIDATIONS and self.unpredicted[name] == 0

    def _appears(self, problem: str, holds: bool, due: bool) -> bool:
        if not holds or not due or problem in self.active:
            return False
        self.active.append(problem)
        return True

    def _disappears(self, problem: str, is_gone: bool) -> bool:
        if not is_gone or problem not in self.active:
            return False
        self.active.remove(problem)
        return True

    @property
    def suggested(self) -> SuggestedOverrides:
        """Return what to try."""
        return self.suggest(out_of_time=self.limits.out_of_time)

    @property
    def has_learned(self) -> bool:
        """Return whether any validation reached a Dice that a network without training does not."""
        return any(value >= LEARNED_DICE for value in self.dice)

    def _find_flat_loss(self) -> tuple[float, float] | None:
        return None if self.has_learned else self.losses.detect_plateau()

    def _describe_divergence(self, steps: int, skipped: int) -> str | None:
        rise = self.losses.detect_divergence()
        return format_divergence_warning(rise, steps, skipped, self.suggested)

    def find_failure(self, steps: int, skipped: int) -> str | None:
        """Return why nothing was learned in a finished run, if so."""
        return None if self.has_learned else self._describe_divergence(steps, skipped)

    def _describe_loss(self) -> Iterator[str]:
        medians = self._find_flat_loss()
        if medians is not None:
            yield format_loss_plateau_warning(*medians, self.suggested)

    def warnings(self, *, done: bool, steps: int = 0, skipped: int = 0) -> list[str]:
        """Return all current problems of a finished run; of another, those already printed.

        A run that has diverged has no other problem: more steps or channels would not help.
        """

        def is_due(problem: str) -> bool:
            return done or problem in self.active

        warnings = list(self.absent)
        divergence = self._describe_divergence(steps, skipped)
        if divergence is not None:
            return [*warnings, divergence]
        if done and self.limits.ended_early(steps):
            planned = self.limits.planned_steps
            time_for_all = format_duration(self.limits.time_elapsed() * planned / steps)
            warnings.append(
                format_ended_early_warning(steps, planned, time_for_all, self.suggested)
            )
        missing = {k: n for k, n in self.unpredicted.items() if n and is_due(f"unpredicted {k}")}
        low = [k for k, n in self.low.items() if n and k not in missing and is_due(f"low {k}")]
        if missing:
            warnings.append(format_never_predicted_warning(missing, self.suggested))
        if low:
            warnings.append(format_low_dice_warning(low, self.suggested))
        rise = detect_late_rise(self.dice) if done else None
        if rise is not None:
            warnings.append(format_ended_rising_warning(*rise, self.suggested))
        return warnings + (list(self._describe_loss()) if is_due("loss") else [])

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses.state_dict(),
            "dice": list(self.dice),
            "unpredicted": dict(self.unpredicted),
            "low": dict(self.low),
            "active": list(self.active),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses.load_state_dict(state_dict["losses"])
        self.dice, self.active = list(state_dict["dice"]), list(state_dict["active"])
        self.unpredicted = dict(state_dict["unpredicted"])
        self.low = dict(state_dict["low"])
