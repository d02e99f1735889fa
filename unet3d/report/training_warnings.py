"""Diagnose a run that finished without an error but did not learn, and suggest what to try."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Any

from unet3d.report.figures import Curve
from unet3d.text import join_first, pluralize

MIN_VALIDATIONS = 3  # consecutive ones, before a class counts as never predicted or as low
SILENT_FRACTION = 0.25  # start of a run without warnings: small classes are learned late
LOW_DICE = 0.05  # below it a class has not been learned
LOW_LR_FRACTION = 0.25  # below this fraction of the peak learning rate, little more is learned
LATE_RISE = 0.05  # a run that gains this much Dice in its last quarter ended too early
MIN_FALL = 0.05  # fraction by which the loss must have fallen by the end
LEARNED_DICE = 0.5  # from here on, a loss that stays flat was low from the start (init_from=)
DIVERGED = 10.0  # a loss above this, and this many times as high as its lowest value, has diverged
EARLY_FRACTION = 0.1  # a run that time ended before this fraction of its steps is no result yet
PARTS = 64  # points of a loss history at which pairs of them are merged


@dataclass(frozen=True, kw_only=True)
class SuggestedOverrides:
    """Overrides to try for each problem."""

    run_too_short: Sequence[str] = ()
    class_not_learned: Sequence[str] = ()
    loss_not_falling: Sequence[str] = ()
    cheaper_step: Sequence[str] = ()
    lower_rate: str = "lower the learning rate"


class LossHistory(Curve):
    """Mean loss of equally long parts of a run, fewer than PARTS however long it is."""

    def __init__(self) -> None:
        super().__init__(PARTS)
        self.lowest = math.inf  # loss of a single batch

    def add(self, step: float, value: float) -> None:
        """Add the loss of a batch; non-finite ones are ignored, since their steps are skipped."""
        super().add(step, value)
        if math.isfinite(value):
            self.lowest = min(self.lowest, value)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lowest": self.lowest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.lowest = state["lowest"]

    def detect_plateau(self) -> tuple[float, float] | None:
        """Return the medians of the first and last eighth if the loss has not fallen, else None."""
        if self.every == 1:  # fewer than PARTS batches are too few to judge
            return None
        means = [loss for _, loss in self.points]
        eighth = len(means) // 8
        first, last = median(means[:eighth]), median(means[-eighth:])
        return (first, last) if first - last < MIN_FALL * abs(first) else None

    def detect_divergence(self) -> tuple[float, float] | None:
        """Return the lowest loss and the median of the latest if it rose by magnitudes, else None.

        The lowest of single batches: where the first step diverges, every mean has diverged.
        """
        if not self.points:
            return None
        last = median(loss for _, loss in self.points[-max(3, len(self.points) // 8) :])
        return (self.lowest, last) if last > DIVERGED * max(abs(self.lowest), 1) else None


def detect_late_rise(dice: Sequence[float]) -> tuple[float, float] | None:
    """Return Dice at three quarters of the validations and at the end if it rose a lot, else None.

    None with fewer than 8 validations, and where Dice scatters more than it rose.
    """
    dice = [value for value in dice if not math.isnan(value)]
    if len(dice) < 8:
        return None
    count, quarter = max(2, len(dice) // 8), len(dice) // 4
    end, before = dice[-count:], dice[-quarter - count : -quarter]
    rose = median(end) - median(before) >= LATE_RISE and min(end) > max(before)
    return (median(before), median(end)) if rose else None


def find_absent_classes(
    classes: Mapping[str, Sequence[int]],
    training: Sequence[Set[int]],
    validation: Sequence[Set[int]],
) -> list[str]:
    """Return warnings about classes (name -> labels) without a voxel in any case.

    `training` and `validation` hold the labels that occur in each case.
    """

    def find_absent(cases: Sequence[Set[int]]) -> list[str]:
        present = set().union(*cases)
        return [name for name, labels in classes.items() if not present & set(labels)]

    untrained = find_absent(training)
    unvalidated = find_absent(validation) if validation else untrained
    nowhere = [name for name in untrained if name in unvalidated]
    only_validated = [name for name in untrained if name not in unvalidated]
    only_trained = [name for name in unvalidated if name not in untrained]
    resplit = "choose another fold= or data.splits="
    unknown = f"its Dice is unknown and not part of the mean: {resplit}"
    warnings = [
        (nowhere, "no", "it cannot be learned: check the label files, or remove the class"),
        (only_validated, "no training", f"it cannot be learned: {resplit}"),
        (only_trained, "no validation", unknown),
    ]
    return [f"{no} case has {join_first(names)}, so {end}" for names, no, end in warnings if names]


def format_never_predicted_warning(
    validations: Mapping[str, int], suggested: SuggestedOverrides
) -> str:
    """Return the warning about classes without a predicted voxel, for how many validations."""
    counts = [f"{name} (for {pluralize(n, 'validation')})" for name, n in validations.items()]
    message = f"not one voxel of the validation set is predicted as {join_first(counts)}"
    return append_overrides(message, suggested.class_not_learned)


def format_low_dice_warning(names: Sequence[str], suggested: SuggestedOverrides) -> str:
    """Return the warning about classes that are predicted, but hardly overlap the reference."""
    message = f"Dice is below {LOW_DICE} for {join_first(names)}"
    return append_overrides(message, suggested.class_not_learned)


def format_ended_rising_warning(before: float, end: float, suggested: SuggestedOverrides) -> str:
    """Return the warning for what `detect_late_rise` found."""
    message = (
        "the run ended while Dice was still rising: "
        f"{before:.3f} after three quarters of it, {end:.3f} at the end"
    )
    return append_overrides(message, suggested.run_too_short)


def format_loss_plateau_warning(first: float, last: float, suggested: SuggestedOverrides) -> str:
    """Return the warning for what `LossHistory.detect_plateau` found."""
    message = (
        f"the loss does not fall: its median was {first:.4g} in the first eighth of the steps "
        f"and {last:.4g} in the last"
    )
    return append_overrides(message, suggested.loss_not_falling)


def format_divergence_warning(
    rise: tuple[float, float] | None, steps: int, skipped: int, suggested: SuggestedOverrides
) -> str | None:
    """Return the warning about what `detect_divergence` found, or about skipped steps, or None."""
    if rise is not None:
        return (
            f"the training diverged: its loss rose from {rise[0]:.4g} to {rise[1]:.4g}; "
            f"{suggested.lower_rate}"
        )
    if 2 * skipped <= steps:
        return None
    return (
        f"{skipped:,} of {steps:,} steps were skipped, since their loss or gradients were not "
        f"finite; {suggested.lower_rate}, or check the cases that the log names"
    )


def format_ended_early_warning(
    steps: int, planned: float, time_for_all: str, suggested: SuggestedOverrides
) -> str:
    """Return the warning about a run that time ended before EARLY_FRACTION of its steps."""
    message = (
        f"trainer.max_time ended the run after {steps:,} of {planned:,} steps: resume it with "
        f"more time (resume=auto trainer.max_time={time_for_all} for all steps), or start a run "
        "with cheaper steps"
    )
    return append_overrides(message, suggested.cheaper_step)


def append_overrides(message: str, overrides: Sequence[str]) -> str:
    """Append the overrides to try.

    >>> append_overrides("training is slow", ["a=1", "b=2", "c=3"])
    'training is slow; try a=1, b=2 or c=3'
    """
    if not overrides:
        return message
    *others, last = overrides
    return f"{message}; try {', '.join(others)}{' or ' if others else ''}{last}"
