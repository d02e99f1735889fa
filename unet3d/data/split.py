"""Which cases train and which validate."""

from collections.abc import Sequence

import numpy as np

from unet3d.data.case import Case
from unet3d.types import Misuse

FOLDS = 5
SEED = 12345


def split(cases: Sequence[Case], fold: int | None) -> tuple[list[Case], list[Case]]:
    """(training, validation) of a fold 0..4, the same as nnU-Net's; None trains on every case.

    nnU-Net shuffles the sorted names with seed 12345 and cuts them in five; which cases a fold
    holds depends on the names alone.
    """
    ordered = sorted(cases, key=lambda case: case.name)
    if fold is None:
        return ordered, []
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
