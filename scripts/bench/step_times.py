"""Time a training step of our network and of other projects' networks on this machine.

    pip install '.[peers]'                     # networks of nnU-Net and pytorch-3dunet
    python -m scripts.bench.step_times         # about 40 minutes on two cores
    python -m scripts.bench.step_times --cases patches --processes 3
    python -m scripts.bench.step_times --plot  # draw the recorded times again

In each of several processes, all networks of a case take turns, so that other load affects all of
them; a ratio is the median of a process's rounds. The median of the processes is written to
benchmarks/<name>-step.json with the range. All networks of a case have the same channels.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.bench.recorded_names import use_current_names
from scripts.bench.step import (
    ROOT,
    Factory,
    build_ours,
    build_step,
    estimate,
    get_result_path,
    list_comparable_networks,
    list_forum_networks,
    make_parser,
    read_results,
    to_mib,
    update_results,
)
from unet3d.workflows.benchmark import synchronize
from unet3d.workflows.memory.strategies import FUSED_STRATEGIES
from unet3d.workflows.memory.training_step import NullListener, TrainingStep

PLAIN = "plain modules"
COMPARED = (
    *(PLAIN, "fused", "lean", "unet3d, fused", "unet3d, lean"),
    *("MONAI DynUNet", "nnU-Net PlainConvUNet"),
)


@dataclass(frozen=True)
class Case:
    """One size of a training step."""

    size: tuple[int, int, int]
    batch: int
    width: int  # channels of the first level
    names: tuple[str, ...] = ()  # of the networks; empty: all
    is_default: bool = False  # the network of the default run


CASES = {
    "96x64x32": Case((96, 64, 32), 2, 16),
    "64x64x64": Case((64, 64, 64), 1, 16, names=COMPARED),
    "patches of 32": Case((32, 32, 32), 2, 8, is_default=True),
    "patches of 16": Case((16, 16, 16), 2, 8, is_default=True),
    "64x64x64, width 32": Case((64, 64, 64), 1, 32, names=COMPARED),
    "96x64x32, width 32": Case((96, 64, 32), 2, 32, names=COMPARED),
}

MIN_SECONDS = 0.5
"""Small steps are repeated for this long."""

PLOTTED = "96x64x32"
"""The case with all networks."""


def list_networks(case: Case) -> dict[str, Factory]:
    """Return the networks of a case; small patches are those of the default network.

    Names that begin with `unet3d` are networks built like those of other projects.
    """
    if case.is_default:
        channels = [case.width * n for n in (1, 2, 4)]
        strategies = {PLAIN: "none", "fused": "fused", "lean": "lean"}
        return {name: partial(build_ours, channels, key) for name, key in strategies.items()}
    networks = use_current_names(
        list_forum_networks("small", case.width) | list_comparable_networks(case.width)
    )
    return {name: networks[name] for name in case.names or networks if name in networks}


def time_case(case: Case, rounds: int, threads: int, precision: str) -> dict[str, list[float]]:
    """Return the seconds of each network's step in interleaved rounds."""
    torch.set_num_threads(threads)
    return time_in_turns(list_networks(case), list(case.size), case.batch, rounds, precision)


def time_in_turns(
    networks: dict[str, Factory], size: list[int], batch: int, rounds: int, precision: str
) -> dict[str, list[float]]:
    """Return the seconds of each network's step in interleaved rounds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name, make in networks.items():
            torch.manual_seed(0)
            step = build_step(make, size, batch, precision, device.type)
            first = time_steps(step, 1, device)  # allocates the optimizer's state
            count = max(1, round(MIN_SECONDS / first))
            mean = time_steps(step, count, device) / count
            if turn:  # the first turn warms up
                seconds[name].append(mean)
            del step
            gc.collect()
    return seconds


def time_steps(step: TrainingStep, count: int, device: torch.device) -> float:
    """Return the seconds of some steps."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step.train(NullListener())
    synchronize(device)
    return time.perf_counter() - start


