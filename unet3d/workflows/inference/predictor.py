"""Networks on their device, and what becomes of a scan: prepared, planned, segmented, written."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from unet3d.config.instantiate import get_region_labels
from unet3d.data.layouts.unlabelled import ScanFiles
from unet3d.data.nifti.writer import open_probability_file, probability_bytes, write_labels
from unet3d.data.preprocessing.cache import estimate_cost
from unet3d.data.preprocessing.pipeline import PreprocessedScan
from unet3d.data.preprocessing.resampling import crop, reorient
from unet3d.data.preprocessing.statistics import differences
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference import postprocess
from unet3d.inference.accumulate import Network, list_flips
from unet3d.inference.memory_plan import Budget, InferencePlan, InferenceProblem, choose_plan
from unet3d.inference.segment import segment
from unet3d.inference.write_labels import Output, RegionsToLabels, argmax_labels, probabilities
from unet3d.machine.device import Precision
from unet3d.machine.memory import get_available_bytes, get_free_bytes
from unet3d.model.half_precision import cast_to_half
from unet3d.units import MIB, format_bytes
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.window_memory import measure_window_memory
from unet3d.workflows.memory.training_step import HALF, PURE

SPARE = 0.9
"""The share of what is free that a case may take."""

HEAP = 64 * MIB
"""What the C library may keep of small blocks that were freed."""


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A scan, and where its labels and perhaps its probabilities go."""

    scan: ScanFiles
    labels: Path
    probabilities: Path | None

    @property
    def done(self) -> bool:
        """Whether all of it is there; what is there is whole."""
        wanted = [self.labels, *([self.probabilities] if self.probabilities else [])]
        return all(path.exists() for path in wanted)


@dataclass(frozen=True, kw_only=True)
class PreparedScan:
    """A prepared scan and how it will be segmented."""

    task: ScanTask
    scan: PreprocessedScan
    job: InferenceProblem
    plan: InferencePlan
    ram: int  # at most, with reading and cleaning
    forecast: str  # in a line
    unlike: list[str]  # what no member has been trained on, in words


