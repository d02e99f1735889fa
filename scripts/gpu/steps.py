"""Rows of the GPU report about training steps: memory and time, estimated and measured."""

import statistics
from functools import partial, reduce
from importlib.util import find_spec
from itertools import product
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.rivals import list_compiled, list_rivals
from scripts.bench.step import (
    FORUM_SIZE,
    GPU_MEMORY,
    PEERS_SIZE,
    PLAIN,
    Factory,
    build_step,
    build_variant,
    estimate,
    list_comparable_networks,
    list_forum_networks,
    list_variants,
    set_tile_size,
)
from scripts.gpu.rows import Context, Row
from unet3d.config.compose import compose_config
from unet3d.cuda_graphs import WARMUP_BATCHES, CudaGraphs, GraphedPass
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.batches import BatchExtrapolation
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.fit import estimate_configured_step
from unet3d.peak_memory import MemoryRecord
from unet3d.step.config import StepConfig
from unet3d.step.training_step import (
    NullListener,
    RandomBatchStep,
    build_configured_step,
    measure_phases,
    time_step,
)
from unet3d.training.config import parse_train_config

GRID = {
    "precision": ("16", "32", "bf16", "16-true"),
    "checkpointing": ("fused", "leanest"),
    "model": ("unet_small", "unet_nnunet"),
    "optimizer": ("adamw", "sgd"),
    "data.patch_size": ("[64,64,64]", "[160,144,32]"),
}

FORUM_RUN = "in pure fp16 with SGD"
CUBE_SIZE = [128, 128, 128]
TINY_SIZE = [64, 32, 32]
TILE_MIB = (4, 16, 64, 256)
GRAPHED = ("fused", "lean", "leanest")
WHOLE_MIB = 2**20
TUNED_PEERS = ("nnU-Net PlainConvUNet", "MONAI DynUNet")

Steps = dict[str, tuple[Factory, list[int]]]
"""Networks and the sizes of their volumes, by row."""


# Estimated and measured memory.


def predict(context: Context) -> dict[str, Row]:
    """Compare estimated with measured memory over a grid of configurations."""
    grid = [
        [f"{key}={value}" for key, value in zip(GRID, values, strict=True)]
        for values in product(*GRID.values())
    ]
    if not context.cuda:
        grid = [["precision=32", "model=unet_tiny", "data.patch_size=[16,16,16]"]]
    return {" ".join(words): partial(compare_configuration, context, words) for words in grid}


def compare_configuration(context: Context, overrides: list[str]) -> dict[str, Any]:
    """Compare one configuration; on a CPU, errors mean nothing."""
    words = [*overrides, "data.num_classes=5", f"trainer.accelerator={context.accelerator}"]
    return measure_configured_step(context, words)[1]


def measure_configured_step(
    context: Context, words: list[str]
) -> tuple[RandomBatchStep, dict[str, Any]]:
    """Build the step of a config; return it with its measured and estimated peaks."""
    config = compose_step(words)
    predicted = estimate_configured_step(config)
    context.free_memory()
    step = build_configured_step(config, context.device)
    return step, describe_peaks(measure_peaks(context, step), predicted)


def compose_step(words: list[str]) -> StepConfig:
    """Return the step of a training with these settings."""
    return parse_train_config(compose_config(words, "train")).step


def measure_peaks(context: Context, step: RandomBatchStep) -> dict[str, MemoryRecord]:
    """Return the peak of each phase; in a rehearsal, that of the process's resident memory."""
    phases = measure_phases(step, context.device)
    if context.cuda:
        return phases
    return {k: MemoryRecord(allocated=v.resident, reserved=v.resident) for k, v in phases.items()}


def describe_peaks(
    phases: dict[str, MemoryRecord], predicted: MemoryEstimate | None = None
) -> dict[str, Any]:
    """Return measured peaks of a step and of its phases, with the estimate's if there is one."""
    row = {
        "measured": reduce(or_, phases.values()).known(),
        "measured_by_phase": {k: v.known() for k, v in phases.items()},
    }
    return row | (describe_errors(predicted, row["measured"]) if predicted else {})


def describe_errors(predicted: MemoryEstimate, measured: dict[str, int]) -> dict[str, Any]:
    """Return estimated peaks, and their errors in percent of the measured ones."""
    row: dict[str, Any] = {
        "predicted": predicted.peak.known(),
        "predicted_without_workspaces": predicted.without_workspaces,
        "predicted_by_phase": {k: v.known() for k, v in predicted.phases.items()},
    }
    for kind, nbytes in measured.items():
        if expected := row["predicted"].get(kind):
            row[f"{kind}_error_percent"] = round(100 * (expected / nbytes - 1), 2)
    return row


# Measured and timed steps.


