"""Estimate the memory of MedNeXt L by strategy, and time a step of MedNeXt S on a CPU.

    OMP_NUM_THREADS=1 python -m scripts.bench.mednext

Rounds are interleaved; seconds are processor seconds of one thread, medians over rounds. `monai` is
the module of MONAI, the others have our depthwise convolutions.
"""

from copy import deepcopy
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from monai.networks.nets.mednext import create_mednext

from scripts.bench.big import query
from scripts.bench.results import make_parser, write_results
from unet3d.checkpointing.per_level import PerLevelStrategy
from unet3d.checkpointing.recompute import RecomputeBlocks
from unet3d.machine import get_cpu_model
from unet3d.model.depthwise import use_fast_depthwise

JOB = (
    "model=mednext_l model.deep_supervision=true data.patch_size=[128,128,128] data.batch_size=2 "
    "data.num_classes=4 precision=16 optimizer=sgd"
)
STRATEGIES = ("none", "blocks", "fused", "lean")


def estimate(job: str) -> dict[str, dict[str, int]]:
    """Return the peaks of each strategy."""
    return {name: query(f"memory {job} checkpointing={name}")[0] for name in STRATEGIES}


def time_steps(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds of forward and backward with two volumes, and their ratio to MONAI's."""
    monai = create_mednext("S", out_channels=4)
    networks = {"monai": monai, **{name: deepcopy(monai) for name in ("none", "blocks", "fused")}}
    for name, strategy in {"blocks": RecomputeBlocks(), "fused": PerLevelStrategy()}.items():
        strategy.apply(networks[name])
    x, labels = torch.randn(2, 1, size, size, size), torch.randint(0, 4, (2, size, size, size))
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for name in ("none", "blocks", "fused"):
        use_fast_depthwise(networks[name])
    for number in range(rounds + 1):
        for name, network in networks.items():
            network.zero_grad()
            start = process_time()
            F.cross_entropy(network(x), labels).backward()
            if number:  # the first compiles
                seconds[name].append(process_time() - start)
    base = median(seconds["monai"])
    return {
        name: {"seconds": median(times), "ratio": median(times) / base}
        for name, times in seconds.items()
    }


def main() -> None:
    parser = make_parser("scripts.bench.mednext", __doc__, output="cpu-mednext.json")
    parser.add_argument("--size", type=int, default=64, help="voxels per axis of the timed patches")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = time_steps(options.size, options.rounds)
    results = {"processor": get_cpu_model(), "size": options.size, "steps": steps}
    print(steps)
    write_results(options.output, {**results, "job": JOB, "memory": estimate(JOB)})


if __name__ == "__main__":
    main()
