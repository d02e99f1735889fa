"""Segment scans: preprocess, plan the memory, run the windows, write the labels."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from unet3d.data.checks import check_scan_headers
from unet3d.data.formats.nifti import get_probability_bytes, open_probability_file
from unet3d.data.formats.volumes import check_target, find_format, read_header, write_labels
from unet3d.data.preprocessing.cache import estimate_preprocessing_cost
from unet3d.data.preprocessing.pipeline import PreprocessedScan, check_channels, count_nonfinite
from unet3d.data.preprocessing.regions import (
    RegionImage,
    open_channels,
    preprocess_stored_scan,
)
from unet3d.data.preprocessing.statistics import describe_differences
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference import postprocess
from unet3d.inference.ensemble import Ensemble
from unet3d.inference.heads import split_heads
from unet3d.inference.label_writer import LabelFunction, Output, choose_label_function
from unet3d.inference.memory_plan import (
    Budget,
    VolumeToSegment,
    check_plan,
    choose_plan,
    describe_cost,
)
from unet3d.inference.networks import measure_window_memory, open_network, record_networks
from unet3d.inference.sliding_window import BackgroundDetector, WindowRunner, list_flips, segment
from unet3d.inference.stored_scans import (
    LabelStore,
    finish,
    get_probability_path,
    quantize,
    segment_stored,
    share_slabs,
)
from unet3d.inference.tasks import PreparedScan, ScanTask
from unet3d.inference.window_grid import WindowGrid
from unet3d.machine import Precision, get_available_bytes, get_free_bytes
from unet3d.text import MIB, describe_classes, format_bytes, join_first, pluralize
from unet3d.types import IGNORE_LABEL, get_label_dtype

USABLE_FRACTION = 0.9
"""Fraction of the free memory that a case may take."""

HEAP_ALLOWANCE = 64 * MIB
"""Freed small blocks that the C library may keep."""

HOPELESS = 1000
"""Times the available RAM, for a scan of an assumed size that would be segmented by parts."""

MAX_REMOVED_SHARE = 0.1
"""Share of a class in a scan that postprocessing may remove without a warning."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Predictor:
    """Segment scans with the networks of an ensemble."""

    ensemble: Ensemble
    _: KW_ONLY
    device: torch.device
    precision: Precision
    overlap: float  # fraction of a window that its neighbor covers, too
    batch_size: int  # windows at a time
    flip_axes: Sequence[int] = ()  # for test-time augmentation
    keep_largest_component: Sequence[str] | None = ()  # classes; None: those of training
    ram: int | None = None  # bytes that a case may take; None: what is free
    backend: str = "torch"  # what runs the networks
    skip_background: float | None = None  # level of a BackgroundDetector; None: compute all windows
    region: Sequence[tuple[int, int]] | None = None  # along the axes of files; None: all of a scan
    share: tuple[int, int] = (0, 1)  # (n, count): every count-th slab of a scan from the n-th on

    def __post_init__(self):
        ensemble, classes = self.ensemble, self.ensemble.classes
        chosen = self.keep_largest_component
        chosen = ensemble.keep_largest_component if chosen is None else chosen
        if unknown := [name for name in chosen if name not in classes[1:]]:
            raise UsageError(
                "keep_largest_component must be some of the classes "
                f"{join_first(classes[1:], 20)}; got {unknown[0]!r}"
            )
        self.largest_component_labels = [classes.index(name) for name in chosen]
        self.flips = list_flips(self.flip_axes)
        shape = (self.batch_size, len(ensemble.channels), *ensemble.patch_size)
        members, self.heads = list(ensemble.networks), list[nn.Conv3d]()
        if self.backend == "torch":
            members, self.heads = split_heads(members)
        self.networks = [
            open_network(network, self.backend, self.precision, self.device, shape=shape)
            for network in members
        ]
        outputs, self.window_bytes = measure_window_memory(self.networks, shape, self.device)
        self.classes = self.heads[0].out_channels if self.heads else outputs
        free = self._get_free_gpu_bytes()
        self.networks = record_networks(self.networks, shape, self.device)
        self.recorded_bytes = free - self._get_free_gpu_bytes()  # for the same windows

    def __str__(self) -> str:
        ensemble, precision = self.ensemble, self.precision
        summary = f"{ensemble}, precision {precision.used}"
        if precision.requested != precision.used:
            summary += f" (instead of {precision.requested}: {precision.reason})"
        patch, window = "x".join(map(str, ensemble.patch_size)), format_bytes(self.window_bytes)
        backend = f" with backend={self.backend}" if self.backend != "torch" else ""
        classes = describe_classes(ensemble.classes, ensemble.regions)
        single = join_first(
            [ensemble.classes[label] for label in self.largest_component_labels], 20
        )
        return (
            f"{summary}, on {self.device.type}{backend}; windows of {patch} take {window}\n"
            f"channels {', '.join(ensemble.channels)}; {classes}"
            + (f"; the largest component alone of {single}" if single else "")
        )

    def describe_settings(self) -> dict[str, Any]:
        """Return all that changes the labels of a scan by more than rounding, as plain values."""
        return {
            "checkpoints": list(self.ensemble.digests),
            "options": {
                "overlap": self.overlap,
                "flips": [list(axes) for axes in self.flips],
                "largest_component_labels": self.largest_component_labels,
                "precision": self.precision.used,
                "skip_background": self.skip_background,
                **({} if self.region is None else {"region": [*map(list, self.region)]}),
            },
        }

    def prepare(self, task: ScanTask) -> PreparedScan:
        """Read and preprocess a scan, and plan its segmentation within the free memory."""
        return self.plan(task, self.read(task))

    def prepare_array(self, channels: np.ndarray, affine: np.ndarray) -> PreparedScan:
        """Preprocess channels (C, D, H, W), and plan their segmentation within the free memory."""
        check_channels("the image", len(channels), self.ensemble.channels)
        for name, channel in zip(self.ensemble.channels, channels, strict=True):
            if count := count_nonfinite(channel[None]):
                raise UsageError(
                    f"channel {name} of the image has {pluralize(count, 'voxel')} that are NaN or "
                    "infinite: replace them"
                )
        return self.plan(None, self.ensemble.preprocessing.preprocess_channels(channels, affine))

    def estimate_reading(self, task: ScanTask) -> int:
        """Return the bytes of RAM that reading and preprocessing a scan takes."""
        return estimate_preprocessing_cost(task.scan.files, self.ensemble.preprocessing).ram

    def read(self, task: ScanTask, ram: int | None = None) -> PreprocessedScan:
        """Read and preprocess a scan within `ram` bytes; None: what a case may take."""
        if findings := list(check_scan_headers(task.scan.name, task.scan.files)):
            first, rest = findings[0], len(findings) - 1
            more = f" (and {pluralize(rest, 'more problem')})" if rest else ""
            raise UsageError(f"{first.file} {first.message}: {first.advice}{more}")
        check_target(task.labels, task.scan.files[0])
        ram = self._get_budget().ram_bytes if ram is None else ram
        needed = self.estimate_reading(task)
        preprocessing, channels = self.ensemble.preprocessing, self.ensemble.channels
        if needed <= ram and self.region is None:
            return preprocessing.preprocess_scan(task.scan.files, channels)
        stored, advice, reason = open_channels(task.scan.files), self._ram_advice, ""
        if assumed := read_header(task.scan.files[0]).assumption:  # the size depends on it
            reason, advice = f"the scan has {assumed}: ", f"write its voxel size, or {advice}"
        writes_parts, way = find_format(task.labels).writes_parts, ""
        if stored is None:
            way = "convert it to OME-Zarr or another format that is read by parts"
        elif not writes_parts:
            way = "set output_format=zarr or npy, which are written by parts"
        if way and self.region is not None:
            raise UsageError(f"region is read from {task.scan.files[0].name} by parts: {way}")
        if stored is None or not writes_parts or (reason and needed > HOPELESS * ram):
            raise DoesNotFitError(
                f"{reason}preprocessing needs {format_bytes(needed)} of RAM, "
                f"{format_bytes(ram)} are available: {advice}{way and ', or '}{way}"
            )
        if self.skip_background is not None:
            raise UsageError(
                f"skip_background needs the whole scan in memory, {format_bytes(needed)} of RAM: "
                "leave it out"
            )
        margin = [size // 2 for size in self.ensemble.patch_size]
        return preprocess_stored_scan(stored, preprocessing, channels, self.region, margin)

    def plan(self, task: ScanTask | None, scan: PreprocessedScan) -> PreparedScan:
        """Plan the segmentation of a preprocessed scan, within the free memory."""
        ensemble, budget = self.ensemble, self._get_budget(held=scan.image.nbytes)
        d, h, w = (stop - start for start, stop in scan.grid.box)
        voxels = prod(scan.grid.file_shape)
        is_stored = isinstance(scan.image, RegionImage)
        has_probabilities = task is not None and task.probabilities is not None
        stored_label_bytes = self.label_bytes + (self.classes if has_probabilities else 0)
        held = scan.image.nbytes + (0 if is_stored else self.label_bytes * voxels)
        held += HEAP_ALLOWANCE * (2 if self.heads else 1)  # blocks of logits are freed, too
        if is_stored:
            assert task is not None
            held += sum(read_header(file).buffer_bytes for file in task.scan.files)
        plan = choose_plan(
            VolumeToSegment(
                window_grid=WindowGrid(
                    size=scan.grid.shape,
                    patch=ensemble.patch_size,
                    overlap=self.overlap,
                    batch_size=self.batch_size,
                ),
                box=(d, h, w),
                channels=len(ensemble.channels),
                classes=self.classes,
                features=sum(head.in_channels for head in self.heads),
                window_bytes=self.window_bytes,
                held_bytes=held,
                stored_label_bytes=stored_label_bytes if is_stored else 0,
            ),
            budget,
            self.share[1] if is_stored else 1,
        )
        check_plan(plan, budget, self._ram_advice)
        max_ram = plan.ram_bytes
        if task is not None and not is_stored:
            max_ram = max(max_ram, self.estimate_reading(task))
        if self.largest_component_labels and not is_stored:
            max_ram = max(max_ram, held + postprocess.BYTES_PER_VOXEL * voxels)
        name = "the image" if task is None else task.scan.name
        size, cost = "x".join(map(str, scan.grid.file_shape)), replace(plan, ram_bytes=max_ram)
        memory_summary = f"{name} {size}, {self.classes} classes: {describe_cost(cost)}"
        if is_stored:
            memory_summary += f"; labels: up to {format_bytes(self.label_bytes * voxels)} on disk"
        if has_probabilities:
            file = get_probability_bytes(scan.grid.file_shape, self.classes)
            size = f"up to {format_bytes(file // 4)}" if is_stored else format_bytes(file)
            memory_summary += f"; probabilities: {size} on disk"
        normalize = ensemble.preprocessing.normalize
        differences = [
            describe_differences(scan.statistics, training, ensemble.channels, normalize)
            for training in ensemble.training_statistics
        ]
        return PreparedScan(
            name=name,
            task=task,
            scan=scan,
            plan=plan,
            max_ram=max_ram,
            spare_ram=max(0, budget.ram_bytes - max_ram),
            memory_summary=memory_summary,
            differences=differences[0] if differences and all(differences) else [],
        )

    def compute(
        self,
        prepared: PreparedScan,
        *,
        on_windows: Callable[[int], None] = lambda count: None,
        log: Callable[[str], None] = lambda message: None,
    ) -> Callable[[], bool | None]:
        """Segment a scan; return what writes the labels. `on_windows` gets how many are done."""
        task, regions = prepared.task, self.ensemble.regions
        assert task is not None
        if prepared.is_stored:
            return self._segment_stored(prepared, task, on_windows, log)
        more = []
        with ExitStack() as files:
            if task.probabilities is not None:
                like = task.scan.files[0]
                array = files.enter_context(
                    open_probability_file(task.probabilities, self.classes, like, read_header(like))
                )
                if regions is None:
                    array[0] = 1  # all is background outside of the crop
                more.append(Output(self._activation, prepared.scan.grid.crop(array)))
                del array
            labels = self.segment(prepared, on_windows=on_windows, log=log, more=more)
            del more  # and with it the mapping of the file, which Windows would not move
        classes, values = self.ensemble.classes, self.ensemble.preprocessing.label_values
        return partial(write_labels, task.labels, labels, task.scan.files[0], classes, values)

    def segment(
        self,
        prepared: PreparedScan,
        *,
        on_windows: Callable[[int], None] = lambda count: None,
        log: Callable[[str], None] = lambda message: None,
        more: Sequence[Output] = (),
    ) -> np.ndarray:
        """Return the classes of a scan in the grid of its file; fill `more` outputs."""
        dtype, regions = get_label_dtype(len(self.ensemble.classes)), self.ensemble.regions
        labels = np.zeros(prepared.scan.grid.file_shape, dtype)
        decide = choose_label_function(regions, self.ensemble.region_labels)
        outputs = [Output(decide, prepared.scan.grid.crop(labels)), *more]
        image, level, background = torch.from_numpy(prepared.scan.image), self.skip_background, None
        if level is not None:
            overlapping = regions is not None
            background = BackgroundDetector(
                image, level, outputs=self.classes, overlapping=overlapping
            )
        runner = self._make_runner(on_windows, background)
        if num_skipped := segment(image, runner, prepared.plan, outputs):
            log(f"{prepared.name}: skipped {num_skipped} of {prepared.plan.windows} windows")
        removed = postprocess.keep_largest_component(labels, self.largest_component_labels)
        names = self.ensemble.classes
        if shares := [f"{names[n]} ({x:.0%})" for n, x in removed.items() if x > MAX_REMOVED_SHARE]:
            logger.warning(
                f"{prepared.name}: the largest component alone is kept, which removed a large part "
                f"of {join_first(shares)}: use keep_largest_component=none where there are several"
            )
        return labels

    def _make_runner(
        self, on_windows: Callable[[int], None], background: BackgroundDetector | None = None
    ) -> WindowRunner:
        return WindowRunner(
            networks=self.networks,
            device=self.device,
            flips=self.flips,
            background=background,
            on_windows=on_windows,
            heads=self.heads,
        )

    def _segment_stored(
        self,
        prepared: PreparedScan,
        task: ScanTask,
        on_windows: Callable[[int], None],
        log: Callable[[str], None],
    ) -> Callable[[], bool | None]:
        """Segment a scan that stays in its files; return what moves the labels to their place."""
        ensemble, values = self.ensemble, self.ensemble.preprocessing.label_values
        if self.largest_component_labels and not self.share[0]:
            names = join_first([ensemble.classes[n] for n in self.largest_component_labels])
            logger.warning(
                f"{prepared.name}: all components of {names} are kept, since the scan is segmented "
                "by parts"
            )
        store = partial(LabelStore, like=task.scan.files[0], origin=prepared.origin)
        labels = store(
            task.labels, dtype=np.dtype(get_label_dtype(len(ensemble.classes))), values=values
        )
        decide = choose_label_function(ensemble.regions, ensemble.region_labels)
        outputs = {labels: decide}
        if task.probabilities is not None:
            grid, background = prepared.scan.grid, list[tuple[int, int]]()
            whole = [(0, size) for size in grid.file_shape]
            if ensemble.regions is None and list(grid.box) != whole:  # as in memory
                background = list(self.region or whole)
            probabilities = store(
                get_probability_path(task.probabilities, task.labels),
                dtype=np.dtype(np.uint8),
                channels=self.classes,
                background=background,
            )
            outputs = {probabilities: partial(quantize, self._activation), **outputs}
        if (written := len(labels.state["slabs"])) and self.share[1] == 1:
            log(
                f"{prepared.name}: goes on after {pluralize(written, 'slab')} of an earlier command"
            )
        runner, plan, image = self._make_runner(on_windows), prepared.plan, prepared.scan.image
        if self.share[1] > 1:
            plan = share_slabs(plan, image, labels, self.share[1])
        segment_stored(image, runner, plan, outputs, self.region, self.share)
        return partial(finish, outputs, plan)

    @property
    def _activation(self) -> LabelFunction:
        """Return what turns logits into probabilities."""
        return torch.sigmoid if self.ensemble.regions else partial(torch.softmax, dim=0)

    @property
    def label_bytes(self) -> int:
        """Return the bytes of a voxel's label, in memory and as it is written."""
        values = self.ensemble.preprocessing.label_values
        return (1 if self.classes <= IGNORE_LABEL else 4) + (2 if values else 0)

    @property
    def _ram_advice(self) -> str:
        return "close other programs" if self.ram is None else "raise memory_gib (of all devices)"

    def _get_budget(self, held: int = 0) -> Budget:
        """Return what a case may take, of which it holds some bytes of RAM already."""
        ram = self.ram
        if ram is None:
            free = get_available_bytes(torch.device("cpu"))
            ram = 2**62 if free is None else int(USABLE_FRACTION * free) + held
        gpu = int(USABLE_FRACTION * self._get_free_gpu_bytes()) + self.recorded_bytes
        return Budget(ram_bytes=ram, gpu_bytes=gpu if self.device.type == "cuda" else None)

    def _get_free_gpu_bytes(self) -> int:
        return get_free_bytes(self.device) if self.device.type == "cuda" else 0