def list_forum_steps(width: int = 64) -> Steps:
    """Return the forum networks in plain modules and with each strategy."""
    return {
        f"{name}, {strategy}": (make, FORUM_SIZE)
        for name in ("small", "large")
        for strategy, make in list_forum_networks(name, width).items()
    }


def list_tile_steps(width: int = 64) -> Steps:
    """Return the small forum network with tiles of several sizes."""
    networks = list_forum_networks("small", width)
    return {
        f"{strategy}, {mib} MiB": (set_tile_size(networks[strategy], mib), FORUM_SIZE)
        for strategy, mib in product(("fused", "leanest"), TILE_MIB)
    }


def list_peer_steps(width: int = 64) -> Steps:
    """Return the installed networks of other projects, and ours with the same channels."""
    return {name: (make, PEERS_SIZE) for name, make in list_comparable_networks(width).items()}


def list_tuned_steps(width: int = 64) -> Steps:
    """Return plain modules, and peers of the front page, in the ways of VARIANTS."""
    peers, plain = list_peer_steps(width), f"small, {PLAIN}"
    steps = {name: peers[name] for name in TUNED_PEERS if name in peers}
    steps[plain] = list_forum_steps(width)[plain]
    return {
        variant: (make_variant, size)
        for name, (make, size) in steps.items()
        for variant, make_variant in list_variants(name, make).items()
    }


