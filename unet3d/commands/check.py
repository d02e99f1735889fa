"""`unet3d check`: find every error in a dataset, with the file and what to do."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from unet3d.app import Progress
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, read_settings
from unet3d.data.config import DataConfig, read_data
from unet3d.data.findings import Finding, count_findings, group_equal
from unet3d.data.layouts.groups import describe_groups
from unet3d.files import write_output
from unet3d.text import escape_unprintable, join_first, pluralize
from unet3d.workflows.dataset_check import DatasetCheckResult, check_dataset


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Which dataset to check, and how thoroughly."""

    data: DataConfig
    read_voxels: bool
    workers: Annotated[int | None, integer(">= 1")]  # None: one per core
    format: Literal["table", "json"]
    output: Path | None


def main(composed: ComposedConfig, folder: Path) -> int:
    """Check everything, then print the findings."""
    settings = read_settings(CheckConfig, composed.config, data=read_data(composed.config))
    with Progress("cases") as progress:
        report = check_dataset(
            settings.data,
            read_voxels=settings.read_voxels,
            workers=settings.workers,
            progress=progress,
        )
    as_json = settings.format == "json"
    text = check_report_to_json(report) if as_json else format_check_report(report)
    write_output(text, settings.output)
    return 1 if report.findings else 0


def format_check_report(report: DatasetCheckResult) -> str:
    """Return the findings by case, then a summary of the dataset and hints."""
    findings = count_findings(report.findings) if report.findings else "no errors"
    cases = describe_groups([case.name for case in report.cases], report.groups)
    summary = [f"{cases}, {findings}", escape_unprintable(report.summary)]
    for hint in report.hints:
        message, advice = map(escape_unprintable, (hint.message, hint.advice))
        summary.append(f"hint: {message}\n    -> {advice}")
    ordered = sorted(report.findings, key=lambda finding: finding.case or "")
    groups = group_equal(ordered)
    single = [group[0] for group in groups if len(group) == 1]
    blocks = [
        format_case_findings(case, list(group), report.root)
        for case, group in groupby(single, lambda finding: finding.case)
    ]
    blocks += [format_equal_findings(group, report.root) for group in groups if len(group) > 1]
    return "\n".join([*blocks, *summary])


def format_equal_findings(findings: Sequence[Finding], root: Path) -> str:
    """Return a problem that many cases have: their number, a few names, and the first file."""
    cases = list(dict.fromkeys(finding.case for finding in findings if finding.case))
    names = f"{pluralize(len(cases), 'case')}: {join_first(cases)}" if cases else None
    return format_case_findings(names, findings[:1], root, more=len(findings) - 1)


def format_case_findings(
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
