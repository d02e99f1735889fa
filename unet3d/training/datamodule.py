"""The data of a run: its cases, split and preprocessed, and the loaders of their batches."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2s
from math import ceil, prod
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from unet3d.config.compose import format_overrides
from unet3d.data.annotated import Annotations
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.case import DatasetLayout, Finding
from unet3d.data.dataset import (
    ResolvedDataset,
    ValidCases,
    build_preprocessing,
    choose_split,
)
from unet3d.data.layouts.splits import split_cases
from unet3d.data.loading.loaders import TrainLoader, build_validation_loader
from unet3d.data.loading.worker_errors import WorkerCaseTracker
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.data.preprocessing.channels import explain_swapped_axes
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.sides import find_mixing_flips
from unet3d.data.split_checks import (
    find_erased_classes,
    find_rare_classes,
    find_shared_images,
    find_shared_patients,
)
from unet3d.errors import UsageError
from unet3d.inference.window_grid import compute_window_starts
from unet3d.metric.dice import Dice
from unet3d.text import join_first
from unet3d.training.config import TrainConfig
from unet3d.training.distributed import rank_zero_first
from unet3d.training.launch import ProcessRank

VALIDATION_FRACTION = 0.5
"""Windows of validation per patch of training; a window takes about a third of a patch's step."""

MAX_CROPPED = 0.01  # share of a case's foreground that the crop may cut off without a warning
MUCH_PADDING = 8
"""Times the voxels of the largest case from which a patch size is probably a mistake."""


