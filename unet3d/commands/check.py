"""`unet3d check`: find every error in a dataset, with the file and what to do."""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from unet3d.app import show_progress
from unet3d.config.compose import ComposedConfig, format_overrides
from unet3d.config.fields import integer, read_settings, word_or
from unet3d.data.case import Case, Finding, count_findings
from unet3d.data.checks import (
    check_headers,
    check_voxels,
    describe_images,
    find_assumptions,
    find_odd_spacings,
    format_range,
    is_valid_affine,
    read_image_headers,
)
from unet3d.data.config import DataConfig, parse_data_config
from unet3d.data.dataset import build_layout, choose_split, resolve_dataset
from unet3d.data.formats.volumes import find_format
from unet3d.data.layouts.splits import describe_groups
from unet3d.data.preprocessing.cache import count_parallel_jobs
from unet3d.data.preprocessing.channels import (
    describe_axes,
    explain_swapped_axes,
    find_orientation,
)
from unet3d.data.sides import find_mixing_flips
from unet3d.files import write_output
from unet3d.machine import get_available_bytes
from unet3d.text import describe_classes, escape_unprintable, join_first, pluralize

MANY_VALUES = 20  # more classes than these may be objects, which labels number
MIN_EQUAL = 5  # as many equal problems are printed as one, with the names of a few cases

