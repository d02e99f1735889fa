"""`unet3d predict checkpoint=... input=... output=...`: segment scans with a trained network."""

import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from unet3d.cli.error_messages import get_exit_code
from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.inference import InferenceSettings, parse_inference
from unet3d.errors import summarize_error
from unet3d.text import escape_unprintable
from unet3d.workflows.inference.build import build_inference
from unet3d.workflows.inference.predictor import ScanTask
from unet3d.workflows.inference.prefetch import CaseQueue
from unet3d.workflows.inference.sharing import InferenceResult, count_processes, run_in_processes


def main(composed: ComposedConfig, folder: Path) -> int:
    """Segment all scans, in this process or shared among several."""
    settings = parse_inference(composed)
    count = count_processes(settings)
    if count > 1:
        result = run_in_processes(settings, count, segment_scans)
    else:
        result = segment_scans(settings)
    if result.num_skipped:
        text = f"{result.num_skipped} already segmented, skipped"
        print(f"{text} (overwrite=true segments them again)")
    succeeded = result.num_tasks - len(result.failures)
    seconds = result.seconds / max(1, result.num_tasks)
    summary = f"{succeeded} of {result.num_tasks} scans segmented, {seconds:.1f} s each, in "
    summary += str(settings.output)
    if result.num_different:
        summary += f"; {result.num_different} differ from the training data, see the warnings"
    print(summary)
    if result.failures:
        print(f"{len(result.failures)} failed:", *result.failures, sep="\n  ", file=sys.stderr)
    if result.out_of_memory:
        return 3
    return 1 if result.failures else 0


def segment_scans(settings: InferenceSettings) -> InferenceResult:
    """Segment one scan after the other; report those that fail, and continue."""
    job = build_inference(settings)
    index, count = settings.share
    if index == 0:
        print(job.summary, flush=True)
        if job.ignored is not None:
            print(f"warning: {job.ignored}", file=sys.stderr, flush=True)
    if job.notice is not None:
        print(job.notice, flush=True)
    failures: list[str] = []
    exit_codes: set[int] = set()
    num_different, start = 0, time.perf_counter()

    def report(task: ScanTask, error: Exception) -> None:
        if settings.debug:
            traceback.print_exception(error)
        exit_codes.add(get_exit_code(error))
        failures.append(escape_unprintable(f"{task.scan.name}: {summarize_error(error)}"))
        print(f"unet3d: {failures[-1]}", file=sys.stderr, flush=True)

    with CaseQueue(job.predictor, job.tasks, prefetch=settings.prefetch) as queue:
        for number, task in enumerate(job.tasks, start=1):
            title = escape_unprintable(f"{number}/{len(job.tasks)} {task.scan.name}")
            try:
                num_different += segment_scan(queue, task, None if count > 1 else title)
            except Exception as error:
                report(task, error)
            for failure in queue.take_failures(wait=number == len(job.tasks)):
                report(*failure)
    return InferenceResult(
        num_tasks=len(job.tasks),
        num_skipped=job.num_skipped,
        num_different=num_different,
        failures=tuple(failures),
        out_of_memory=3 in exit_codes,
        seconds=time.perf_counter() - start,
    )


def segment_scan(queue: CaseQueue, task: ScanTask, title: str | None) -> bool:
    """Segment a scan, with a progress bar if it has a title.

    Return whether it differs from the training data.
    """
    scan = queue.prepare(task)
    print(escape_unprintable(scan.memory_summary), flush=True)
    if scan.differences:
        files = escape_unprintable(", ".join(file.name for file in task.scan.files))
        differences = "; ".join(scan.differences)
        print(
            f"warning: {files} differs from the training data: {differences}",
            file=sys.stderr,
            flush=True,
        )
    total, hidden = scan.plan.windows, None if title else True  # None: unless it is a terminal
    with tqdm(total=total, desc=title, unit="window", leave=False, disable=hidden) as bar:
        queue.predict(scan, on_windows=bar.update, log=tqdm.write)
    return bool(scan.differences)
