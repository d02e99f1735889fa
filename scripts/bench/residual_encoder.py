"""Compare nnU-Net's residual encoder with ours: estimated memory, convolution FLOPs and time.

    pip install '.[peers]'
    python -m scripts.bench.residual_encoder predict    # needs no GPU; a minute
    python -m scripts.bench.residual_encoder time       # on this machine's CPU; half an hour

The network is ResEnc L's: 6 levels of 1, 3, 4, 6, 6 and 6 blocks, 32 to 320 channels. Results are
written to benchmarks/cpu-step.json.
"""

import sys
import warnings
from functools import partial
from typing import Any

import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import nn

from scripts.bench.results import make_parser, write_results
from scripts.bench.step import (
    CHANNELS_LAST,
    PLAIN,
    Factory,
    TrainOnlyStep,
    build_cuda_step,
    build_ours,
    count_flops,
    list_variants,
    to_mib,
)
from scripts.bench.step_times import compare_times, summarize, time_in_turns
from unet3d.memory.estimate import estimate_step
from unet3d.memory.from_config import FUSED_STRATEGIES
from unet3d.memory.step.training_step import TrainingStep
from unet3d.model.blocks import Strided
from unet3d.pool.avg import AvgPool3d
from unet3d.simulated_cuda import choose_foreach, simulate_cuda

CHANNELS, BLOCKS = [32, 64, 128, 256, 320, 320], [1, 3, 4, 6, 6, 6]
LEVELS = len(CHANNELS)
THEIRS = "nnU-Net ResidualEncoderUNet"
SIZE, BATCH = [128, 128, 128], 2
TIMED_SIZE, ROUNDS = [96, 96, 96], 3


def build_theirs(
    kind: type[nn.Module], channels: list[int], blocks: Any, decoder: int
) -> nn.Module:
    """Build a network of nnU-Net's package."""
    return kind(
        *(1, LEVELS, channels, nn.Conv3d, 3, [1] + [2] * (LEVELS - 1), blocks, 4),
        [decoder] * (LEVELS - 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
    )


def list_networks(channels: list[int] = CHANNELS) -> dict[str, Factory]:
    """Return ours with every strategy, and nnU-Net's."""
    options: dict[str, Any] = {
        **{"residual_blocks": BLOCKS, "convs_per_level": 1, "num_classes": 4},
        **{"norm": "instance", "activation": "leaky_relu", "upsampling": "transposed"},
        "pool": partial(Strided, skip_pool=AvgPool3d),
    }
    return {
        THEIRS: partial(build_theirs, ResidualEncoderUNet, channels, BLOCKS, 1),
        "nnU-Net PlainConvUNet": partial(build_theirs, PlainConvUNet, channels, 2, 2),
        PLAIN: partial(build_ours, channels, "none", **options),
        **{name: partial(build_ours, channels, name, **options) for name in FUSED_STRATEGIES},
    }


def build_gpu_step(make: Factory) -> TrainingStep:
    """Build the step whose memory is estimated, with nnU-Net's optimizer."""
    step = build_cuda_step(make, SIZE, BATCH, "16")
    parameters = step.model.parameters()
    step.optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.99, nesterov=True)
    choose_foreach(step.optimizer)
    return step


def predict() -> dict[str, Any]:
    """Estimate the peaks of all networks, and count the FLOPs of their convolutions."""
    rows: dict[str, Any] = {}
    for name, make in list_networks().items():
        make_step = partial(build_gpu_step, make)
        peak = estimate_step(lambda: TrainOnlyStep(make_step()), cuda=True).peak  # noqa: B023
        with simulate_cuda():  # in the tiles of a GPU
            flops = count_flops(make_step)
        rows[name] = {
            "peak_allocated_mib": to_mib(peak.allocated),
            "peak_reserved_mib": to_mib(peak.reserved),
            "convolution_flops": flops,
        }
    return {"size": SIZE, "batch": BATCH, "classes": 4, "precision": "16", "rows": rows}


def time_networks() -> dict[str, Any]:
    """Time a step of ours and of nnU-Net's in turns on a CPU, in float32 and one thread."""
    networks = list_networks()
    networks |= list_variants(THEIRS, networks[THEIRS])
    names = (THEIRS, THEIRS + CHANNELS_LAST, PLAIN, "fused", "lean")
    seconds = time_in_turns({name: networks[name] for name in names}, TIMED_SIZE, 1, ROUNDS)
    ratios = compare_times(seconds, THEIRS)
    rows = {name: summarize(seconds[name], ratios[name]) for name in names}
    return {"size": TIMED_SIZE, "batch": 1, "rounds": ROUNDS, "threads": 1, "rows": rows}


def main() -> int:
    parser = make_parser("scripts.bench.residual_encoder", __doc__, output="cpu-step.json")
    parser.add_argument("part", choices=("predict", "time"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.part == "predict":
        results = {"residual encoder": predict()}
    else:
        results = {"residual encoder times": time_networks()}
    write_results(options.output, results, update=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
