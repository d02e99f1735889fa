"""`unet3d predict checkpoint=... input=... output=...`: segment scans with a trained network."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from unet3d.app import get_exit_code
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import (
    DEVICE_KIND,
    PRECISION,
    TEXT,
    Kind,
    integer,
    number,
    one_of,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.data.layouts.scans import describe_ignored, find_scans
from unet3d.errors import UsageError, summarize_error
from unet3d.inference.ensemble import load_ensemble
from unet3d.inference.networks import resolve_computation
from unet3d.inference.options import (
    check_output,
    describe_mirroring,
    plan_outputs,
    resolve_flip_axes,
    summarize_predictor,
)
from unet3d.inference.predictor import Predictor, PreparedScan
from unet3d.inference.segment_scans import find_pending, segment_scans
from unet3d.inference.sharing import InferenceResult, count_processes, run_in_processes
from unet3d.memory.step.config import WindowConfig
from unet3d.text import GIB
from unet3d.types import BACKENDS


def _are_axes(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(axis) is int for axis in value)
    return is_list and set(value) <= {0, 1, 2} and len(set(value)) == len(value)


AXES = word_or(True, word_or(False, Kind("a list of the axes 0, 1 and 2", _are_axes, tuple), ()))
ONE_OR_MORE = one_or_list_of(TEXT)
CLASSES = word_or(
    "auto",
    Kind(
        "none or a list of classes",
        lambda value: value in (None, "none", []) or ONE_OR_MORE.accepts(value),
        lambda value: () if value in (None, "none", []) else ONE_OR_MORE.convert(value),
    ),
)
MEMORY = word_or("auto", replace(number("above 0"), convert=lambda value: int(value * GIB)))


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """What to segment, with which checkpoints, and how."""

    checkpoints: Annotated[tuple[Path, ...], "checkpoint"]
    input: Path
    output: Path
    windows: WindowConfig
    flip_axes: Annotated[tuple[int, ...] | None, AXES, "tta"]  # None: those of training
    precision: Annotated[str | None, PRECISION]  # None: as the first network was trained
    device: Annotated[str, DEVICE_KIND]
    devices: Annotated[int | None, word_or("auto", integer(">= 1"))]  # processes; None: one per GPU
    backend: Annotated[str, one_of(BACKENDS)]  # that runs the networks
    skip_background: Annotated[float | None, number(">= 0", "below 1")]  # None: skip no window
    prefetch: bool  # read the next scan while one is segmented
    memory_bytes: Annotated[int | None, MEMORY, "memory_gib"]  # RAM of a case; None: what is free
    keep_largest_component: Annotated[tuple[str, ...] | None, CLASSES]  # None: as in training
    save_probabilities: bool
    output_format: str  # auto, or the name of a format
    overwrite: bool
    allow_targets: tuple[str, ...]
    debug: bool

    def __post_init__(self):
        if ":" in self.device and self.devices != 1:
            raise UsageError(
                f"device={self.device} is one GPU: use device=cuda for "
                f"devices={self.devices or 'auto'}"
            )


def main(composed: ComposedConfig, folder: Path) -> int:
    """Segment all scans, in this process or shared among several."""
    windows = read_settings(WindowConfig, composed.config)
    settings = read_settings(PredictConfig, composed.config, windows=windows)
    count = count_processes(settings.device, settings.devices)
    if count > 1:
        work = partial(predict, settings)
        result = run_in_processes(work, count, settings.device, ram=settings.memory_bytes)
    else:
        result = predict(settings, (0, 1), settings.memory_bytes)
    if result.num_skipped:
        text = f"{result.num_skipped} already segmented, skipped"
        print(f"{text} (overwrite=true segments them again)")
    succeeded, seconds = result.num_tasks - len(result.failures), result.seconds
    summary = f"{succeeded} of {result.num_tasks} scans segmented, "
    summary += f"{seconds / max(1, result.num_tasks):.1f} s each, in {settings.output}"
    if result.num_different:
        summary += f"; {result.num_different} differ from the training data, see the warnings"
    print(summary)
    if result.failures:
        print(f"{len(result.failures)} failed:", *result.failures, sep="\n  ", file=sys.stderr)
    if result.out_of_memory:
        return 3
    return 1 if result.failures else 0


def predict(settings: PredictConfig, share: tuple[int, int], ram: int | None) -> InferenceResult:
    """Segment one scan after the other; report those that fail, and continue.

    A share of (n, count) is every count-th scan from the n-th on. `ram` is for one case; None: what
    is free.
    """
    check_output(settings.output)
    ensemble = load_ensemble(settings.checkpoints, settings.allow_targets)
    flip_axes = resolve_flip_axes(settings.flip_axes, ensemble, "tta")
    scans = find_scans(settings.input, ensemble.channels)
    index, count = share
    tasks = plan_outputs(
        scans,
        settings.input,
        settings.output,
        save_probabilities=settings.save_probabilities,
        output_format=settings.output_format,
    )[index::count]
    device, precision = resolve_computation(
        settings.device, settings.precision, settings.backend, ensemble.precision
    )
    predictor = Predictor(
        ensemble,
        device=device,
        precision=precision,
        overlap=settings.windows.overlap,
        batch_size=settings.windows.batch_size,
        flip_axes=flip_axes,
        keep_largest_component=settings.keep_largest_component,
        ram=ram,
        backend=settings.backend,
        skip_background=settings.skip_background,
    )
    made_with = predictor.describe_settings()
    pending, notice = find_pending(tasks, made_with, overwrite=settings.overwrite)
    if index == 0:
        print(summarize_predictor(predictor), flush=True)
        if settings.flip_axes is None:
            print(f"tta=true: {describe_mirroring(ensemble)}", flush=True)
        if (ignored := describe_ignored(settings.input)) is not None:
            print(f"warning: {ignored}", file=sys.stderr, flush=True)
    if notice is not None:
        print(notice, flush=True)
    failures: list[str] = []
    exit_codes: set[int] = set()
    num_different, start = 0, time.perf_counter()

    def compute(prepared: PreparedScan) -> Callable[[], None]:
        nonlocal num_different
        task = prepared.task
        assert task is not None
        print(prepared.memory_summary, flush=True)
        if prepared.differences:
            num_different += 1
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
        exit_codes.add(get_exit_code(error))
        failures.append(f"{task.scan.name}: {summarize_error(error)}")
        print(f"unet3d: {failures[-1]}", file=sys.stderr, flush=True)
    return InferenceResult(
        num_tasks=len(pending),
        num_skipped=len(tasks) - len(pending),
        num_different=num_different,
        failures=tuple(failures),
        out_of_memory=3 in exit_codes,
        seconds=time.perf_counter() - start,
    )
