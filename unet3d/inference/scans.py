"""Segment the scans that have no labels yet, reading the next and writing the last meanwhile.

A record beside labels says what they were made from: only labels that would be the same are
skipped. It is a hidden file for each file of labels, so that processes which share a folder never
write to the same one. It names no labels while these are replaced: a kill leaves them to be made.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from unet3d.data.formats.volumes import OUTPUT_FORMATS, SUFFIX_LIST, split_suffix
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.cache import digest_volume
from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.data.preprocessing.regions import RegionImage
from unet3d.errors import DoesNotFitError, Interrupted, RunError, UsageError
from unet3d.files import read_json, remove_temporary_files, write_text
from unet3d.inference.predictor import USABLE_FRACTION, Predictor
from unet3d.inference.stored_scans import (
    get_draft_paths,
    get_probability_path,
    get_record_path,
    remove,
)
from unet3d.inference.tasks import PreparedScan, ScanTask
from unet3d.machine import get_available_bytes, resolve_device
from unet3d.signals import SignalListener
from unet3d.text import join_first, pluralize

T = TypeVar("T")

Failure = tuple[ScanTask, Exception]

Work = Callable[[tuple[int, int], int | None], T]
"""Segments a share (n, count) of the scans, every count-th from the n-th on, within some RAM.

Where there are more processes than scans, they share the slabs of a scan that is read by parts.
"""

MISSING, OUTDATED, NOT_OURS, TAKEN, OTHER = "missing", "outdated", "foreign", "taken", "other"
"""Why a scan is segmented; foreign files may be somebody's work: labels, or probabilities."""

KEPT = {
    "unprocessed": "was segmented by parts, which keeps all components",
    "changed": "was changed since, or lost a part, and is kept",
}
"""Why labels that are kept differ from those that the same command would write again."""


def plan_outputs(
    scans: Sequence[ScanFiles],
    source: Path,
    output: Path,
    *,
    save_probabilities: bool = False,
    output_format: str = "auto",
) -> list[ScanTask]:
    """Return where each scan's results go, and make the folder for them."""
    is_file = bool(split_suffix(output)[1])
    is_other_file = output.exists() or re.fullmatch(r"\.[A-Za-z]{2,5}", output.suffix)
    if is_other_file and not is_file and not output.is_dir():
        raise UsageError(
            f"output={output} must be a folder, or for a single scan a file that ends in "
            f"{SUFFIX_LIST}"
        )
    if is_file and output_format != "auto":
        raise UsageError(f"output={output} names a format: leave out output_format={output_format}")
    if is_file and len(scans) > 1:
        raise UsageError(f"output={output} is one file, but there are {len(scans)} scans")
    folder = output.parent if is_file else output
    images = source if source.is_dir() else source.parent
    if not is_file and os.path.realpath(folder) == os.path.realpath(images):
        raise UsageError(f"output={output} must not be the folder of the images")
    probabilities = folder / "probabilities"
    (probabilities if save_probabilities else folder).mkdir(parents=True, exist_ok=True)
    suffix = OUTPUT_FORMATS.get(output_format)
    return [
        ScanTask(
            scan=scan,
            labels=output if is_file else folder / f"{scan.name}{suffix or scan.suffix}",
            probabilities=probabilities / f"{name}.nii" if save_probabilities else None,
        )
        for scan in scans
        for name in [split_suffix(output)[0] if is_file else scan.name]
    ]


def find_pending(
    tasks: Sequence[ScanTask], settings: Mapping[str, Any], *, overwrite: bool
) -> tuple[list[ScanTask], str | None]:
    """Return the scans to segment, and lines on labels that are made again, or kept as they are.

    `settings` are those of the predictor. Labels that it did not write, that were changed since, or
    of a scan of the same name elsewhere, are replaced with `overwrite` alone.
    """
    if overwrite:
        return list(tasks), None
    with ThreadPoolExecutor() as pool:
        causes = list(pool.map(lambda task: find_reason_to_segment(task, settings), tasks))
    pairs = list(zip(tasks, causes, strict=True))
    if foreign := [task.labels.name for task, cause in pairs if cause == NOT_OURS]:
        raise UsageError(
            f"{tasks[0].labels.parent} has labels that predict did not write, or that were changed "
            f"since: {join_first(foreign)}: move them to another folder, or set overwrite to "
            "replace them"
        )
    if others := [task.labels.name for task, cause in pairs if cause == OTHER]:
        raise UsageError(
            f"{tasks[0].labels.parent} has labels of other scans with the same names: "
            f"{join_first(others)}: set another output folder, or overwrite to replace them"
        )
    if taken := [task.labels.name for task, cause in pairs if cause == TAKEN]:
        raise UsageError(
            f"{tasks[0].labels.parent / 'probabilities'} has files that are not those of "
            f"{join_first(taken)}: move them to another folder, or set overwrite to replace them"
        )
    notices: list[str] = []
    if outdated := causes.count(OUTDATED):
        labels = pluralize(outdated, "label")
        notices.append(f"predicting {labels} again that other checkpoints, options or scans made")
        if "region" in settings["options"]:
            notices.append("their voxels outside of region= become 0")
        again = [task for task, cause in pairs if cause == OUTDATED and task.probabilities is None]
        if any(locate_probabilities(t.labels, read_record(t.labels)) for t in again):
            notices.append("removing the probabilities that were saved with them")
    for reason, meaning in KEPT.items():
        if kept := [task.labels.name for task, cause in pairs if cause == reason]:
            notices.append(f"{join_first(kept)} {meaning}: overwrite=true segments it again")
    pending = [task for task, cause in pairs if cause is not None and cause not in KEPT]
    return pending, "\n".join(notices) or None