class Predictor:
    """`overlap`, `mirror` (axes) and `batch_size` are the windows'; `kept` are labels of which the
    largest piece alone is kept; `ram` is what a case may take, None: what is free.
    """

    def __init__(
        self,
        members: Ensemble,
        *,
        device: torch.device,
        used: Precision,
        overlap: float,
        mirror: Sequence[int],
        batch_size: int,
        kept: Sequence[int],
        ram: int | None,
    ):
        self.members, self.device = members, device
        self.overlap, self.batch_size = overlap, batch_size
        self.mirrored, self.kept, self.ram = list_flips(mirror), list(kept), ram
        self.networks = [get_inference_fn(network, used, device) for network in members.networks]
        shape = (batch_size, len(members.channels), *members.patch)
        self.classes, self.window_bytes = measure_window_memory(
            self.networks, members.networks, shape, device
        )
        if self.classes != len(members.regions or members.classes):
            raise UsageError(
                f"the network gives {self.classes} outputs for its classes "
                f"{', '.join(members.regions or members.classes)}"
            )

    def prepare(self, task: ScanTask) -> PreparedScan:
        """Read and prepare a scan and say what segmenting it takes, if there is memory for it."""
        budget = self._budget()
        preparing = estimate_cost(task.scan.files, self.members.preparation).ram
        if preparing > budget.ram:
            raise DoesNotFitError(
                f"preparing it takes {format_bytes(preparing)} of RAM; it may take {format_bytes(budget.ram)}"
            )
        scan = self.members.preparation.scan(task.scan.files)
        channels = self.members.channels
        if len(scan.image) != len(channels):
            raise UsageError(
                f"{len(scan.image)} channels in {', '.join(f.name for f in task.scan.files)}, but "
                f"the network takes {len(channels)}: {', '.join(channels)}"
            )
        d, h, w = (stop - start for start, stop in scan.grid.box)
        voxels = prod(scan.grid.file_shape)
        job = InferenceProblem(
            shape=scan.grid.shape,
            box=(d, h, w),
            channels=len(channels),
            classes=self.classes,
            patch=self.members.patch,
            overlap=self.overlap,
            batch_size=self.batch_size,
            window_bytes=self.window_bytes,
            held=scan.image.nbytes + voxels + HEAP,
        )
        found = choose_plan(job, budget)
        if not found.fits(budget):
            raise DoesNotFitError(explain_shortfall(found, budget))
        cleaning = postprocess.BYTES * voxels if self.kept else 0
        most = max(preparing, found.ram, job.held + cleaning)
        said = f"{task.scan.name} {'x'.join(map(str, scan.grid.file_shape))}, "
        said += f"{self.classes} classes: {describe_cost(replace(found, ram=most))}"
        if task.probabilities is not None:
            file = probability_bytes(scan.grid.file_shape, self.classes)
            said += f"; probabilities: {format_bytes(file)} on disk"
        return PreparedScan(
            task=task,
            scan=scan,
            job=job,
            plan=found,
            ram=most,
            forecast=said,
            unlike=self._unlike(scan),
        )

    def _unlike(self, scan: PreprocessedScan) -> list[str]:
        """In what a scan is unlike the training cases of every member, as the first has them."""
        normalize = self.members.preparation.normalize
        found = [
            differences(scan.statistics, training, self.members.channels, normalize)
            for training in self.members.training
        ]
        return found[0] if found and all(found) else []

    def predict(
        self, ready: PreparedScan, *, told: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        """Segment and write; what had to be changed meanwhile is said."""
        task, grid = ready.task, ready.scan.grid
        labels = np.zeros(grid.file_shape, np.uint8)
        regions = self.members.regions

        def inside(array: np.ndarray) -> np.ndarray:
            return crop(reorient(array, grid.axes, grid.flips), grid)

        decide = argmax_labels if regions is None else RegionsToLabels(get_region_labels(regions))
        outputs = [Output(decide, inside(labels))]
        with ExitStack() as files:
            if task.probabilities is not None:
                array = files.enter_context(
                    open_probability_file(task.probabilities, self.classes, task.scan.files[0])
                )
                if regions is None:
                    array[0] = 1  # outside of what was prepared all is background
                shares = probabilities if regions is None else torch.sigmoid
                outputs.append(Output(shares, inside(array)))
            self._segment(ready, outputs, told=told, say=say)
        postprocess.keep_largest_component(labels, self.kept)
        write_labels(task.labels, labels, task.scan.files[0])

    def _segment(
        self,
        ready: PreparedScan,
        outputs: Sequence[Output],
        *,
        told: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        def run(found: InferencePlan) -> None:
            segment(
                torch.from_numpy(ready.scan.image),
                self.networks,
                found,
                outputs,
                mirrored=self.mirrored,
                device=self.device,
                told=told,
            )

        try:
            run(ready.plan)
            return
        except torch.OutOfMemoryError:
            if ready.plan.sums_in_ram:
                raise
        torch.cuda.empty_cache()
        budget = replace(self._budget(), gpu=self.window_bytes)  # no room for sums
        found = choose_plan(ready.job, budget)
        if not found.fits(budget):
            raise DoesNotFitError(explain_shortfall(found, budget))
        say(f"{ready.task.scan.name}: out of GPU memory; again with {describe_cost(found)}")
        run(found)

    def _budget(self) -> Budget:
        ram = self.ram
        if ram is None:
            free = get_available_bytes(torch.device("cpu"))
            ram = 2**62 if free is None else int(SPARE * free)
        if self.device.type != "cuda":
            return Budget(ram=ram)
        return Budget(ram=ram, gpu=int(SPARE * get_free_bytes(self.device)))


def get_inference_fn(network: nn.Module, used: Precision, device: torch.device) -> Network:
    """A network as it predicts: on its device, in its precision, without a gradient."""
    dtype = PURE.get(used.used, torch.float32)
    if dtype != torch.float32:
        cast_to_half(network, dtype)
    network.to(device)

    def forward(batch: Tensor) -> Tensor:
        mixed = HALF.get(used.used)
        autocast = nullcontext() if mixed is None else torch.autocast(device.type, dtype=mixed)
        with torch.inference_mode(), autocast:
            return network(batch.to(dtype))

    return forward


def describe_cost(found: InferencePlan) -> str:
    """What a plan takes, and how it makes do."""
    said = f"{format_bytes(found.ram)} of RAM"
    if found.gpu:
        said = f"{format_bytes(found.gpu)} on the GPU, {said}"
        said += " (logits are summed there)" if found.sums_in_ram else ""
    if len(found.strips) > 1:
        said += f", in {len(found.strips)} strips with {100 * found.extra:.0f} % more windows"
    return said


def explain_shortfall(least: InferencePlan, budget: Budget) -> str:
    """Why not even the smallest plan fits."""
    if least.gpu > (budget.gpu or 0):
        return f"its windows take {format_bytes(least.gpu)} on the GPU, {format_bytes(budget.gpu or 0)} are free"
    return f"it takes at least {describe_cost(least)}; it may take {format_bytes(budget.ram)}"
