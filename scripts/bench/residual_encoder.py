"""Compare nnU-Net's residual encoder with ours: estimated memory, convolution FLOPs and time.

    pip install '.[peers]'
    python -m scripts.bench.residual_encoder predict    # needs no GPU; a minute
    python -m scripts.bench.residual_encoder time       # on this machine's CPU; half an hour

The network is ResEnc L's: 6 levels of 1, 3, 4, 6, 6 and 6 blocks, 32 to 320 channels. Results are
written to benchmarks/<name>-step.json.
"""

import statistics
import sys
import warnings
from functools import partial
from typing import Any

import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import nn

from scripts.bench.step import (
    CHANNELS_LAST,
    Factory,
    TrainOnlyStep,
    build_cuda_step,
    build_ours,
    get_result_path,
    list_variants,
    make_parser,
    to_mib,
    update_results,
)
from scripts.bench.step_times import time_in_turns
from unet3d.memory.estimate import estimate_step
from unet3d.model.blocks import Strided
from unet3d.pool.avg import AvgPool3d
from unet3d.roofline.operations import count_operations
from unet3d.simulated_cuda import choose_foreach
from unet3d.workflows.memory.strategies import FUSED_STRATEGIES
from unet3d.workflows.memory.training_step import TrainingStep

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
        "plain modules": partial(build_ours, channels, "none", **options),
        **{name: partial(build_ours, channels, name, **options) for name in FUSED_STRATEGIES},
    }


def use_sgd(step: TrainingStep) -> TrainingStep:
    """Replace the optimizer by nnU-Net's."""
    parameters = step.model.parameters()
    step.optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.99, nesterov=True)
    return step


def build_gpu_step(make: Factory) -> TrainOnlyStep:
    """Build the step whose memory is estimated."""
    step = use_sgd(build_cuda_step(make, SIZE, BATCH, "16"))
    choose_foreach(step.optimizer)
    return TrainOnlyStep(step)


def predict() -> dict[str, Any]:
    """Estimate the peaks of all networks, and count the FLOPs of their convolutions."""
    rows: dict[str, Any] = {}
    for name, make in list_networks().items():
        peak = estimate_step(partial(build_gpu_step, make), cuda=True).peak
        operations = count_operations(partial(build_gpu_step, make))
        rows[name] = {
            "peak_allocated_mib": to_mib(peak.allocated),
            "peak_reserved_mib": to_mib(peak.reserved),
            "convolution_flops": sum(o.flops for o in operations if "conv" in o.name),
        }
        print(name, rows[name], flush=True)
    return {"size": SIZE, "batch": BATCH, "classes": 4, "precision": "16", "rows": rows}


def time_networks() -> dict[str, Any]:
    """Time a step of ours and of nnU-Net's in turns on a CPU, in float32 and one thread."""
    networks = list_networks()
    last = THEIRS + CHANNELS_LAST
    timed = {THEIRS: networks[THEIRS], last: list_variants(THEIRS, networks[THEIRS])[last]}
    timed |= {name: networks[name] for name in ("plain modules", "fused", "lean")}
    seconds = time_in_turns(timed, TIMED_SIZE, 1, ROUNDS)
    rows = {}
    for name in timed:
        ratios = [own / base for own, base in zip(seconds[name], seconds[THEIRS], strict=True)]
        rows[name] = {
            "median_seconds": round(statistics.median(seconds[name]), 3),
            "time_ratio": round(statistics.median(ratios), 3),
            "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        print(name, rows[name], flush=True)
    return {"size": TIMED_SIZE, "batch": 1, "rounds": ROUNDS, "threads": 1, "rows": rows}


def main() -> int:
    parser = make_parser("scripts.bench.residual_encoder", __doc__)
    parser.add_argument("part", choices=("predict", "time"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    run = {"predict": predict, "time": time_networks}[options.part]
    key = {"predict": "residual encoder", "time": "residual encoder times"}[options.part]
    update_results(get_result_path(options), {key: run()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
