"""Segment the scans that have no labels yet, reading the next and writing the last meanwhile.

A record beside labels says what they were made from: only labels that would be the same are
skipped. It is a hidden file for each file of labels, so that processes which share a folder never
write to the same one. It is empty while its labels are replaced: after a kill they are made again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.cache import digest_volume
from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.errors import UsageError
from unet3d.files import read_json, write_text
from unet3d.inference.predictor import Predictor, PreparedScan, ScanTask
from unet3d.text import format_bytes, join_first, pluralize

T = TypeVar("T")

Origin = Mapping[str, Any]
"""What labels are made from, as their record says it."""

Failure = tuple[ScanTask, Exception]

FOLDER = ".unet3d"

CAUSES = {"checkpoints": "another checkpoint", "options": "other options", "scan": "another scan"}
"""Why existing labels are made again, by the entry of the record that differs."""

FOREIGN = "foreign"
"""Instead of a cause: the labels may be somebody's work."""


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
    verb, again = ("is", "it") if len(outdated) == 1 else ("are", "them")
    labels, others = pluralize(len(outdated), "label"), " or ".join(sorted({*outdated}))
    return pending, f"{labels} {verb} of {others}: predicting {again} again"


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


@dataclass(frozen=True)
class _Writing:
    task: ScanTask
    nbytes: int
    future: Future[None]

    def list_failures(self) -> list[Failure]:
        """Wait for the labels."""
        error = self.future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return [] if error is None else [(self.task, error)]


def segment_scans(
    predictor: Predictor,
    tasks: Sequence[ScanTask],
    *,
    prefetch: bool,
    compute: Callable[[PreparedScan], Callable[[], None]] | None = None,
) -> Iterator[Failure]:
    """Segment scans in their order, record what labels are made from, and yield those that failed.

    With `prefetch`, threads read the next scan and write the last labels, as far as a scan leaves
    RAM of what a case may take. `compute` segments a scan and returns what writes its labels, as
    `predictor.compute`, its default, does.
    """
    compute = compute or predictor.compute
    reading: Future[tuple[Origin, PreprocessedScan]] | None = None
    writing: _Writing | None = None
    try:
        for task, next_task in zip(tasks, [*tasks[1:], None], strict=False):
            read, reading = reading, None
            try:
                origin, scan = _read(predictor, task) if read is None else read.result()
                prepared = predictor.plan(task, scan)
                del read, scan  # or they would keep the image of a scan that is done
                if writing and (writing.nbytes > prepared.spare_ram or writing.future.done()):
                    yield from writing.list_failures()
                    writing = None
                if prefetch and next_task is not None:
                    spare = prepared.spare_ram - (writing.nbytes if writing else 0)
                    with suppress(Exception):  # an invalid file is reported when it is its turn
                        needed = predictor.estimate_reading(next_task)
                        if needed <= spare:
                            reading = start_in_thread(_read, predictor, next_task, spare)
                            summary = f"{format_bytes(needed)} to read the next"
                            summary = f"{prepared.memory_summary}; {summary}"
                            prepared = replace(prepared, memory_summary=summary)
                record = get_record_path(task.labels)
                record.parent.mkdir(exist_ok=True)
                write_text(record, "{}")  # until the labels are written
                write_labels, nbytes = compute(prepared), prod(prepared.scan.grid.file_shape)
                del prepared
                if writing:
                    yield from writing.list_failures()
                    writing = None
                if prefetch:
                    future = start_in_thread(_write, task, write_labels, origin)
                    writing = _Writing(task, nbytes, future)
                else:
                    _write(task, write_labels, origin)
                del write_labels
            except Exception as error:
                yield task, error
        if writing:
            yield from writing.list_failures()
    finally:
        if writing:
            wait([writing.future])


def _read(
    predictor: Predictor, task: ScanTask, ram: int | None = None
) -> tuple[Origin, PreprocessedScan]:
    """Return a scan, and what its labels are made from before it is read: it may be replaced."""
    origin = {**predictor.describe_settings(), "scan": digest_scan(task.scan)}
    return origin, predictor.read(task, ram)


def _write(task: ScanTask, write_labels: Callable[[], None], origin: Origin) -> None:
    """Write labels, and record what they were made from."""
    write_labels()
    written = {
        "probabilities": task.probabilities is not None,
        "labels": digest_volume(task.labels),
    }
    write_text(get_record_path(task.labels), json.dumps({**origin, **written}))


def start_in_thread(work: Callable[..., T], *arguments: object) -> Future[T]:
    """Call a function in a thread that an interrupted program does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def digest_scan(scan: ScanFiles) -> list[str]:
    """Return a digest of the contents of each file of a scan."""
    return [digest_volume(file) for file in scan.files]


def get_record_path(labels: Path) -> Path:
    """Return the file of a record."""
    return labels.parent / FOLDER / f"{labels.name}.json"
