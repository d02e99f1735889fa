"""Record beside labels what they were made from: only labels that would be the same are skipped.

A record is a hidden file for each file of labels, so that processes which share a folder never
write to the same one. It is empty while its labels are replaced: after a kill they are made again.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.contents import digest_volume
from unet3d.errors import UsageError
from unet3d.files import read_json, write_text
from unet3d.text import join_first, pluralize
from unet3d.workflows.inference.predictor import ScanTask

FOLDER = ".unet3d"

CAUSES = {"checkpoints": "another checkpoint", "options": "other options", "scan": "another scan"}
"""Why existing labels are made again, by the entry of the record that differs."""

FOREIGN = "foreign"
"""Instead of a cause: the labels may be somebody's work."""


def digest_scan(scan: ScanFiles) -> list[str]:
    """Return a digest of the contents of each file of a scan."""
    return [digest_volume(file) for file in scan.files]


def get_record_path(labels: Path) -> Path:
    """Return the file of a record."""
    return labels.parent / FOLDER / f"{labels.name}.json"


def start_record(task: ScanTask) -> None:
    """Empty the record of labels that are about to be written or replaced."""
    path = get_record_path(task.labels)
    path.parent.mkdir(exist_ok=True)
    write_text(path, "{}")


def finish_record(task: ScanTask, origin: Mapping[str, Any]) -> None:
    """Record what complete labels were made from."""
    written = {
        "probabilities": task.probabilities is not None,
        "labels": digest_volume(task.labels),
    }
    write_text(get_record_path(task.labels), json.dumps({**origin, **written}))


def find_pending(
    tasks: Sequence[ScanTask], settings: Mapping[str, Any], *, overwrite: bool
) -> tuple[list[ScanTask], str | None]:
    """Return the scans to segment, and a line on labels that are made again, if there are any.

    `settings` are those of the predictor. Labels that it did not write, or that were changed
    since, are replaced with `overwrite` alone.
    """
    if overwrite:
        return list(tasks), None
    with ThreadPoolExecutor() as pool:
        causes = list(pool.map(lambda task: find_cause(task, settings), tasks))
    foreign = [t.labels.name for t, cause in zip(tasks, causes, strict=True) if cause == FOREIGN]
    if foreign:
        raise UsageError(
            f"{tasks[0].labels.parent} has labels that predict did not write, or that were changed "
            f"since: {join_first(foreign)}: move them to another folder, or set overwrite to "
            "replace them"
        )
    pending = [task for task, cause in zip(tasks, causes, strict=True) if cause is not None]
    if not (outdated := [cause for cause in causes if cause]):
        return pending, None
    labels = "1 label is" if len(outdated) == 1 else f"{pluralize(len(outdated), 'label')} are"
    again = "it" if len(outdated) == 1 else "them"
    return pending, f"{labels} of {' or '.join(sorted({*outdated}))}: predicting {again} again"


def find_cause(task: ScanTask, settings: Mapping[str, Any]) -> str | None:
    """Return why a scan is to be segmented, "" if nothing would be replaced; None: it is not."""
    if not task.labels.exists():
        return ""
    try:
        record = read_json(get_record_path(task.labels))
    except (OSError, ValueError):
        return FOREIGN
    if "labels" not in record:  # interrupted
        return ""
    cause = next((CAUSES[key] for key in settings if record.get(key) != settings[key]), "")
    if not cause:
        try:
            cause = "" if record.get("scan") == digest_scan(task.scan) else CAUSES["scan"]
        except (OSError, UsageError):  # reading it says why
            return ""
    if not cause and task.done and (task.probabilities is None or record.get("probabilities")):
        return None
    return cause if record["labels"] == digest_volume(task.labels) else FOREIGN
