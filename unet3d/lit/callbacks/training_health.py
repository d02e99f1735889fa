"""A training that goes wrong without an error: classes never predicted, a loss that stays."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.module import SegmentationModule
from unet3d.report.diagnosis import (
    DECAYED,
    EARLY,
    LEARNED_DICE,
    LOW_DICE,
    PATIENCE,
    LossHistory,
    Remedies,
    ended_rising,
    loss_stays,
    low_dice,
    never_predicted,
    still_rising,
)


class TrainingHealth(Callback):
    """Prints a line when something begins or ceases to be wrong; `warnings` says what is left.

    `absent` are sentences on classes that the labels lack. Ranks have the same confusion matrices,
    each its own loss; the first one prints.
    """

    def __init__(self, limits: StoppingLimits, remedies: Remedies, absent: Sequence[str] = ()):
        self.limits, self.remedies, self.absent = limits, remedies, list(absent)
        self.losses = LossHistory()
        self.dice: list[float] = []  # the mean of each validation
        self.unpredicted: dict[str, int] = {}  # class: validations in a row without a voxel
        self.low: dict[str, int] = {}  # class: validations in a row with a Dice below LOW_DICE
        self.told: list[str] = []  # what has been said and still holds

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: SegmentationModule, *_: Any
    ) -> None:
        self.losses.add(pl_module.finite.loss)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: SegmentationModule) -> None:
        if trainer.sanity_checking:
            return
        scores, voxels = pl_module.metric.compute(), pl_module.metric.voxels()
        self.dice.append(scores["dice"])
        for name, (reference, predicted) in voxels.items():
            missing = reference > 0 and predicted == 0
            self.unpredicted[name] = self.unpredicted.get(name, 0) + 1 if missing else 0
            low = scores[f"dice/{name}"] < LOW_DICE  # which NaN is not
            self.low[name] = self.low.get(name, 0) + 1 if low else 0
        group = trainer.optimizers[0].param_groups[0]
        rate = float(group["lr"]) / (group["initial_lr"] or 1)
        for line in self._news(self.limits.fraction_done(trainer), rate, voxels):
            pl_module.print(f"step {trainer.global_step}: {line}")

    def _news(self, done: float, rate: float, voxels: dict[str, tuple[int, int]]) -> Iterator[str]:
        for name, (reference, predicted) in voxels.items():
            counts = f"{predicted:,} voxels of the validation set, {reference:,} in the reference"
            if self._begins(f"unpredicted {name}", self._missing(name), done >= EARLY):
                yield (
                    f"{name} is not predicted: {counts}, for {self.unpredicted[name]} validations"
                )
            if self._ceases(f"unpredicted {name}", self.unpredicted[name] == 0):
                yield f"{name} is predicted now: {counts}"
            late = done > 0.5 and rate <= DECAYED  # and not in a warm-up
            if self._begins(f"low {name}", self._misplaced(name), late):
                yield (
                    f"the learning rate is down to {100 * rate:.0f} % of its peak and the Dice of "
                    f"{name} still below {LOW_DICE}, for {self.low[name]} validations"
                )
            if self._ceases(f"low {name}", self.low[name] == 0):
                yield f"the Dice of {name} is above {LOW_DICE} now"
        if self._begins("loss", self._loss_stays() is not None, done >= EARLY):
            yield from self._about_loss()

    def _missing(self, name: str) -> bool:
        return self.unpredicted[name] >= PATIENCE

    def _misplaced(self, name: str) -> bool:
        return self.low[name] >= PATIENCE and self.unpredicted[name] == 0

    def _begins(self, what: str, holds: bool, due: bool) -> bool:
        if not holds or not due or what in self.told:
            return False
        self.told.append(what)
        return True

    def _ceases(self, what: str, over: bool) -> bool:
        if not over or what not in self.told:
            return False
        self.told.remove(what)
        return True

    def _loss_stays(self) -> tuple[float, float] | None:
        learned = any(value >= LEARNED_DICE for value in self.dice)
        return None if learned else self.losses.stays()

    def _about_loss(self) -> Iterator[str]:
        stays = self._loss_stays()
        if stays is not None:
            yield loss_stays(*stays, self.remedies)

    def warnings(self, *, done: bool) -> list[str]:
        """What is wrong as it stands: of a run that is done all of it, else what has been told."""

        def counts(what: str) -> bool:
            return done or what in self.told

        found = list(self.absent)
        missing = {k: n for k, n in self.unpredicted.items() if n and counts(f"unpredicted {k}")}
        low = [k for k, n in self.low.items() if n and k not in missing and counts(f"low {k}")]
        if missing:
            found.append(never_predicted(missing, self.remedies))
        if low:
            found.append(low_dice(low, self.remedies))
        rose = still_rising(self.dice) if done else None
        if rose is not None:
            found.append(ended_rising(*rose, self.remedies))
        return found + (list(self._about_loss()) if counts("loss") else [])

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses.state_dict(),
            "dice": list(self.dice),
            "unpredicted": dict(self.unpredicted),
            "low": dict(self.low),
            "told": list(self.told),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses.load_state_dict(state_dict["losses"])
        self.dice, self.told = list(state_dict["dice"]), list(state_dict["told"])
        self.unpredicted = dict(state_dict["unpredicted"])
        self.low = dict(state_dict["low"])