def find_reason_to_segment(task: ScanTask, settings: Mapping[str, Any]) -> str | None:
    """Return why a scan is to be segmented; None or a key of KEPT: it is not."""
    record = read_record(task.labels)
    if record is None and task.labels.exists():
        return NOT_OURS
    own, file = locate_probabilities(task.labels, record), task.probabilities
    files = [] if file is None else [file, get_probability_path(file, task.labels)]
    if any(path.exists() and path != own for path in files):
        return TAKEN
    if record is None or not task.labels.exists() or "labels" not in record:  # interrupted
        return MISSING
    try:
        origin = {**settings, "scan": list(map(digest_volume, task.scan.files))}
    except (OSError, UsageError):  # reading it says why
        return MISSING
    is_complete = file is None or (own is not None and own.exists())
    is_unchanged = record["labels"] == digest_volume(task.labels)
    if is_complete and origin.items() <= record.items():
        options = settings["options"]
        is_wanted = options["largest_component_labels"] and "region" not in options
        is_unprocessed = is_wanted and record.get("is_by_parts")
        return "unprocessed" if is_unprocessed else None if is_unchanged else "changed"
    if not is_unchanged:
        return NOT_OURS
    files = list_files(task)
    is_other = record.get("files", files) != files and record["scan"] != origin["scan"]
    return OTHER if is_other else OUTDATED


def list_files(task: ScanTask) -> list[str]:
    """Return the files of a scan as a record names them."""
    return [os.path.realpath(file) for file in task.scan.files]


def read_record(labels: Path) -> dict[str, Any] | None:
    """Return what is known of labels; None if `predict` did not write them."""
    with suppress(OSError, ValueError):
        return read_json(get_record_path(labels))
    return None


def locate_probabilities(labels: Path, record: Mapping[str, Any] | None) -> Path | None:
    """Return the file or folder of the probabilities that were written with labels.

    It is below their folder, whatever a record says that came with a folder of somebody else.
    """
    path = Path((record or {}).get("probabilities") or "")
    is_below = path.name and not path.is_absolute() and ".." not in path.parts
    return labels.parent / path if is_below else None


def revoke_probabilities(records: Path, name: str) -> None:
    """Note that probabilities are no longer those of the labels that had them."""
    for record in records.glob("*.json"):
        with suppress(OSError, ValueError):
            content = read_json(record)
            if content.get("probabilities") == name:
                write_text(record, json.dumps({**content, "probabilities": None}))


def segment_scans(
    predictor: Predictor,
    tasks: Sequence[ScanTask],
    *,
    prefetch: bool,
    compute: Callable[[PreparedScan], Callable[[], Any]] | None = None,
) -> Iterator[Failure]:
    """Segment scans in their order, record what labels are made from, and yield those that failed.

    With `prefetch`, threads read the next scan and write the last labels, as far as a scan leaves
    RAM of what a case may take. `compute` segments a scan and returns what writes its labels, as
    `predictor.compute`, its default, does.
    """
    compute = compute or predictor.compute
    reading: Future[tuple[dict[str, Any], PreprocessedScan]] | None = None
    writing: Future[list[Failure]] | None = None
    written_bytes = 0  # held by `writing`
    with ThreadPoolExecutor() as pool:
        for task, next_task in zip(tasks, [*tasks[1:], None], strict=False):
            read, reading = reading, None
            try:
                origin, scan = _read(predictor, task) if read is None else read.result()
                prepared = replace(_plan(predictor, task, scan), origin=origin)
                del read, scan  # or they would keep the image of a scan that is done
                if predictor.share[0] >= (len(prepared.plan.slabs) if prepared.is_stored else 1):
                    continue  # other processes segment all of it
                if writing and written_bytes > prepared.spare_ram:
                    yield from writing.result()
                    writing, written_bytes = None, 0
                if prefetch and next_task is not None:
                    spare = prepared.spare_ram - written_bytes
                    with suppress(Exception):  # an invalid file is reported when it is its turn
                        if predictor.estimate_reading(next_task) <= spare:
                            reading = pool.submit(_read, predictor, next_task, spare)
                get_record_path(task.labels).parent.mkdir(exist_ok=True)
                probabilities = task.probabilities
                if probabilities is not None and prepared.is_stored:
                    probabilities = get_probability_path(probabilities, task.labels)
                written = None
                if probabilities is not None:
                    written = os.path.relpath(probabilities, task.labels.parent)
                if not predictor.share[0]:
                    _clear(task, written)
                    for path in () if prepared.is_stored else get_draft_paths(task.labels):
                        remove(path)  # after a kill, when there was less RAM
                write_labels, nbytes = compute(prepared), prod(prepared.scan.grid.file_shape)
                origin = {**origin, "is_by_parts": prepared.is_stored, "probabilities": written}
                nbytes *= 0 if prepared.is_stored else predictor.label_bytes
                del prepared
                if writing:
                    yield from writing.result()
                writing = pool.submit(_write, task, write_labels, origin)
                written_bytes = nbytes
                del write_labels
                if not prefetch:
                    yield from writing.result()
                    writing = None
            except Exception as error:
                yield task, error
        if writing:
            yield from writing.result()