def list_graph_steps(width: int = 64) -> Steps:
    """Return steps that other projects compile, and ours like them, also with whole maps as tiles.

    Networks of nnU-Net are missing where its package is.
    """
    forum = list_forum_networks("small", width)
    jobs = {"forum": ({name: forum[name] for name in (PLAIN, *GRAPHED)}, FORUM_SIZE)}
    if find_spec("dynamic_network_architectures"):
        from scripts.bench import networks

        channels = [n * width // 64 for n in networks.RESIDUAL_CHANNELS]
        encoders, plain = networks.list_residual_networks(channels), networks.list_ours(channels)
        plain |= {networks.PLAIN_CONV: encoders[networks.PLAIN_CONV]}
        for theirs, ours in ((networks.PLAIN_CONV, plain), (networks.RESIDUAL, encoders)):
            jobs[theirs] = ({name: ours[name] for name in (theirs, *GRAPHED)}, CUBE_SIZE)
    steps: Steps = {}
    for job, (makes, size) in jobs.items():
        for name, make in makes.items():
            steps[f"{job}: {name}"] = (make, size)
        steps[f"{job}: fused, whole maps"] = (set_tile_size(makes["fused"], WHOLE_MIB), size)
    return steps


def measure_steps(context: Context, steps: Steps) -> dict[str, Row]:
    """Return rows that measure steps with mixed fp16 and AdamW, and estimate their memory."""
    return {name: partial(measure, context, *step) for name, step in steps.items()}


def measure(context: Context, make: Factory, size: list[int]) -> dict[str, Any]:
    """Measure memory and time of a network's step, and estimate its memory."""
    predicted = estimate(make, size, 2, context.precision, cuda=context.cuda)
    return measure_network(context, make, size, predicted)


def measure_network(
    context: Context, make: Factory, size: list[int], predicted: MemoryEstimate | None = None
) -> dict[str, Any]:
    context.free_memory()
    step = build_network_step(context, make, size)
    return describe_peaks(measure_peaks(context, step), predicted) | time_steps(context, step)


def build_network_step(context: Context, make: Factory, size: list[int]) -> RandomBatchStep:
    """Build the step of a network on the device; in a rehearsal, of small volumes."""
    torch.manual_seed(0)
    size = size if context.cuda else TINY_SIZE
    return build_step(make, size, 2, context.precision, context.device.type)


def time_steps(context: Context, step: RandomBatchStep) -> dict[str, Any]:
    """Return the seconds of a step, and the seconds in which the host queued it."""
    step.train(NullListener())
    timed = [time_step(step, context.device) for _ in range(8 if context.cuda else 1)]
    seconds, launch_seconds = zip(*timed, strict=True)
    return {
        "step_seconds": statistics.median(seconds),
        "launch_seconds": statistics.median(launch_seconds),
        "all_seconds": [round(s, 5) for s in seconds],
    }


def forum(context: Context) -> dict[str, Row]:
    """Measure the forum networks in plain modules, with each strategy, and as in the forum."""
    names = ("small", "large")
    runs = {f"{n}, {FORUM_RUN}": partial(measure_forum_run, context, n) for n in names}
    return measure_steps(context, list_forum_steps(context.width)) | runs


def measure_forum_run(context: Context, name: str) -> dict[str, Any]:
    """Measure a step of experiment=example_<name>: pure fp16 with SGD."""
    step, row = measure_configured_step(context, [f"experiment=example_{name}"])
    return row | time_steps(context, step)


def peers(context: Context) -> dict[str, Row]:
    """Measure the installed networks of other projects, with the same channels."""
    return measure_steps(context, list_peer_steps(context.width))


def graphs(context: Context) -> dict[str, Row]:
    """Measure launched steps, and the same steps replayed as CUDA graphs."""
    rows: dict[str, Row] = {}
    for name, (make, size) in list_graph_steps(context.width).items():
        rows[name] = partial(measure_replayed, context, make, size)
        if not name.endswith((*GRAPHED, "maps")):
            compiled = partial(build_variant, make, False, True)
            rows[f"{name}, compiled"] = partial(measure_tuned, context, compiled, size)
    return rows


def measure_replayed(context: Context, make: Factory, size: list[int]) -> dict[str, Any]:
    """Measure a network's step, also replayed; what graphs allocate is only seen as reserved."""
    row = measure_network(context, make, size)
    if not context.cuda:
        return row
    context.free_memory()
    torch.cuda.reset_peak_memory_stats()
    step = build_network_step(context, make, size)
    graphed = GraphedPass(step.model, step.loss, CudaGraphs(context.device))
    step.model, step.loss = nn.Identity(), Replay(graphed)
    for _ in range(WARMUP_BATCHES + 1):
        step.train(NullListener())
    row["replayed"] = time_steps(context, step) | {"reserved": torch.cuda.memory_reserved()}
    row["good"] = graphed.recording is not None
    return row


class Replay(nn.Module):
    """The loss of a step whose network is part of the recording."""

    def __init__(self, graphed: GraphedPass):
        super().__init__()
        self.graphed = graphed

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return self.graphed(image, label)[0]


def rivals(context: Context) -> dict[str, Row]:
    """Measure checkpoints, and plain modules compiled at several budgets of memory."""
    steps = {name: (make, FORUM_SIZE) for name, make in list_rivals(context.width).items()}
    compiled = list_compiled(context.width)
    return measure_steps(context, steps) | {
        name: partial(measure_tuned, context, make, FORUM_SIZE) for name, make in compiled.items()
    }


def tile_size(context: Context) -> dict[str, Row]:
    """Measure time and memory of the small forum network with tiles of several sizes."""
    return measure_steps(context, list_tile_steps(context.width))


def tuned(context: Context) -> dict[str, Row]:
    """Measure plain modules as nnU-Net's users run them, compiled, and channels-last."""
    steps = list_tuned_steps(context.width)
    return {name: partial(measure_tuned, context, *step) for name, step in steps.items()}


def measure_tuned(context: Context, make: Factory, size: list[int]) -> dict[str, Any]:
    """Measure a step with cudnn.benchmark, as nnU-Net sets it; its workspaces are not estimated."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return measure_network(context, make, size)


# The largest batch.


def batch(context: Context) -> dict[str, Row]:
    """Find the largest batch of the forum networks that runs in GPU_MEMORY."""
    steps = list_forum_steps(context.width)
    return {name: partial(find_largest_batch, context, *step) for name, step in steps.items()}


def find_largest_batch(context: Context, make: Factory, size: list[int]) -> dict[str, Any]:
    """Try batches, starting from the estimated one, until one fits and the next does not."""
    two, three = (estimate(make, size, n, context.precision, cuda=True) for n in (2, 3))
    any_batch = BatchExtrapolation(two, three)
    is_known = any_batch.affine and context.cuda
    predicted = any_batch.find_largest(GPU_MEMORY) if is_known else 0
    tried: dict[int, bool] = {}

    def fits(count: int) -> bool:
        if count not in tried:
            tried[count] = try_batch(context, make, size, count)
        return tried[count]

    largest = max(1, predicted)
    while largest > 0 and not fits(largest):
        largest -= 1
    while largest == max(tried) and fits(largest + 1):
        largest += 1
    return {"largest": largest, "predicted": predicted, "tried": tried}


def try_batch(context: Context, make: Factory, size: list[int], count: int) -> bool:
    """Whether two steps run in what the CUDA context leaves of GPU_MEMORY."""
    context.free_memory()
    if not context.cuda:
        return count < 2  # a CPU has no limit to try
    total = torch.cuda.get_device_properties(context.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (GPU_MEMORY - CUDA_CONTEXT_BYTES) / total))
    try:
        step = build_step(make, size, count, "16", context.device.type)
        for _ in range(2):
            step.train(NullListener())
        context.synchronize()
    except torch.OutOfMemoryError:
        return False
    finally:
        step = None
        torch.cuda.set_per_process_memory_fraction(1.0)
        context.free_memory()
    return True
