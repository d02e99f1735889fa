"""What went wrong in a training that met no error: decided from its figures, told in sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

PATIENCE = 3
"""Validations in a row before a class is said to be missing, or its Dice to be low."""

EARLY = 0.25
"""The share of a run in which nothing is said: small classes are learned late."""

LOW_DICE = 0.05
"""Dice of a class that has not been learned."""

DECAYED = 0.25
"""The share of the peak learning rate from which little more is learned."""

RISE = 0.05
"""Dice gained in the last quarter of a run from which it ended too early."""

FALL = 0.05
"""The share of the loss that must be gone by the end."""

LEARNED_DICE = 0.5
"""From here on a loss that does not fall is one that was low already, as after init_from=."""

PARTS = 64
"""Means that a loss history holds before it halves their number."""

NAMED = 5
"""Classes that a sentence names before it only counts them."""


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Overrides worth a try, as they would be typed, by what is wrong."""

    run_too_short: Sequence[str] = ()
    class_not_learned: Sequence[str] = ()
    loss_not_falling: Sequence[str] = ()


class LossHistory:
    """Means of the loss over equally long parts of a run: at most PARTS numbers, however long."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.batches = 1  # of each part
        self.begun: list[float] = []  # the part that is not complete yet

    def add(self, loss: float) -> None:
        """Take in the loss of a batch; one that is not finite was left out of training, too."""
        if not math.isfinite(loss):
            return
        self.begun.append(loss)
        if len(self.begun) < self.batches:
            return
        self.means.append(sum(self.begun) / self.batches)
        self.begun = []
        if len(self.means) == PARTS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(a + b) / 2 for a, b in pairs]
            self.batches *= 2

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"means": list(self.means), "batches": self.batches, "begun": list(self.begun)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.means, self.begun = list(state["means"]), list(state["begun"])
        self.batches = state["batches"]

    def stays(self) -> tuple[float, float] | None:
        """Medians of the first and the last eighth, if the loss has not fallen between them.

        None as well before PARTS batches: of a handful of steps nothing can be said.
        """
        if self.batches == 1:
            return None
        eighth = len(self.means) // 8
        first, last = median(self.means[:eighth]), median(self.means[-eighth:])
        return (first, last) if first - last < FALL * abs(first) else None


def still_rising(dice: Sequence[float]) -> tuple[float, float] | None:
    """Dice at three quarters of the validations and at the end, if it rose much between them.

    None with fewer than 8 of them, and where single validations scatter more than Dice rose.
    """
    dice = [value for value in dice if not math.isnan(value)]
    if len(dice) < 8:
        return None
    few, quarter = max(2, len(dice) // 8), len(dice) // 4
    end, before = dice[-few:], dice[-quarter - few : -quarter]
    rose = median(end) - median(before) >= RISE and min(end) > max(before)
    return (median(before), median(end)) if rose else None


def absent_classes(
    classes: Mapping[str, Sequence[int]],
    training: Sequence[set[int]],
    validation: Sequence[set[int]],
) -> list[str]:
    """Sentences on the `classes`, each of one label or more, that no case has."""

    def lacking(cases: Sequence[set[int]]) -> list[str]:
        found = set().union(*cases)
        return [name for name, labels in classes.items() if not found & set(labels)]

    absent = lacking(training)
    unseen = [name for name in lacking(validation) if validation and name not in absent]
    neither = [name for name in absent if not validation or name in lacking(validation)]
    only_training = [name for name in absent if name not in neither]
    other = "choose another fold= or data.splits="
    sentences = []
    if neither:
        sentences.append(
            f"no case has {listed(neither)}, so it cannot be learned: look at the labels of the "
            "files, or leave the class out"
        )
    if only_training:
        sentences.append(
            f"no training case has {listed(only_training)}, so it cannot be learned: {other}"
        )
    if unseen:
        sentences.append(
            f"no validation case has {listed(unseen)}, so its Dice is not known and the mean "
            f"leaves it out: {other}"
        )
    return sentences


def never_predicted(validations: Mapping[str, int], remedies: Remedies) -> str:
    """Of classes that have not got a single voxel, in so many validations in a row."""
    counts = [f"{name} (for {plural(n, 'validation')})" for name, n in validations.items()]
    said = f"not one voxel of the validation set is predicted as {listed(counts)}"
    return advise(said, remedies.class_not_learned)


def low_dice(names: Sequence[str], remedies: Remedies) -> str:
    """Of classes that are predicted, but elsewhere."""
    said = f"Dice is below {LOW_DICE} for {listed(names)}"
    return advise(said, remedies.class_not_learned)


def ended_rising(before: float, end: float, remedies: Remedies) -> str:
    """See `still_rising`."""
    said = (
        "the run ended while Dice was still rising: "
        f"{before:.3f} at three quarters of it, {end:.3f} at its end"
    )
    return advise(said, remedies.run_too_short)


def loss_stays(first: float, last: float, remedies: Remedies) -> str:
    """See `LossHistory.stays`."""
    said = (
        f"the loss does not fall: its median was {first:.4g} in the first eighth of the steps "
        f"and {last:.4g} in the last"
    )
    return advise(said, remedies.loss_not_falling)


def advise(sentence: str, overrides: Sequence[str]) -> str:
    """Say what to try as well.

    >>> advise("it is slow", ["a=1", "b=2", "c=3"])
    'it is slow; try a=1, b=2 or c=3'
    """
    if not overrides:
        return sentence
    *others, last = overrides
    return f"{sentence}; try {', '.join(others)}{' or ' if others else ''}{last}"


def listed(names: Sequence[str]) -> str:
    """The first few by name.

    >>> listed(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "warning"), plural(3, "warning")
    ('1 warning', '3 warnings')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
