"""`unet3d predict checkpoint=... input=... output=...`: segment scans with a trained network."""

import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.inference import parse_inference
from unet3d.errors import summarize_error
from unet3d.workflows.inference.build import build_inference
from unet3d.workflows.inference.predictor import ScanTask
from unet3d.workflows.inference.prefetch import CaseQueue


def main(composed: ComposedConfig, folder: Path) -> int:
    """Segment one scan after the other; report those that fail, and continue."""
    settings = parse_inference(composed)
    job = build_inference(settings)
    print(job.summary)
    if job.num_skipped:
        print(f"{job.num_skipped} already segmented, skipped (overwrite=true segments them again)")
    failed: list[str] = []
    num_different, start = 0, time.perf_counter()

    def report(task: ScanTask, error: Exception) -> None:
        if settings.debug:
            traceback.print_exception(error)
        failed.append(f"{task.scan.name}: {summarize_error(error)}")
        print(f"unet3d: {failed[-1]}", file=sys.stderr)

    with CaseQueue(job.predictor, job.tasks, prefetch=settings.prefetch) as queue:
        for number, task in enumerate(job.tasks, start=1):
            title = f"{number}/{len(job.tasks)} {task.scan.name}"
            try:
                num_different += segment_scan(queue, task, title)
            except Exception as error:
                report(task, error)
            for failure in queue.take_failures(wait=number == len(job.tasks)):
                report(*failure)
    succeeded = len(job.tasks) - len(failed)
    seconds = (time.perf_counter() - start) / max(1, len(job.tasks))
    summary = f"{succeeded} of {len(job.tasks)} scans segmented, {seconds:.1f} s each, in "
    summary += str(job.output)
    if num_different:
        summary += f"; {num_different} differ from the training data, see the warnings"
    print(summary)
    if failed:
        print(f"{len(failed)} failed:", *failed, sep="\n  ", file=sys.stderr)
    return 1 if failed else 0


def segment_scan(queue: CaseQueue, task: ScanTask, title: str) -> bool:
    """Segment a scan with a progress bar; return whether it differs from the training data."""
    scan = queue.prepare(task)
    print(scan.memory_summary, flush=True)
    if scan.differences:
        files = ", ".join(file.name for file in task.scan.files)
        differences = "; ".join(scan.differences)
        print(
            f"warning: {files} differs from the training data: {differences}",
            file=sys.stderr,
            flush=True,
        )
    total = scan.plan.windows
    with tqdm(total=total, desc=title, unit="window", leave=False, disable=None) as bar:
        queue.predict(scan, on_windows=bar.update, log=tqdm.write)
    return bool(scan.differences)
