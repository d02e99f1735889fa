"""`unet3d predict checkpoint=... input=... output=...`: segment scans with a trained network."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from unet3d.app import get_exit_code
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, one_of, read_settings, word_or
from unet3d.data.formats.volumes import OUTPUT_FORMATS, find_format, read_header
from unet3d.data.layouts.scans import describe_ignored, find_scans
from unet3d.errors import UsageError, summarize_error
from unet3d.inference.ensemble import load_ensemble
from unet3d.inference.options import PredictorConfig, build_predictor
from unet3d.inference.scans import (
    count_processes,
    find_pending,
    plan_outputs,
    run_in_processes,
    segment_scans,
)
from unet3d.inference.tasks import PreparedScan


@dataclass(frozen=True, kw_only=True)
class PredictConfig(PredictorConfig):
    """What to segment, with which checkpoints, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    input: Path
    output: Path
    output_format: Annotated[str, one_of(("auto", *OUTPUT_FORMATS))]
    save_probabilities: bool
    overwrite: bool
    devices: Annotated[int | None, word_or("auto", integer(">= 1"))]  # processes; None: one per GPU
    prefetch: bool  # read the next scan while one is segmented
    debug: bool

    def __post_init__(self):
        if ":" in self.device and self.devices != 1:
            raise UsageError(
                f"device={self.device} is one GPU: use device=cuda for "
                f"devices={self.devices or 'auto'}"
            )


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """What became of a process's share of the scans."""

    labels: set[Path]  # that were to be written
    skipped: set[Path]  # labels that there were
    different: set[Path]  # labels of scans that differ from the training data
    failures: dict[str, int]  # lines about scans, with the exit codes of their errors
    seconds: float  # without loading the networks


def main(composed: ComposedConfig, folder: Path) -> int:
    """Segment all scans, in this process or shared among several."""
    settings = read_settings(PredictConfig, composed.config)
    count = count_processes(settings.device, settings.devices)
    if count > 1:
        work = partial(predict, settings)
        results = run_in_processes(work, count, settings.device, ram=settings.memory_bytes)
    else:
        results = [predict(settings, (0, 1), settings.memory_bytes)]
    if skipped := set().union(*(result.skipped for result in results)):
        print(f"{len(skipped)} already segmented, skipped (overwrite=true segments them again)")
    failures = {line: code for r in results for line, code in r.failures.items()}
    labels = set().union(*(result.labels for result in results))
    for path in sorted(labels) if not failures else ():
        if not path.exists():
            failures[f"{path.name}: slabs of it are missing: run the same command again"] = 1
    num_tasks = len(labels)
    seconds = max(result.seconds for result in results) / max(1, num_tasks)
    summary = f"{num_tasks - len(failures)} of {num_tasks} scans segmented, "
    summary += f"{seconds:.1f} s each, in {settings.output}"
    if different := set().union(*(result.different for result in results)):
        summary += f"; {len(different)} differ from the training data, see the warnings"
    print(summary)
    if failures:
        print(f"{len(failures)} failed:", *failures, sep="\n  ", file=sys.stderr)
    if 3 in failures.values():
        return 3
    return 1 if failures else 0


def predict(settings: PredictConfig, share: tuple[int, int], ram: int | None) -> ShardResult:
    """Segment one scan after the other; report those that fail, and continue.

    A share of (n, count) is every count-th scan from the n-th on. `ram` is for one case; None: what
    is free.
    """
    ensemble = load_ensemble(settings.checkpoints, settings.allow_targets)
    scans = find_scans(settings.input, ensemble.channels)
    index, count = share
    slabs = index // len(scans), len(range(index % len(scans), count, len(scans)))
    predictor = build_predictor(ensemble, settings, ram=ram, share=slabs)
    tasks = plan_outputs(
        scans,
        settings.input,
        settings.output,
        save_probabilities=settings.save_probabilities,
        output_format=settings.output_format,
    )[index % len(scans) :: count]
    made_with = predictor.describe_settings()
    pending, notice = find_pending(tasks, made_with, overwrite=settings.overwrite)
    if index == 0:
        if len(settings.checkpoints) > 1:  # a pattern may match more than was meant
            print(f"ensemble of {', '.join(map(str, settings.checkpoints))}")
        print(predictor, flush=True)
        is_auto = settings.flip_axes == "auto"
        if settings.flip_axes is None or (is_auto and ensemble.uses_tta):
            value = "auto" if is_auto else "true"
            print(f"tta={value}: {ensemble.describe_mirroring()}", flush=True)
        if (ignored := describe_ignored(settings.input)) is not None:
            print(f"warning: {ignored}", file=sys.stderr, flush=True)
    if notice is not None:
        print(notice, flush=True)
    failures: dict[str, int] = {}
    different, start = set[Path](), time.perf_counter()
    assumed: set[str] = set()

    def compute(prepared: PreparedScan) -> Callable[[], bool | None]:
        task = prepared.task
        assert task is not None
        if slabs[0]:  # the first process says it
            return predictor.compute(prepared)
        shared = f", shared by {slabs[1]} processes" if slabs[1] > 1 and prepared.is_stored else ""
        print(f"{prepared.memory_summary}{shared}", flush=True)
        header, format = read_header(task.scan.files[0]), find_format(task.scan.files[0])
        is_oriented = header.has_orientation and (format.names_axes or not ensemble.names_axes)
        if not is_oriented and header.orientation not in assumed:
            assumed.add(header.orientation)  # said once, not of every scan
            warning = f"warning: {task.scan.files[0].name} has no orientation: "
            warning += f"{header.orientation} is assumed, here and in other such scans"
            print(warning, file=sys.stderr, flush=True)
        if prepared.differences:
            different.add(task.labels)
            files = ", ".join(file.name for file in task.scan.files)
            differences = "; ".join(prepared.differences)
            warning = f"warning: {files} differs from the training data: {differences}"
            print(warning, file=sys.stderr, flush=True)
        number = f"{pending.index(task) + 1}/{len(pending)}"
        with tqdm(
            total=prepared.plan.windows,
            desc=f"{number} {task.scan.name}",
            unit="window",
            leave=False,
            disable=True if count > 1 else None,  # None: unless it is a terminal
        ) as bar:
            return predictor.compute(prepared, on_windows=bar.update, log=tqdm.write)

    for task, error in segment_scans(
        predictor, pending, prefetch=settings.prefetch, compute=compute
    ):
        if settings.debug:
            traceback.print_exception(error)
        line = f"{task.scan.name}: {summarize_error(error)}"
        failures[line] = get_exit_code(error)
        print(f"unet3d: {line}", file=sys.stderr, flush=True)
    return ShardResult(
        labels={task.labels for task in pending},
        skipped={task.labels for task in tasks if task not in pending},
        different=different,
        failures=failures,
        seconds=time.perf_counter() - start,
    )
