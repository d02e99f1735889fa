"""Check a split of cases: what training and validation share, and the classes that neither has."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from unet3d.data.case import Case
from unet3d.data.dataset import SplitRule
from unet3d.data.layouts.splits import read_groups
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.text import join_first, pluralize

MIN_VALIDATION_VOXELS = 10
"""Labeled voxels below which the Dice of a class is chance."""


def find_shared_patients(
    rule: SplitRule, training: Sequence[Case], validation: Sequence[Case]
) -> str | None:
    """Return a warning if patients seem to have scans in training and in validation."""
    likely = rule.likely_groups
    if likely is None:
        return None
    patients = read_groups(likely.pattern, [case.name for case in (*training, *validation)])
    trained = {patients[case.name] for case in training}
    shared = [case for case in validation if patients[case.name] in trained]
    if not shared:
        return None
    return (
        f"{len(shared)} of {pluralize(len(validation), 'validation case')} seem to be of patients "
        f"that are also in training, which inflates the scores: {likely.message}; "
        + (f"see {rule.file}" if rule.file else f"add {likely.option}")
    )


def find_shared_images(
    training: Sequence[CachedVolume], validation: Sequence[CachedVolume]
) -> str | None:
    """Return a warning if cases of the validation have the images of training cases."""
    trained = {volume.contents[:-1]: volume.name for volume in training}  # without the label
    shared = [
        f"{volume.name} those of {trained[volume.contents[:-1]]}"
        for volume in validation
        if volume.contents[:-1] in trained
    ]
    if not shared:
        return None
    return (
        f"{len(shared)} of {pluralize(len(validation), 'validation case')} have the same images as "
        f"training cases, which inflates the scores ({join_first(shared)}): remove one of each"
    )


def find_erased_classes(
    classes: Sequence[str], spacing_mm: Sequence[float] | None, volumes: Sequence[CachedVolume]
) -> str | None:
    """Return a warning if resampling has left hardly anything of a class in some cases."""
    erased = [f"{classes[n]} of {volume.name}" for volume in volumes for n in volume.erased_classes]
    if not erased or spacing_mm is None:
        return None
    spacing = ",".join(f"{mm:.4g}" for mm in spacing_mm)
    return (
        f"resampling to data.spacing_mm=[{spacing}] leaves less than half of the volume of "
        f"{join_first(erased)}: set a finer spacing"
    )


def find_rare_classes(
    classes: Mapping[str, Sequence[int]],
    training: Sequence[CachedVolume],
    validation: Sequence[CachedVolume],
) -> list[str]:
    """Return warnings about classes (name -> labels) of which cases have no or hardly a voxel."""
    parts = training, validation or training
    trained, validated = (set().union(*(v.classes for v in part)) for part in parts)
    voxels: Counter[int] = Counter()
    for volume in validation:  # thousands of points per class and case
        found = np.unique(volume.foreground_points[:, 0], return_counts=True)
        voxels.update(dict(zip(*(part.tolist() for part in found), strict=True)))
    names: dict[tuple[bool, bool, bool], list[str]] = {}  # in training, in validation, few there
    for name, labels in classes.items():
        is_trained, count = not trained.isdisjoint(labels), sum(voxels[n] for n in labels)
        is_rare = is_trained and 0 < count < MIN_VALIDATION_VOXELS
        occurs = is_trained, not validated.isdisjoint(labels), is_rare
        names.setdefault(occurs, []).append(name)
    resplit = "choose another fold= or data.splits="
    unlearned = "no case has", "it cannot be learned: check the label files, or remove the class"
    unknown = f"its Dice is unknown and not part of the mean: {resplit}"
    chance = f"its Dice, which helps to choose the best checkpoint, is chance: {resplit}"
    warnings = {
        (False, False, False): unlearned,
        (False, True, False): ("no training case has", f"it cannot be learned: {resplit}"),
        (True, False, False): ("no validation case has", unknown),
        (True, True, True): (f"under {MIN_VALIDATION_VOXELS} validation voxels are", chance),
    }
    return [
        f"{have} {join_first(names[occurs])}, so {end}"
        for occurs, (have, end) in warnings.items()
        if occurs in names
    ]