def _read(
    predictor: Predictor, task: ScanTask, ram: int | None = None
) -> tuple[dict[str, Any], PreprocessedScan]:
    """Return a scan, and what its labels are made from before it is read: it may be replaced."""
    scan = list(map(digest_volume, task.scan.files))
    origin = {"scan": scan, "files": list_files(task)}
    return predictor.describe_settings() | origin, predictor.read(task, ram)


def _plan(predictor: Predictor, task: ScanTask, scan: PreprocessedScan) -> PreparedScan:
    """Plan the segmentation of a scan; by parts, where reading it fits and the rest does not."""
    try:
        return predictor.plan(task, scan)
    except DoesNotFitError:
        parts = None
        if not isinstance(scan.image, RegionImage):
            with suppress(UsageError, DoesNotFitError):  # files that are not read by parts
                parts = predictor.read(task, 0)
        if parts is None:
            raise
    return predictor.plan(task, parts)


def _clear(task: ScanTask, probabilities: str | None) -> None:
    """Remove what is no longer true of a scan, and record that its labels are being made."""
    record = get_record_path(task.labels)
    for path in filter(None, (record, task.labels, task.probabilities)):
        remove_temporary_files(path)  # after a kill
    written = read_record(task.labels) or {}
    if old := locate_probabilities(task.labels, written):  # of other labels
        write_text(record, json.dumps({"probabilities": written["probabilities"]}))
        remove(old)
        if probabilities is None:  # what a kill has left of them
            remove(old.with_name(f".part-{old.name}"))
    if probabilities is not None and (task.labels.parent / probabilities).exists():
        revoke_probabilities(record.parent, probabilities)  # overwrite=true takes them
    write_text(record, json.dumps({"probabilities": probabilities}))


def _write(
    task: ScanTask, write_labels: Callable[[], Any], origin: Mapping[str, Any]
) -> list[Failure]:
    """Write labels, and record what they were made from; return the task if it fails.

    `write_labels` returns False if another process writes them.
    """
    try:
        if write_labels() is False:
            return []
        content = {**origin, "labels": digest_volume(task.labels)}
        write_text(get_record_path(task.labels), json.dumps(content))
    except Exception as error:
        return [(task, error)]
    return []


def count_processes(device: str, devices: int | None) -> int:
    """Return how many processes share the scans; None: one per GPU."""
    has_gpu = resolve_device(device, "device") == "cuda"
    num_gpus = torch.cuda.device_count() if has_gpu else None
    if devices is None:
        return num_gpus or 1
    if num_gpus is not None and devices > num_gpus:
        raise UsageError(f"devices={devices}, but there are {num_gpus} GPUs")
    return devices


def run_in_processes(work: Work[T], count: int, device: str, *, ram: int | None) -> list[T]:
    """Call `work` in `count` processes, each with its share of the scans and of the RAM.

    An error of a process, not of one of its scans, is raised when the others have ended.
    """
    if ram is None and (free := get_available_bytes(torch.device("cpu"))) is not None:
        ram = int(USABLE_FRACTION * free)
    share_ram, threads = ram and ram // count, max(1, torch.get_num_threads() // count)
    run = partial(_run_share, work, count, share_ram, device, threads)
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        try:
            return list(pool.map(run, range(count)))
        except BrokenProcessPool as error:
            raise RunError(
                "a worker process (devices=) died with scans left to segment, perhaps because the "
                "machine is out of memory; run the same command again for those that are left"
            ) from error
        except (Interrupted, KeyboardInterrupt):
            for process in active_children():
                process.terminate()  # it removes what it has half written
            raise


def _run_share(
    work: Work[Any], count: int, ram: int | None, device: str, threads: int, number: int
) -> Any:
    """Work on a share of the scans, in a process of its own; None: it was interrupted."""
    with suppress(Interrupted, KeyboardInterrupt), SignalListener().listening():
        if resolve_device(device, "device") == "cuda":
            torch.cuda.set_device(number)
        else:
            torch.set_num_threads(threads)
        return work((number, count), ram)
