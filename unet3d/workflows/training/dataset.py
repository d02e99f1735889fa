"""Prepare the training and validation volumes of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s

from unet3d.config.settings.training import TrainingSettings
from unet3d.data.annotated import Annotations
from unet3d.data.case import Case, DatasetLayout
from unet3d.data.findings import Finding
from unet3d.data.layouts.groups import read_groups
from unet3d.data.layouts.splits import split_cases
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.lit.distributed import rank_zero_first
from unet3d.machine.distributed_env import ProcessRank
from unet3d.text import pluralize
from unet3d.workflows.shared.dataset import (
    ResolvedDataset,
    SplitRule,
    build_preprocessing,
    choose_split,
)
from unet3d.workflows.shared.usable_cases import UsableCases


def mark_volumes(
    annotations: Annotations, *parts: Sequence[CachedVolume]
) -> tuple[list[CachedVolume], ...]:
    """Return the volumes with the label of what they do not annotate."""
    for volume in (volume for part in parts for volume in part):
        problem = annotations.find_contradiction(volume.name, volume.summary.classes)
        if problem is not None:
            raise UsageError(f"{volume.name} {problem}")
    return tuple(
        [
            replace(volume, background_label=annotations.get_background_label(volume.name))
            for volume in part
        ]
        for part in parts
    )


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Preprocessed volumes, and how they came about."""

    preprocessing: Preprocessing
    training: list[CachedVolume]
    validation: list[CachedVolume]
    groups: dict[str, str] | None  # of each case, as data.group_by defines them
    skipped: list[Finding]
    split_note: str | None = None  # about a file of folds that no option names
    shared_patients: str | None = None  # a warning that validation and training may share some

    def digest_cases(self) -> dict[str, dict[str, str]]:
        """Return a digest of each case by part and name: of the files' contents, not their paths.

        What a case does not annotate is part of it.
        """
        return {
            part: {volume.name: _digest_case(volume) for volume in volumes}
            for part, volumes in (("training", self.training), ("validation", self.validation))
        }


def prepare_training_data(
    settings: TrainingSettings,
    layout: DatasetLayout,
    dataset: ResolvedDataset,
    process: ProcessRank,
) -> TrainingData:
    """Split the cases, and preprocess those that are not in the cache."""
    data = settings.data
    cases = layout.list_cases()  # with invalid ones, so that skipping a case changes no fold
    rule = choose_split(data, cases)
    parts = split_cases(cases, settings.fold, rule.file, rule.groups)
    usable = UsableCases(data, layout, dataset.channels)
    preprocessing = usable.run_on_valid_cases(
        lambda cases: build_preprocessing(data, dataset, cases)
    )
    with rank_zero_first(process):
        training, validation = usable.preprocess(parts, preprocessing)
    if not training:
        raise UsageError(
            f"every training case of fold {settings.fold} is invalid, so data.invalid_cases=skip "
            "leaves none: run unet3d check, or choose another fold="
        )
    annotations = dataset.annotations
    if annotations is not None:
        for finding in annotations.find_unmatched_patterns(case.name for case in cases):
            raise UsageError(finding.message)
        training, validation = mark_volumes(annotations, training, validation)
    return TrainingData(
        preprocessing=preprocessing,
        training=training,
        validation=validation,
        groups=rule.groups,
        skipped=usable.skipped,
        split_note=None if settings.fold is None else rule.note,
        shared_patients=None
        if settings.composition.is_overridden("data.group_by")
        else find_shared_patients(rule, *parts),
    )


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


def _digest_case(volume: CachedVolume) -> str:
    parts = [volume.background_label, *volume.contents]
    return blake2s(json.dumps(parts).encode(), digest_size=8).hexdigest()
