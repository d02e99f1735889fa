"""A data set's faults: all of them for `unet3d check`, and what training does about them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from omegaconf import DictConfig

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import (
    build_source,
    parse_background,
    read_case_groups,
    resolve_dataset_facts,
)
from unet3d.data.case import Case, Source
from unet3d.data.checks.headers import check_headers, describe_extent
from unet3d.data.checks.voxels import check_voxels
from unet3d.data.findings import Finding, InvalidDatasetError
from unet3d.data.layouts.groups import find_likely_groups
from unet3d.data.preprocessing.cache import CachedVolume, preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.machine.memory import get_available_bytes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What was looked at and what was found."""

    root: Path
    cases: list[Case]
    findings: list[Finding]
    hints: list[Finding]
    about: str  # the data set in one paragraph, as far as it can be read
    groups: dict[str, str] | None = None  # of each case, as data.group_by has them


def check_dataset(request: ComposedConfig, progress: Callable[[int, int], None]) -> DatasetReport:
    """Look at every file of the configured data set; `progress` is told cases done, and of all."""
    cfg = request.config
    workers = (os.cpu_count() or 1) if cfg.workers is None else cfg.workers
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers must be an int >= 1 or null, got {cfg.workers!r}")
    source = build_source(cfg)
    classes, channels = resolve_dataset_facts(cfg, source.describe())
    cases = source.cases()
    groups = read_case_groups(cfg, cases)
    decided = groups is not None or cfg.data.splits is not None
    hinted = None if decided else find_likely_groups([case.name for case in cases])
    found = [*source.faults(), *check_headers(cases, channels=len(channels))]
    found += [] if hinted is None else [hinted]
    if cfg.read_voxels:
        found += check_voxels(
            cases,
            classes=classes,
            ignore_label=cfg.data.ignore_label,
            channels=channels,
            background=parse_background(cfg),
            workers=workers,
            progress=progress,
        )
    found = list(dict.fromkeys(found))  # a file that cannot be read is found twice
    names = f"channels {', '.join(channels)}; classes {', '.join(classes)}"
    return DatasetReport(
        root=Path(cfg.data.root),
        cases=cases,
        findings=[finding for finding in found if not finding.hint],
        hints=[finding for finding in found if finding.hint],
        about=f"{describe_extent(cases)}; {names}",
        groups=groups,
    )


class UsableCases:
    """The cases that a run uses: what data.invalid_cases says happens to faulty ones."""

    def __init__(self, cfg: DictConfig, source: Source, channels: Sequence[str]):
        self.cfg = cfg
        if cfg.data.invalid_cases not in ("stop", "skip"):
            raise UsageError(
                f"data.invalid_cases must be stop or skip, got {cfg.data.invalid_cases!r}"
            )
        self.cases = source.cases()
        self.left_out: list[Finding] = []
        self.apply_policy([*source.faults(), *check_headers(self.cases, channels=len(channels))])

    def apply_policy(self, findings: Sequence[Finding]) -> None:
        """Stop, or leave out the cases that these faults harm."""
        harmful = [finding for finding in findings if finding.case is not None]
        if not harmful:
            return
        names = {finding.case for finding in harmful}
        self.cases = [case for case in self.cases if case.name not in names]
        if self.cfg.data.invalid_cases == "stop" or not self.cases:
            raise InvalidDatasetError(harmful)
        self.left_out += harmful

    def run_excluding_bad(self, work: Callable[[list[Case]], T]) -> T:
        """Do something with all cases, which may show faults that the headers do not."""
        try:
            return work(self.cases)
        except InvalidDatasetError as faulty:
            self.apply_policy(faulty.findings)
            return work(self.cases)

    def prepare(
        self, parts: Sequence[Sequence[Case]], preparation: Preprocessing
    ) -> tuple[list[CachedVolume], ...]:
        """The volumes of each part of the cases, training first."""
        wanted = {case.name for part in parts for case in part}
        cache, free = Path(self.cfg.data.cache), get_available_bytes(torch.device("cpu"))

        def work(cases: list[Case]) -> list[CachedVolume]:
            return preprocess_all(
                [c for c in cases if c.name in wanted], preparation, cache, ram=free
            )

        ready = {volume.name: volume for volume in self.run_excluding_bad(work)}
        found = tuple([ready[c.name] for c in part if c.name in ready] for part in parts)
        if not found[0]:
            raise UsageError(f"fold={self.cfg.fold}: every case to train on is left out")
        return found
