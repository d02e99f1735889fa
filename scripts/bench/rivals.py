"""Compare fused blocks with what PyTorch itself offers: checkpoints, and Inductor's memory budget.

    python -m scripts.bench.rivals      # half an hour; most of it compiles

The rivals run the plain modules of the same network: as they are; with torch.utils.checkpoint
around each block, or around what lies between two convolutions; compiled, at several values of
`torch._functorch.config.activation_memory_budget`. Memory is what tensors take on this CPU beside
weights and optimizer state, and, where a trace on fake tensors can tell, the estimated peak of a
GPU. Times are processor seconds of one thread.
"""

import statistics
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile, record_function

from scripts.bench.results import (
    follow_memory,
    make_parser,
    run_in_new_process,
    write_results,
)
from scripts.bench.step import (
    FITTED,
    FORUM_SIZE,
    PLAIN,
    Factory,
    build_step,
    build_variant,
    estimate,
    list_forum_networks,
    set_tile_size,
    to_mib,
)
from scripts.bench.step_times import time_steps
from unet3d.checkpointing.recompute import WeightsOfForward, checkpoint_block
from unet3d.model.blocks import pad_to
from unet3d.step.training_step import NullListener

SIZE, WIDTH, TILE_MIB = [96, 64, 32], 16, 4
"""Volumes and channels of the step on a CPU; a tile is a sixth of its largest map, as on a GPU."""
CHECKPOINTED = "checkpoints between convolutions"
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)
ROUNDS = 3


class CheckpointedConvs(nn.Module):
    """Run our plain U-Net, and store the outputs of convolutions alone.

    A checkpoint encloses what lies between two convolutions, and the second one: norm, activation,
    and pooling, or upsampling and concatenation. Recomputation stops before the convolution.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        network: Any = self.network
        inputs, skips = (image,), []
        read: nn.Module = nn.Sequential()  # computes from `inputs` what the next convolution reads
        for level in network.encoder:
            inputs, read = self.run_layers(level.convs, inputs, read)
            skips.append((*inputs, read))
            if level.pool is not None:
                read = nn.Sequential(read, level.pool)
        skips.pop()
        for level in network.decoder:
            skip, read_skip = skips.pop()
            inputs, read = (*inputs, skip), Join(read, level, read_skip)
            inputs, read = self.run_layers(level.convs, inputs, read)
        return Region(read, network.heads[0]).run(*inputs)

    @staticmethod
    def run_layers(layers: Any, inputs: Any, read: nn.Module) -> tuple[Any, nn.Module]:
        """Run a level's convolutions; return the last one's output, and what reads it."""
        for layer in layers:
            inputs = (Region(read, layer.conv).run(*inputs),)
            read = nn.Sequential(layer.norm, layer.act)
        return inputs, read


class Region(nn.Module):
    """A convolution, and what computes its input."""

    def __init__(self, read: nn.Module, conv: nn.Module):
        super().__init__()
        self.read, self.conv = read, conv

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.conv(self.read(*inputs))

    def run(self, *inputs: Tensor) -> Tensor:
        """Run it under a checkpoint."""
        return checkpoint_block(Region.forward, self, *inputs)


class Join(nn.Module):
    """What the first convolution of a decoder level reads."""

    def __init__(self, read: nn.Module, level: Any, read_skip: nn.Module):
        super().__init__()
        self.read, self.up, self.read_skip = read, level.up, read_skip
        self.skip_first = level.skip_first

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        with WeightsOfForward(self.read_skip):  # the level below has updated the statistics
            skip = self.read_skip(skip)
        x = pad_to(self.up(self.read(x)), skip)
        return torch.cat([skip, x] if self.skip_first else [x, skip], dim=1)


def list_rivals(width: int) -> dict[str, Factory]:
    """Return the small network of the out-of-memory example: ours, and its eager rivals."""
    ours = list_forum_networks("small", width)
    return {
        PLAIN: ours[PLAIN],
        "checkpoints around blocks": ours["blocks"],
        CHECKPOINTED: lambda: CheckpointedConvs(ours["fused"]()),
        **{name: ours[name] for name in FITTED[1:]},
    }


def build_compiled(make: Factory, budget: float) -> nn.Module:
    """Compile a network that may keep this share of what Inductor would store for backward."""
    config: Any = functorch_config
    config.activation_memory_budget = budget
    return build_variant(make, False, True)


def list_compiled(width: int) -> dict[str, Factory]:
    """Return plain modules, compiled at each budget."""
    plain = list_rivals(width)[PLAIN]
    return {f"{PLAIN}, budget {b}": partial(build_compiled, plain, b) for b in BUDGETS}


def predict() -> dict[str, Any]:
    """Estimate the peaks of eager steps on a GPU, in mixed precision with AdamW."""
    peaks = {
        name: estimate(make, FORUM_SIZE, 2, "16", cuda=True).peak
        for name, make in list_rivals(64).items()
    }
    return {
        name: {"allocated_mib": to_mib(peak.allocated), "reserved_mib": to_mib(peak.reserved)}
        for name, peak in peaks.items()
    }


class PhaseMarker(NullListener):
    """Write the names of the phases to the profile."""

    def begin_phase(self, phase: str) -> None:
        with record_function(phase):
            pass


def measure(name: str) -> dict[str, Any]:
    """Return the bytes that are in use when backward begins, the peak, and the seconds of a step.

    The weights and the optimizer's state are not counted.
    """
    torch.set_num_threads(1)
    make = (list_rivals(WIDTH) | list_compiled(WIDTH))[name]
    if name in FITTED:
        make = set_tile_size(make, TILE_MIB)
    step = build_step(make, SIZE, 2, "32", "cpu")
    time_steps(step, 2)  # compiles, and allocates the optimizer's state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.train(PhaseMarker())
    memory = list(follow_memory(profiler))
    seconds = [time_steps(step, 1) for _ in range(ROUNDS)]
    return {
        "saved_mib": to_mib(dict(memory)["backward"]),  # when backward begins
        "peak_mib": to_mib(max(in_use for _, in_use in memory)),
        "seconds": round(statistics.median(seconds), 3),
    }


def main() -> None:
    options = make_parser("scripts.bench.rivals", __doc__, output="cpu-rivals.json").parse_args()
    warnings.simplefilter("ignore")
    with patch.dict("os.environ", CUBLAS_WORKSPACE_CONFIG=":4096:8"):  # an H100's default
        results = {"predicted": {"size": FORUM_SIZE, "rows": predict()}}
    rows = {}
    for name in (*list_rivals(WIDTH), *list_compiled(WIDTH)):
        rows[name] = run_in_new_process(measure, name)
        print(name, rows[name], flush=True)
    results["measured"] = {"size": SIZE, "batch": 2, "width": WIDTH, "rows": rows}
    write_results(options.output, results, update=True)


if __name__ == "__main__":
    main()
