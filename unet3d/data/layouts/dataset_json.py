"""What the layouts with a dataset.json share: reading it, and finding files that it leaves out."""

import json
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unet3d.data.case import Case
from unet3d.data.findings import Finding
from unet3d.data.nifti.stream import is_volume
from unet3d.errors import UsageError


def load_dataset_json(root: Path, layout: str) -> dict[str, Any]:
    """The object in a folder's dataset.json; `layout` says what was expected if there is none."""
    path = root / "dataset.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"data.root: no dataset.json in {root.absolute()}; {layout}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold one JSON object")
    return content


def names_in_order(content: dict[str, Any], key: str, root: Path) -> tuple[str, ...]:
    """Names by their numbers, from {"0": name, "1": name, ...}."""
    names = content.get(key)
    try:
        numbered = {int(number): str(name) for number, name in dict(names or {}).items()}
    except (TypeError, ValueError):
        numbered = {}
    strange = [name for name in numbered.values() if not is_printable(name)]
    if strange:
        raise UsageError(f"{root / 'dataset.json'}: {key} has names of no letters: {strange!r}")
    if not numbered or sorted(numbered) != list(range(len(numbered))):
        raise UsageError(
            f"{root / 'dataset.json'}: {key} must name 0, 1, 2, ... in a row, got {names!r}"
        )
    return tuple(numbered[n] for n in sorted(numbered))


def is_printable(name: str) -> bool:
    r"""Whether a name can be written to a screen and a file, and does nothing else there.

    >>> is_printable("left atrium"), is_printable("a\n"), is_printable("\ud800")
    (True, False, False)
    """
    return not {"Cc", "Cs"} & {unicodedata.category(letter) for letter in name}


def list_volumes(folder: Path) -> list[Path]:
    """The volumes of a folder, by name; none if it is not there."""
    return sorted(file for file in folder.glob("*") if is_volume(file))


def unlisted_files(root: Path, cases: Iterable[Case], why: str) -> list[Finding]:
    """Volumes in imagesTr and labelsTr that belong to no case."""
    named = {os.path.realpath(file) for case in cases for file in (*case.images, case.label)}
    return [
        Finding(case=None, file=file, what=why, do="name it there, or move it elsewhere")
        for folder in ("imagesTr", "labelsTr")
        for file in list_volumes(root / folder)
        if os.path.realpath(file) not in named
    ]


def check_num_training(content: dict[str, Any], cases: int, root: Path) -> list[Finding]:
    """Whether numTraining tells of more or fewer cases than there are."""
    told = content.get("numTraining", cases)
    if told == cases:
        return []
    return [
        Finding(
            case=None,
            file=root / "dataset.json",
            what=f"says numTraining {told!r}, but there are {cases} cases",
            do="correct the number, or look for what is missing",
        )
    ]
