"""`unet3d predict checkpoint=... input=... output=...`: segment scans with a trained network."""

import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import summarize_error
from unet3d.workflows.inference.build import build_inference
from unet3d.workflows.inference.predictor import Predictor, ScanTask


def main(request: ComposedConfig, folder: Path) -> int:
    """One scan after the other; those that fail are reported, and the others still run."""
    job = build_inference(request)
    print(job.introduction)
    if job.skipped:
        print(
            f"{job.skipped} have a result already and are skipped (overwrite=true does them anew)"
        )
    failed, unlike, began = [], 0, time.perf_counter()
    for number, task in enumerate(job.tasks, start=1):
        try:
            unlike += segment_scan(
                job.predictor, task, f"{number}/{len(job.tasks)} {task.scan.name}"
            )
        except Exception as error:
            if request.config.debug:
                traceback.print_exc()
            failed.append(f"{task.scan.name}: {summarize_error(error)}")
            print(f"unet3d: {failed[-1]}", file=sys.stderr)
    done = len(job.tasks) - len(failed)
    seconds = (time.perf_counter() - began) / max(1, len(job.tasks))
    print(
        f"{done} of {len(job.tasks)} scans segmented, {seconds:.1f} s each, in {job.output}"
        + (f"; {unlike} unlike the training data, see the warnings" if unlike else "")
    )
    if failed:
        print(f"{len(failed)} failed:", *failed, sep="\n  ", file=sys.stderr)
    return 1 if failed else 0


def segment_scan(predictor: Predictor, task: ScanTask, title: str) -> bool:
    """Whether the scan was warned of; its forecast comes before it, and a bar over its windows."""
    ready = predictor.prepare(task)
    print(ready.forecast, flush=True)
    if ready.unlike:
        files = ", ".join(file.name for file in task.scan.files)
        said = "; ".join(ready.unlike)
        print(f"warning: {files} is unlike the training data: {said}", file=sys.stderr, flush=True)
    total = ready.plan.windows
    with tqdm(total=total, desc=title, unit="window", leave=False, disable=None) as bar:
        predictor.predict(ready, told=bar.update, say=tqdm.write)
    return bool(ready.unlike)