WORKERS = word_or("auto", integer(">= 1"), gives_none=False)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Which dataset to check, and how thoroughly."""

    data: DataConfig
    read_voxels: bool
    workers: Annotated[int | None, WORKERS]  # None: one per core
    format: Literal["table", "json"]
    output: Path | None


@dataclass(frozen=True, kw_only=True)
class DatasetCheckResult:
    """What was checked and what was found."""

    root: Path
    cases: list[Case]
    findings: list[Finding]
    hints: list[Finding]
    summary: str
    groups: dict[str, str] | None = None  # of each case, as data.group_by defines them


def main(composed: ComposedConfig, folder: Path) -> int:
    """Check everything, then print the findings."""
    settings = read_settings(CheckConfig, composed.config, data=parse_data_config(composed.config))
    augmentation = composed.config["augmentation"]
    with show_progress("cases") as progress:
        report = check_dataset(
            settings.data,
            flip_axes=augmentation.get("flip_axes", []) if augmentation.get("flip_p") else [],
            read_voxels=settings.read_voxels,
            workers=settings.workers,
            progress=progress,
        )
    as_json = settings.format == "json"
    text = check_report_to_json(report) if as_json else format_check_report(report)
    write_output(text, settings.output)
    return 1 if report.findings else 0


def format_check_report(report: DatasetCheckResult) -> str:
    """Return the findings by case, those of many cases as one, a summary, and hints."""
    equal, by_case, common = defaultdict(list), defaultdict(list), []
    for finding in sorted(report.findings, key=lambda finding: finding.case or ""):
        equal[finding.message, finding.advice].append(finding)
    for group in equal.values():
        if len(group) < MIN_EQUAL:
            for finding in group:
                by_case[finding.case].append(finding)
            continue
        names = list(dict.fromkeys(finding.case for finding in group if finding.case))
        head = f"{pluralize(len(names), 'case')}: {join_first(names)}" if names else None
        common.append(format_findings(head, group[:1], report.root, more=len(group) - 1))
    blocks = [format_findings(c, by_case[c], report.root) for c in sorted(by_case, key=str)]
    findings = count_findings(report.findings) if report.findings else "no errors"
    cases = describe_groups([case.name for case in report.cases], report.groups)
    summary = [f"{cases}, {findings}", *map(escape_unprintable, report.summary.split("\n"))]
    for hint in report.hints:
        message, advice = map(escape_unprintable, (hint.message, hint.advice))
        summary.append(f"hint: {message}\n    -> {advice}")
    return "\n".join([*blocks, *common, *summary])


def format_findings(
    case: str | None, findings: Sequence[Finding], root: Path, more: int = 0
) -> str:
    """Return what is wrong with one case, and in how many other files."""
    lines = [case or "the dataset"]
    others = f"(and {pluralize(more, 'more file')}) " if more else ""
    for finding in findings:
        path = finding.file
        if path is not None and path.is_relative_to(root):
            path = path.relative_to(root)
        file = "" if path is None else f"{path} {others}"
        lines += [f"  {file}{finding.message}", f"    -> {finding.advice}"]
    return "\n".join([*map(escape_unprintable, lines), ""])


def check_report_to_json(report: DatasetCheckResult) -> str:
    """Return the report for other programs."""
    keys = ("case", "file", "message", "advice")
    findings = [{key: getattr(finding, key) for key in keys} for finding in report.findings]
    hints = [{"message": hint.message, "advice": hint.advice} for hint in report.hints]
    content = {"cases": len(report.cases), "about": report.summary, "errors": findings}
    return json.dumps(content | {"hints": hints}, default=str)


def check_dataset(
    data: DataConfig,
    *,
    flip_axes: Collection[int],
    read_voxels: bool,
    workers: int | None,
    progress: Callable[[int, int], None],
) -> DatasetCheckResult:
    """Check the configured dataset; `progress` is called with cases checked and in total."""
    layout = build_layout(data)
    dataset = resolve_dataset(data, layout)
    cases = layout.list_cases()
    rule = choose_split(data, cases)
    ram = get_available_bytes(torch.device("cpu"))
    findings = check_headers(
        cases, channels=len(dataset.channels), ram=ram, label_names=dataset.label_names
    )
    findings = [*layout.find_problems(), *findings]
    headers = read_image_headers(cases)
    findings += [*find_assumptions(headers.values(), len(cases)), *find_odd_spacings(headers)]
    if rule.note is not None:
        advice = "set data.splits or data.group_by to choose the folds"
        findings.append(Finding(None, None, rule.note, advice, is_hint=True))
    if (likely := rule.likely_groups) and rule.file is None:
        advice = f"set {likely.option} to keep the scans of a patient in one fold"
        findings.append(Finding(None, None, likely.message, advice, is_hint=True))
    outputs = dataset.regions or dataset.classes
    if mixing := find_mixing_flips(outputs, data.orientation, flip_axes):
        option = format_overrides({"augmentation.flip_axes": mixing[1]})
        message, advice = f"training has {mixing[0]}", f"set {option}, as unet3d plan does"
        findings.append(Finding(None, None, message, advice, is_hint=True))
    if data.label_values == "auto" and len(dataset.classes) > MANY_VALUES:
        message = f"each of {len(dataset.classes) - 1} label values is a class of its own"
        advice = "if values number objects, write 1 for all of them: instances are not learned"
        findings.append(Finding(None, None, message, advice, is_hint=True))
    if dataset.annotations is not None:
        findings += dataset.annotations.find_unmatched_patterns(case.name for case in cases)
    if read_voxels:
        largest = max([1, *(header.reading_bytes for header in headers.values())])
        findings += check_voxels(
            cases,
            classes=dataset.classes,
            label_values=dataset.label_values,
            ignore_labels=dataset.ignore_labels,
            annotations=dataset.annotations,
            ram=ram,
            workers=workers or count_parallel_jobs(largest, ram),
            progress=progress,
        )
    findings = list(dict.fromkeys(findings))  # both checks find a file that cannot be read
    names = f"channels {', '.join(dataset.channels)}; "
    names += describe_classes(dataset.classes, dataset.regions)
    patch = f"{format_range(data.patch_size)} voxels along x, y and z"
    if any(find_format(file).names_axes for file in headers):
        patch = f"{describe_axes(data.patch_size, data.orientation)} voxels"
    names += f"\npatches of {patch}"
    shapes = [
        [header.shape[axis] for axis in find_orientation(header.affine, data.orientation)[0]]
        for header in headers.values()
        if is_valid_affine(header.affine)
    ]
    if shapes and (swapped := explain_swapped_axes(data.patch_size, shapes, data.orientation)):
        findings.append(Finding(None, None, swapped, "reorder data.patch_size", is_hint=True))
    assert data.root is not None  # or there is no layout
    return DatasetCheckResult(
        root=data.root,
        cases=cases,
        findings=[finding for finding in findings if not finding.is_hint],
        hints=[finding for finding in findings if finding.is_hint],
        summary=f"{describe_images(headers)}; {names}",
        groups=rule.groups,
    )
