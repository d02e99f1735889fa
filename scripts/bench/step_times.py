"""Time a training step of our network and of other projects' networks on this machine.

    pip install '.[peers]'                     # networks of nnU-Net and pytorch-3dunet
    python -m scripts.bench.step_times         # about an hour
    python -m scripts.bench.step_times --cases "patches of 32" --processes 3

Plain modules are also timed channels-last and compiled. Times are processor seconds of one thread,
which other load hardly changes. In each of several processes, all networks of a case take turns; a
ratio is the median of a process's rounds. The median of the processes is written to
benchmarks/cpu-step.json with the range. All networks of a case have the same channels.
"""

import gc
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scripts.bench.results import make_parser, read_results, run_in_new_process, write_results
from scripts.bench.step import (
    CHANNELS_LAST,
    PLAIN,
    STRATEGIES,
    Factory,
    build_ours,
    build_step,
    list_comparable_networks,
    list_forum_networks,
    list_variants,
)
from unet3d.step.training_step import NullListener, RandomBatchStep

COMPILED = (PLAIN, "MONAI DynUNet", "nnU-Net PlainConvUNet")
"""The networks that are compiled, too, in the case with all networks: it takes a minute each."""
COMPARED = (*COMPILED, "fused", "lean", "unet3d, fused", "unet3d, lean")


@dataclass(frozen=True)
class Case:
    """One size of a training step."""

    size: tuple[int, int, int]
    batch: int
    width: int = 32  # channels of the first level
    names: tuple[str, ...] = ()  # of the networks; empty: all
    is_default: bool = False  # the network of the default run
    base: str = PLAIN  # that times are relative to


CASES = {
    "96x64x32": Case((96, 64, 32), 2, 16),
    "64x64x64, width 32": Case((64, 64, 64), 1, 32, names=COMPARED),
    "patches of 32": Case((32, 32, 32), 2, 8, is_default=True),
    "patches of 16": Case((16, 16, 16), 2, 8, is_default=True),
    "residual encoder": Case((96, 96, 96), 1, base="nnU-Net ResidualEncoderUNet"),
}

MIN_SECONDS = 0.5
"""Small steps are repeated for this long."""


def list_networks(case: Case) -> dict[str, Factory]:
    """Return the networks of a case; small patches are those of the default network.

    Names that begin with `unet3d` are networks built like those of other projects.
    """
    if case.base != PLAIN:
        from scripts.bench.networks import RESIDUAL, list_residual_networks

        networks = list_residual_networks()
        networks |= list_variants(RESIDUAL, networks[RESIDUAL])
        names = (RESIDUAL, RESIDUAL + CHANNELS_LAST, PLAIN, "fused", "lean")
        return {name: networks[name] for name in names}
    if case.is_default:
        channels = [case.width * n for n in (1, 2, 4)]
        return {name: partial(build_ours, channels, name) for name in (PLAIN, "fused", "lean")}
    networks = list_forum_networks("small", case.width) | list_comparable_networks(case.width)
    networks = {name: networks[name] for name in case.names or networks if name in networks}
    for name in list(networks):
        if name in STRATEGIES[1:] or name.startswith("unet3d"):
            continue
        variants = list_variants(name, networks[name])
        if case.names or name not in COMPILED:
            variants = {name + CHANNELS_LAST: variants[name + CHANNELS_LAST]}
        networks |= variants
    return networks


def time_in_turns(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of each network's step in interleaved rounds, in one thread."""
    torch.set_num_threads(1)
    networks = list_networks(case)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, make in networks.items():
            torch.manual_seed(0)
            step = build_step(make, list(case.size), case.batch, "32", "cpu")
            first = time_steps(step, 1)  # allocates the optimizer's state, and compiles
            count = max(1, round(MIN_SECONDS / first))
            seconds[name].append(time_steps(step, count) / count)
            del step
            gc.collect()
    return seconds


def time_steps(step: RandomBatchStep, count: int) -> float:
    """Return the processor seconds of some steps."""
    start = time.process_time()
    for _ in range(count):
        step.train(NullListener())
    return time.process_time() - start


def summarize(runs: list[dict[str, list[float]]], base: str) -> dict[str, Any]:
    """Return a row for each network: medians and ranges over processes.

    Relative times are those to the network `base` in the same round.
    """
    rows = {}
    for name in runs[0]:
        ratios = [
            statistics.median(own / other for own, other in zip(run[name], run[base], strict=True))
            for run in runs
        ]
        rows[name] = {
            "median_seconds": round(statistics.median(s for run in runs for s in run[name]), 4),
            "time_ratio": round(statistics.median(ratios), 3),
            "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return rows


def main() -> None:
    parser = make_parser("scripts.bench.step_times", __doc__, output="cpu-step.json")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="rounds in each process")
    options = parser.parse_args()
    key = "times, 32"
    times = read_results(options.output).get(key, {"cases": {}})
    times |= {"threads": 1, "clock": "processor seconds", "torch": torch.__version__}
    for name in options.cases:
        case, processes, rounds = CASES[name], options.processes, options.rounds
        runs = [run_in_new_process(time_in_turns, case, rounds) for _ in range(processes)]
        rows = summarize(runs, case.base)
        times["cases"][name] = {
            **{"size": case.size, "batch": case.batch, "width": case.width},
            **{"processes": processes, "rounds": rounds, "rows": rows},
        }
        write_results(options.output, {key: times}, update=True)
        for network, row in rows.items():
            low, high = row["time_ratio_range"]
            print(f"{name}, {network}: {row['time_ratio']:.2f}x ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
