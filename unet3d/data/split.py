"""Which cases train and which validate."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unet3d.data.case import Case
from unet3d.types import Misuse

FOLDS = 5
SEED = 12345


def split(
    cases: Sequence[Case], fold: int | None, file: Path | None = None
) -> tuple[list[Case], list[Case]]:
    """(training, validation) of a fold; None trains on every case.

    Without a file the folds 0..4 are nnU-Net's, which shuffles the sorted names with seed 12345
    and cuts them in five; which cases a fold holds depends on the names alone.
    """
    ordered = sorted(cases, key=lambda case: case.name)
    if fold is None:
        return ordered, []
    if file is not None:
        return _told(ordered, fold, file)
    if not 0 <= fold < FOLDS:
        raise Misuse(f"fold must be 0..{FOLDS - 1} or none, got {fold}")
    if len(ordered) < FOLDS:
        raise Misuse(
            f"{len(ordered)} cases are too few for {FOLDS} folds: fold=none trains on all of them"
        )
    order = np.arange(len(ordered))
    np.random.RandomState(SEED).shuffle(order)
    held_out = set(np.array_split(order, FOLDS)[fold].tolist())
    training = [c for n, c in enumerate(ordered) if n not in held_out]
    return training, [ordered[n] for n in sorted(held_out)]


def _told(cases: Sequence[Case], fold: int, file: Path) -> tuple[list[Case], list[Case]]:
    """As a file says: a list with {"train": [names], "val": [names]} for each fold."""
    try:
        folds = [(set(part["train"]), set(part["val"])) for part in json.loads(file.read_text())]
    except FileNotFoundError:
        raise Misuse(f"data.splits: there is no {file.absolute()}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise Misuse(
            f'{file} must be a JSON list with {{"train": [names], "val": [names]}} for each fold'
        ) from None
    if not 0 <= fold < len(folds):
        raise Misuse(f"fold must be 0..{len(folds) - 1}, as {file} has them, or none, got {fold}")
    training, validation = folds[fold]
    unknown = sorted((training | validation) - {case.name for case in cases})
    if unknown:
        raise Misuse(f"{file} names cases that the data set has not: {', '.join(unknown[:5])}")
    if training & validation:
        both = sorted(training & validation)
        raise Misuse(f"{file}: fold {fold} trains and validates on {', '.join(both[:5])}")
    if not training:
        raise Misuse(f"{file}: fold {fold} has no cases to train on")
    return [c for c in cases if c.name in training], [c for c in cases if c.name in validation]
