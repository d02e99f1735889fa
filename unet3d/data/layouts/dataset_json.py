"""Read dataset.json and find files that it does not list."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unet3d.data.case import Case
from unet3d.data.findings import Finding
from unet3d.data.formats.volumes import list_volumes
from unet3d.errors import UsageError
from unet3d.files import read_json


def load_dataset_json(root: Path, layout: str) -> dict[str, Any]:
    """Return the object in a folder's dataset.json; `layout` explains what a folder must hold."""
    missing = f"data.root: no dataset.json in {root.absolute()}; {layout}"
    return load_json_object(root / "dataset.json", missing)


def load_json_object(path: Path, missing: str) -> dict[str, Any]:
    """Return the object in a file; `missing` is the error if there is no file."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UsageError(missing) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold one JSON object")
    return content


def parse_names(content: dict[str, Any], key: str, root: Path) -> tuple[str, ...]:
    """Return the names in {"0": name, "1": name, ...} by number."""
    names = content.get(key)
    try:
        numbered = {int(number): str(name) for number, name in dict(names or {}).items()}
    except (TypeError, ValueError):
        numbered = {}
    if not numbered or sorted(numbered) != list(range(len(numbered))):
        raise UsageError(
            f"{root / 'dataset.json'}: {key} must name 0, 1, 2, ... without gaps, got {names!r}"
        )
    return tuple(numbered[n] for n in sorted(numbered))


def find_problems(
    root: Path, content: dict[str, Any], cases: Sequence[Case], message: str
) -> list[Finding]:
    """Find volumes in imagesTr and labelsTr that belong to no case, and a wrong numTraining."""
    listed = {os.path.realpath(file) for case in cases for file in (*case.images, case.label)}
    advice = "add it to the dataset, or move it out of the folder"
    findings = [
        Finding(None, file, message, advice)
        for folder in (root / "imagesTr", root / "labelsTr")
        for file in list_volumes(folder)
        if os.path.realpath(file) not in listed
    ]
    declared = content.get("numTraining", len(cases))
    if declared != len(cases):
        message = f"declares numTraining {declared!r}, but has {len(cases)} cases"
        advice = "correct numTraining, or add the missing cases"
        findings.append(Finding(None, root / "dataset.json", message, advice))
    return findings
