"""Check every file of a dataset for what training could not use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from unet3d.components.dataset import SplitRule, build_layout, choose_split, resolve_dataset
from unet3d.data.case import Case
from unet3d.data.checks.headers import (
    check_headers,
    describe_extent,
    describe_formats,
    find_assumptions,
    read_image_headers,
)
from unet3d.data.checks.voxels import check_voxels
from unet3d.data.config import DataConfig
from unet3d.data.findings import Finding
from unet3d.data.preprocessing.cache import count_parallel_jobs
from unet3d.machine import get_available_bytes


@dataclass(frozen=True, kw_only=True)
class DatasetCheckResult:
    """What was checked and what was found."""

    root: Path
    cases: list[Case]
    findings: list[Finding]
    hints: list[Finding]
    summary: str
    groups: dict[str, str] | None = None  # of each case, as data.group_by defines them


def check_dataset(
    data: DataConfig,
    *,
    read_voxels: bool,
    workers: int | None,
    progress: Callable[[int, int], None],
) -> DatasetCheckResult:
    """Check the configured dataset; `progress` is called with cases checked and in total."""
    layout = build_layout(data)
    dataset = resolve_dataset(data, layout.describe())
    cases = layout.list_cases()
    rule = choose_split(data, cases)
    ram = get_available_bytes(torch.device("cpu"))
    findings = check_headers(cases, channels=len(dataset.channels), ram=ram)
    too_large = {f.case for f in findings if f.is_too_large}
    findings = [*layout.find_problems(), *findings]
    headers = read_image_headers(cases)
    findings += find_assumptions(headers, len(cases))
    findings += find_split_hints(rule)
    if dataset.annotations is not None:
        findings += dataset.annotations.find_unmatched_patterns(case.name for case in cases)
    if read_voxels:
        largest = max([1, *(header.reading_bytes for header in headers)])
        findings += check_voxels(
            [case for case in cases if case.name not in too_large],
            classes=dataset.classes,
            ignore_labels=dataset.ignore_labels,
            annotations=dataset.annotations,
            channels=dataset.channels,
            background=data.background,
            workers=workers or count_parallel_jobs(largest, ram),
            progress=progress,
        )
    findings = list(dict.fromkeys(findings))  # both checks find a file that cannot be read
    names = f"channels {', '.join(dataset.channels)}; classes {', '.join(dataset.classes)}"
    assert data.root is not None  # or there is no layout
    return DatasetCheckResult(
        root=data.root,
        cases=cases,
        findings=[finding for finding in findings if not finding.is_hint],
        hints=[finding for finding in findings if finding.is_hint],
        summary=f"{describe_formats(cases)}, {describe_extent(headers)}; {names}",
        groups=rule.groups,
    )


def find_split_hints(rule: SplitRule) -> Iterator[Finding]:
    """Yield a file of folds that is found or ignored, and patients with several scans."""
    hints = []
    if rule.note is not None:
        hints.append((rule.note, "set data.splits or data.group_by to choose the folds"))
    if likely := rule.likely_groups:
        advice = f"set {likely.option} to keep the scans of a patient in one fold"
        hints.append((likely.message, advice))
    for message, advice in hints:
        yield Finding(case=None, file=None, message=message, advice=advice, is_hint=True)
