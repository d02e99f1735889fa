"""Read the next scan and write the last one's labels while a scan is segmented."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.units import format_bytes
from unet3d.workflows.inference.predictor import Predictor, PreparedScan, ScanTask
from unet3d.workflows.inference.records import digest_scan, finish_record, start_record

T = TypeVar("T")


@dataclass(frozen=True)
class _Writing:
    task: ScanTask
    nbytes: int
    future: Future[None]


class CaseQueue:
    """Segments scans in the order of `tasks`, and records what their labels are made from.

    With `prefetch`, threads read the next scan and write the last labels, as far as a scan leaves
    RAM of what a case may take. Leaving the context waits for the labels that are being written.
    """

    def __init__(self, predictor: Predictor, tasks: Sequence[ScanTask], *, prefetch: bool):
        self.predictor, self.prefetch = predictor, prefetch
        self.next_tasks = dict(zip([task.labels for task in tasks], tasks[1:], strict=False))
        self.reading: tuple[ScanTask, Future[PreprocessedScan]] | None = None
        self.writing: _Writing | None = None
        self.failures: list[tuple[ScanTask, Exception]] = []
        self.origins: dict[ScanTask, dict[str, Any]] = {}  # what labels are made from

    def __enter__(self) -> "CaseQueue":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish_writing()

    def prepare(self, task: ScanTask) -> PreparedScan:
        """Return a scan, ready to be segmented, and begin to read the next one."""
        reading, self.reading = self.reading, None
        if reading is not None and reading[0] is task:
            prepared = self.predictor.plan(task, reading[1].result())
        else:
            self._digest(task)
            prepared = self.predictor.prepare(task)
        del reading
        next_task = self.next_tasks.get(task.labels)
        if self.prefetch and next_task is not None:
            spare = prepared.spare_ram - self._wait_for_room(prepared.spare_ram)
            with suppress(Exception):  # an invalid file is reported when it is its turn
                needed = self.predictor.estimate_reading(next_task)
                if needed <= spare:
                    self.reading = next_task, start_in_thread(self._read, next_task, spare)
                    summary = f"{prepared.memory_summary}; {format_bytes(needed)} to read the next"
                    prepared = replace(prepared, memory_summary=summary)
        return prepared

    def predict(
        self,
        prepared: PreparedScan,
        *,
        on_windows: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        """Segment a scan and write its outputs, the labels perhaps later."""
        task, nbytes = prepared.task, prod(prepared.scan.grid.file_shape)
        assert task is not None
        origin = self.origins.pop(task)
        start_record(task)
        write_labels = self.predictor.compute(prepared, on_windows=on_windows, log=log)
        self._finish_writing()

        def write() -> None:
            write_labels()
            finish_record(task, origin)

        if self.prefetch:
            self.writing = _Writing(task, nbytes, start_in_thread(write))
        else:
            write()

    def take_failures(self, *, wait: bool = False) -> list[tuple[ScanTask, Exception]]:
        """Return the tasks whose labels could not be written, and why; `wait` for the last one."""
        if wait:
            self._finish_writing()
        failures, self.failures = self.failures, []
        return failures

    def _digest(self, task: ScanTask) -> None:
        """Note what a scan is before it is read: it may be replaced meanwhile."""
        settings = self.predictor.describe_settings()
        self.origins[task] = {**settings, "scan": digest_scan(task.scan)}

    def _read(self, task: ScanTask, ram: int) -> PreprocessedScan:
        self._digest(task)
        return self.predictor.read(task, ram)

    def _wait_for_room(self, spare: int) -> int:
        """Return the bytes of labels that are being written; if they are too many, wait."""
        if self.writing is not None and (self.writing.nbytes > spare or self.writing.future.done()):
            self._finish_writing()
        return 0 if self.writing is None else self.writing.nbytes

    def _finish_writing(self) -> None:
        if self.writing is None:
            return
        task, error = self.writing.task, self.writing.future.exception()
        self.writing = None
        if isinstance(error, Exception):
            self.failures.append((task, error))
        elif error is not None:
            raise error


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