def run_processes(name: str, options: argparse.Namespace) -> list[dict[str, list[float]]]:
    """Time a case in several processes, one after another."""
    command = [sys.executable, "-m", "scripts.bench.step_times", "--child", name]
    command += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
    command += ["--precision", options.precision]
    results = []
    for _ in range(options.processes):
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        results.append(json.loads(ended.stdout.splitlines()[-1]))
    return results


def summarize(case: Case, runs: list[dict[str, list[float]]], precision: str) -> dict[str, Any]:
    """Return for each network the median and the range of its relative time over processes."""
    rows: dict[str, Any] = {}
    for name, make in list_networks(case).items():
        ratios = [
            statistics.median(own / base for own, base in zip(r[name], r[PLAIN], strict=True))
            for r in runs
        ]
        estimated = estimate(make, list(case.size), case.batch, precision, cuda=False)
        rows[name] = {
            "median_seconds": statistics.median(s for r in runs for s in r[name]),
            "time_ratio": round(statistics.median(ratios), 3),
            "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "estimated_peak_mib": to_mib(estimated.peak.allocated),
        }
    return {
        **{"size": list(case.size), "batch": case.batch, "width": case.width},
        "processes": len(runs),
        "rounds": len(runs[0][PLAIN]),
        "rows": rows,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot time against peak memory: our strategies as a curve, other networks as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=110, layout="constrained")
    left_out = (*FUSED_STRATEGIES, "offload", "blocks")  # of the other network
    rows = {name: row for name, row in result["rows"].items() if name not in left_out}
    key = "estimated_peak_mib"
    ours = [f"unet3d, {strategy}" for strategy in FUSED_STRATEGIES]
    axes.plot(
        [rows[name][key] for name in ours],
        [rows[name]["time_ratio"] for name in ours],
        "o-",
        color="#c1272d",
    )
    right = 1.45 * max(row[key] for row in rows.values())
    labels: list[tuple[float, float]] = []  # positions
    for name, row in sorted(rows.items(), key=lambda item: item[1]["time_ratio"]):
        x, y = row[key], row["time_ratio"]
        if name not in ours:
            axes.plot(x, y, "s", color="#44546a")
        label_y = y
        for other_x, other_y in labels:
            if abs(other_x - x) < 0.3 * right and label_y < other_y + 0.07:
                label_y = other_y + 0.07
        labels.append((x, label_y))
        color = "#c1272d" if name.startswith("unet3d") else "#44546a"
        axes.text(x + 0.015 * right, label_y, name, fontsize=8, color=color, va="center")
    axes.set_xlabel("peak of a training step, MiB (estimated)")
    axes.set_ylabel("time of a step (plain modules = 1)")
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.15 * max(row["time_ratio"] for row in rows.values()))
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> int:
    parser = make_parser("scripts.bench.step_times", __doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--precision", choices=("32", "16", "bf16"), default="32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="rounds in each process")
    parser.add_argument("--plot", action="store_true", help="only draw the recorded times")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.child:
        case = CASES[options.child]
        print(json.dumps(time_case(case, options.rounds, options.threads, options.precision)))
        return 0
    path, key = get_result_path(options), f"times, {options.precision}"
    times = read_results(path).get(key, {"cases": {}})
    for name in [] if options.plot else options.cases:
        runs = run_processes(name, options)
        times["cases"][name] = summarize(CASES[name], runs, options.precision)
        times |= {"threads": options.threads, "torch": torch.__version__}
        update_results(path, {key: times})
        for network, row in times["cases"][name]["rows"].items():
            low, high = row["time_ratio_range"]
            print(f"{name}, {network}: {row['time_ratio']:.2f}x ({low:.2f} to {high:.2f})")
    print(f"wrote {path}")
    if PLOTTED in times["cases"]:
        plot(times["cases"][PLOTTED], path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
