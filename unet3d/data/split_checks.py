"""Check a split of cases: what training and validation share, and the classes that neither has."""

from collections.abc import Mapping, Sequence, Set

from unet3d.data.case import Case
from unet3d.data.dataset import SplitRule
from unet3d.data.layouts.splits import read_groups
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.text import join_first, pluralize


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
        f"that are also in training, which inflates the scores: {likely.message}; add "
        f"{likely.option}"
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


def find_absent_classes(
    classes: Mapping[str, Sequence[int]],
    training: Sequence[Set[int]],
    validation: Sequence[Set[int]],
) -> list[str]:
    """Return warnings about classes (name -> labels) without a voxel in any case.

    `training` and `validation` hold the labels that occur in each case.
    """
    trained, validated = set().union(*training), set().union(*(validation or training))
    names: dict[tuple[bool, bool], list[str]] = {}  # by whether training and validation have them
    for name, labels in classes.items():
        occurs = not trained.isdisjoint(labels), not validated.isdisjoint(labels)
        names.setdefault(occurs, []).append(name)
    resplit = "choose another fold= or data.splits="
    unknown = f"its Dice is unknown and not part of the mean: {resplit}"
    warnings = {
        (False, False): ("no", "it cannot be learned: check the label files, or remove the class"),
        (False, True): ("no training", f"it cannot be learned: {resplit}"),
        (True, False): ("no validation", unknown),
    }
    return [
        f"{no} case has {join_first(names[occurs])}, so {end}"
        for occurs, (no, end) in warnings.items()
        if occurs in names
    ]
