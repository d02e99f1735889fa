"""`unet3d check`: every fault of a data set in one pass, with the file and what to do."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from unet3d.cli.app import write_output
from unet3d.cli.progress import Progress
from unet3d.config.compose import ComposedConfig
from unet3d.data.findings import Finding, count_findings
from unet3d.data.layouts.groups import describe_groups
from unet3d.errors import UsageError
from unet3d.workflows.dataset_check import DatasetReport, check_dataset


def main(request: ComposedConfig, folder: Path) -> int:
    """Look at everything, then tell."""
    cfg = request.config
    if cfg.format not in ("table", "json"):
        raise UsageError(f"format must be table or json, got {cfg.format!r}")
    with Progress("cases") as progress:
        checked = check_dataset(request, progress)
    write_output(
        (check_report_to_json if cfg.format == "json" else format_check_report)(checked), cfg.output
    )
    return 1 if checked.findings else 0


def format_check_report(checked: DatasetReport) -> str:
    """The faults by case, then what the set is like and what may be made of it."""
    faults = count_findings(checked.findings) if checked.findings else "no faults"
    count = describe_groups([case.name for case in checked.cases], checked.groups)
    lines = [f"{count}, {faults}", checked.about]
    lines += [f"hint: {hint.what}\n    -> {hint.do}" for hint in checked.hints]
    ordered = sorted(checked.findings, key=lambda f: f.case or "")
    groups = [(case, list(found)) for case, found in groupby(ordered, lambda f: f.case)]
    return "\n".join(
        [*(format_case_findings(case, found, checked.root) for case, found in groups), *lines]
    )


def format_case_findings(case: str | None, findings: Sequence[Finding], root: Path) -> str:
    """What is wrong with one case."""
    lines = [case or "the data set"]
    for finding in findings:
        file = "" if finding.file is None else f"{relative_path(finding.file, root)} "
        lines += [f"  {file}{finding.what}", f"    -> {finding.do}"]
    return "\n".join([*lines, ""])


def check_report_to_json(checked: DatasetReport) -> str:
    """For other programs."""
    faults = [
        {
            "case": finding.case,
            "file": None if finding.file is None else str(finding.file),
            "what": finding.what,
            "do": finding.do,
        }
        for finding in checked.findings
    ]
    hints = [{"what": hint.what, "do": hint.do} for hint in checked.hints]
    found = {"cases": len(checked.cases), "about": checked.about, "faults": faults}
    return json.dumps(found | {"hints": hints})


def relative_path(file: Path, root: Path) -> Path:
    """A file within the data set's folder."""
    return file.relative_to(root) if file.is_relative_to(root) else file