class VolumeDataModule(pl.LightningDataModule):
    """Training patches and whole validation volumes.

    `prepare` splits and preprocesses the cases, which may take hours. It fills in `spacing_mm` of
    each validation case, which metrics hold before.
    """

    preprocessing: Preprocessing
    training: list[CachedVolume]
    validation: list[CachedVolume]
    groups: dict[str, str] | None  # of each case, as data.group_by defines them
    skipped: list[Finding]
    hints: list[Finding]  # about the dataset
    split_note: str | None  # about a file of folds that no option names
    data_warnings: list[str]  # of shared cases, constant images, and classes without a voxel
    train_loader: TrainLoader
    val_loader: DataLoader | None

    def __init__(
        self,
        settings: TrainConfig,
        layout: DatasetLayout,
        dataset: ResolvedDataset,
        *,
        device: torch.device,
        process: ProcessRank,
    ):
        super().__init__()
        self.settings, self.layout, self.dataset = settings, layout, dataset
        self.augment: Augment = settings.augmentation()
        if settings.evaluation.tta and getattr(self.augment, "mirroring_axes", None) is None:
            raise UsageError(
                "evaluation.tta=true needs an augmentation that says in mirroring_axes what it "
                "flips: use evaluation.tta=false"
            )
        self.device, self.process = device, process
        self.spacing_mm: dict[str, Sequence[float]] = {}

    def prepare(self) -> None:
        """Split the cases, preprocess those that are not in the cache, and build the loaders."""
        settings, dataset = self.settings, self.dataset
        cases = self.layout.list_cases()  # with invalid ones: skipping a case changes no fold
        rule = choose_split(settings.data, cases)
        parts = split_cases(cases, settings.fold, rule.file, rule.groups)
        usable = ValidCases(settings.data, self.layout, dataset)
        self.preprocessing = usable.run_on_valid_cases(
            lambda cases: build_preprocessing(settings.data, dataset, cases)
        )
        with rank_zero_first(self.process, "volumes"):
            volumes = usable.preprocess(parts, self.preprocessing)
        if not volumes[0]:
            raise UsageError(
                f"every training case of fold {settings.fold} is invalid, so "
                "data.invalid_cases=skip leaves none: run unet3d check, or choose another fold="
            )
        if dataset.annotations is not None:
            for finding in dataset.annotations.find_unmatched_patterns(case.name for case in cases):
                raise UsageError(finding.message)
            volumes = tuple(annotate(dataset.annotations, part) for part in volumes)
        self.training, self.validation = volumes
        self.groups, self.skipped, self.hints = rule.groups, usable.skipped, usable.hints
        self.split_note = None if settings.fold is None else rule.note
        overridden = settings.composition.is_overridden("data.group_by")
        is_ungrouped = overridden and settings.data.group_by is None  # on purpose
        shared = None if is_ungrouped else find_shared_patients(rule, *parts)
        every = sorted((v for part in volumes for v in part), key=lambda v: v.name)
        found = [shared, find_shared_images(*volumes)]
        if parts[1] and not self.validation:
            found.append(
                f"every validation case of fold {settings.fold} is invalid, so there is no Dice: "
                "choose another fold="
            )
        if constant := [v.name for v in every if v.is_constant]:
            found.append(
                f"images with one value everywhere: {join_first(constant)}: check these files"
            )
        if cut := [v.name for v in every if v.cropped_foreground > MAX_CROPPED]:
            found.append(
                f"the crop to voxels that are not background cuts off over {MAX_CROPPED:.0%} of "
                f"the labels of {join_first(cut)}, in training and validation: set data.crop=none"
            )
        found.append(find_erased_classes(dataset.classes, self.preprocessing.spacing_mm, every))
        flip_axes = getattr(self.augment, "mirroring_axes", None) or []
        outputs, orientation = dataset.regions or dataset.classes, settings.data.orientation
        if mixing := find_mixing_flips(outputs, orientation, flip_axes):
            option = format_overrides({"augmentation.flip_axes": mixing[1]})
            found.append(f"training has {mixing[0]}: set {option}")
        scored = Dice(dataset.classes, dataset.regions).scored_classes
        self.data_warnings = [*filter(None, found), *find_rare_classes(scored, *volumes)]
        spacing_mm = self.preprocessing.spacing_mm  # None: the file's
        self.spacing_mm |= {v.name: spacing_mm or v.statistics.spacing_mm for v in self.validation}
        ranks = {"rank": self.process.rank, "world_size": self.process.world_size}
        options: dict[str, Any] = {"device": self.device, **ranks}
        self.train_loader = TrainLoader(
            self.training, settings.data, augment=self.augment, seed=settings.seed, **options
        )
        self.val_loader = None
        if self.validation:
            self.val_loader = build_validation_loader(self.validation, settings.data, **options)

    @property
    def largest_validation(self) -> tuple[int, ...] | None:
        """Return the size of the largest validation volume, if there is one."""
        return max((volume.shape for volume in self.validation), key=prod, default=None)

    def check_patch_size(self) -> list[str]:
        """Return a warning if patches are not shaped as the cases, or are mostly padding."""
        patch, shapes = self.settings.data.patch_size, [v.shape for v in self.training]
        if swapped := explain_swapped_axes(patch, shapes, self.settings.data.orientation):
            return [swapped]
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        if (ratio := prod(patch) / prod(largest)) < MUCH_PADDING:
            return []
        return [
            f"data.patch_size={list(patch)} has {ratio:.0f} times the voxels of the largest case "
            f"({'x'.join(map(str, largest))}): most of each patch is padding"
        ]

    def check_accumulation(self) -> list[str]:
        """Return a warning if an epoch has fewer batches than a step accumulates."""
        batches, wanted = len(self.train_loader), self.settings.step.micro_batches
        if wanted <= batches:
            return []
        return [
            f"trainer.accumulate_grad_batches={wanted}, but an epoch has {batches} batches, which "
            "a step takes: raise data.patches_per_case"
        ]

    def choose_validation_interval(self) -> int:
        """Return the epochs between validations, so that these do not take most of the time."""
        windows, patch = self.settings.step.windows, self.settings.data.patch_size
        validated = sum(
            prod(
                len(compute_window_starts(n, p, windows.overlap))
                for n, p in zip(volume.shape, patch, strict=True)
            )
            for volume in self.validation
        )
        sampler = self.train_loader.epoch_sampler
        trained = len(sampler) * sampler.world_size
        interval = max(1, ceil(validated / (trained * VALIDATION_FRACTION)))
        epochs = self.settings.trainer.max_epochs
        if epochs is not None:  # as many validations, the last one close to the end of the run
            interval = epochs // max(1, epochs // interval)
        return interval

    def train_dataloader(self) -> TrainLoader:
        return self.train_loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Return the loader of validation volumes; none with fold=none."""
        return [] if self.val_loader is None else self.val_loader

    def list_cases_in_flight(self) -> list[WorkerCaseTracker]:
        """Return the cases that workers read at the moment."""
        loaders: tuple[Any, ...] = (self.train_loader, self.val_loader)
        return [loader.dataset.in_flight for loader in loaders if loader is not None]

    def digest_cases(self) -> dict[str, dict[str, str]]:
        """Return a digest of each case by part and name: of the files' contents, not their paths.

        What a case does not annotate is part of it.
        """
        digests: dict[str, dict[str, str]] = {"training": {}, "validation": {}}
        for part, volumes in zip(digests, (self.training, self.validation), strict=True):
            for volume in volumes:
                content = json.dumps([volume.background_label, *volume.contents]).encode()
                digests[part][volume.name] = blake2s(content, digest_size=8).hexdigest()
        return digests


class Prefetch(pl.Callback):
    """Fetch the next batch once a step is queued on the GPU, which is then in backward."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loader: Any = trainer.train_dataloader
        loader.prefetch()


def annotate(annotations: Annotations, volumes: Sequence[CachedVolume]) -> list[CachedVolume]:
    """Return the volumes with the label of what they do not annotate."""
    for volume in volumes:
        for problem in annotations.find_contradictions(volume.name, volume.classes):
            raise UsageError(f"{volume.name} {problem}")
    return [replace(v, background_label=annotations.get_background_label(v.name)) for v in volumes]
