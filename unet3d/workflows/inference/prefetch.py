"""Segment scans, reading the next one and writing the last one's labels meanwhile."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from threading import Thread
from typing import Any, TypeVar

from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.units import format_bytes
from unet3d.workflows.inference.predictor import Predictor, PreparedScan, ScanTask
from unet3d.workflows.inference.records import digest_scan, finish_record, start_record

T = TypeVar("T")

Origin = Mapping[str, Any]
"""What labels are made from, as their record says it."""

Failure = tuple[ScanTask, Exception]


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
                start_record(task)
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
    write_labels()
    finish_record(task, origin)


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
