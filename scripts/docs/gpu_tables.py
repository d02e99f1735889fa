"""Tables with results of the GPU report: a function for each table.

What has not been measured is marked, or an empty text, and the table `unmeasured` lists it.
"""

import re
from collections import defaultdict
from math import prod
from statistics import median

from scripts.bench.step import STRATEGIES
from scripts.docs.tables import (
    OPEN,
    Row,
    find_gpu_report,
    format_strategy,
    make_table,
    read_estimates,
    read_gpu,
    read_gpu_part,
)
from scripts.gpu.steps import FORUM_RUN, GRID
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.text import MIB

PLAIN_NETWORK = re.compile(f"plain modules|blocks|{FORUM_RUN}|nnU-Net|MONAI|pytorch-3dunet")
"""Rows of estimates without blocks of unet3d."""


def peers() -> str:
    """Compare networks of other projects with ours of the same channels: memory, and time."""
    estimates, measured, lines = read_estimates("peers"), read_gpu("peers") | read_gpu("tuned"), []
    names = [*estimates, *(n for n in measured if n.partition(",")[0] in estimates)]
    for name in dict.fromkeys(names):
        peak, seconds, estimate = OPEN, OPEN, ""
        if name in estimates:
            estimate = f"{estimates[name]['peak_allocated_mib']:,.0f}"
        if row := measured.get(name):
            peak = f"{row['measured']['allocated'] / MIB:,.0f}"
            seconds = f"{1000 * row['step_seconds']:.0f}"
        lines.append(f"{name} | {estimate} | {peak} | {seconds}")
    return make_table(" | estimated peak, MiB: | measured, MiB: | step, ms:", lines)


def format_peak(row: Row) -> str:
    """Format a step's measured peak in MiB, with the estimate in brackets where there is one."""
    kinds = [row.get(kind, {}).get("allocated") for kind in ("measured", "predicted")]
    peak, estimate = (None if nbytes is None else f"{nbytes / MIB:,.0f}" for nbytes in kinds)
    return (peak or OPEN) + (f" ({estimate})" if estimate else "")


def gpu_error() -> str:
    """Compare estimates with all peaks of a GPU."""
    every, ours, plain = list_errors(), list_errors(plain=False), list_errors(plain=True)
    rows = {
        "**allocated**": every["allocated"],
        "**reserved**": every["reserved"],
        "reserved, fused blocks": ours["reserved"],
        "reserved, plain modules": plain["reserved"],
        "**process**": every["process"],
    }
    lines = []
    for label, signed in rows.items():
        if errors := sorted(signed):
            sizes = sorted(map(abs, errors))
            lines.append(
                f"{label} | {len(errors)} | "
                f"{median(sizes):.1f}% | {sizes[int(0.95 * len(sizes))]:.1f}% | "
                f"{errors[0]:+.1f}% | {errors[-1]:+.1f}% | {sum(size > 8 for size in sizes)}"
            )
    note = ""
    if read_gpu_part("predict").get("state") == "cut off":
        total, measured = prod(map(len, GRID.values())), len(read_gpu("predict"))
        note = f"\n\nThe grid of configurations stopped after {measured} of {total}."
    heads = "cases: | median: | 95th percentile: | lowest: | highest: | beyond 8%:"
    return make_table(f"error of the estimate | {heads}", lines) + note


def list_errors(*, plain: bool | None = None) -> dict[str, list[float]]:
    """Return the signed errors in percent of all estimates, or of those of plain modules or not."""
    errors: dict[str, list[float]] = defaultdict(list)
    for part in ("forum", "tile_size", "peers", "predict"):
        for name, row in read_gpu(part).items():
            if plain not in (None, PLAIN_NETWORK.search(name) is not None):
                continue
            for kind in ("allocated", "reserved"):
                if f"{kind}_error_percent" in row:
                    errors[kind].append(row[f"{kind}_error_percent"])
            if "process" in row["measured"]:
                estimate = row["predicted"]["reserved"] + CUDA_CONTEXT_BYTES
                errors["process"].append(100 * (estimate / row["measured"]["process"] - 1))
    return errors


def gpu_step() -> str:
    """Compare peaks with their estimates on a GPU, with batch sizes and times."""
    measured, batches, estimates = read_gpu("forum"), read_gpu("batch"), read_estimates("forum")
    lines = []
    for name in (FORUM_RUN, *STRATEGIES):
        small, large = (measured.get(f"{network}, {name}") for network in ("small", "large"))
        label, batch = format_strategy(name), "" if name == FORUM_RUN else OPEN
        if tried := batches.get(f"small, {name}"):
            estimate = estimates[f"small, {name}"]["largest_batch_in_7000_mib"] or "below 2"
            batch = f"{tried['largest']} ({estimate})"
        lines.append(f"{label} | {list_cells(small)} | {batch} | {list_cells(large)}")
    for name, row in read_gpu("tuned").items():
        if name.startswith("small, "):
            lines.append(f"{name.removeprefix('small, ')} | {list_cells(row)} |  |  | ")
    peak, seconds = "allocated MiB (estimated)", "seconds per step"
    heads = f"on a GPU | small: {peak} | {seconds} | largest batch in 7000 MiB (estimated)"
    return make_table(f"{heads} | large: {peak} | {seconds}", lines)


def list_cells(row: Row | None) -> str:
    """Format the peak of a step and its seconds."""
    return f"{format_peak(row)} | {row['step_seconds']:.3f}" if row else f"{OPEN} | {OPEN}"


def gpu_graphs() -> str:
    """Compare steps that are launched, replayed as CUDA graphs, and compiled."""
    lines = []
    for name, row in read_gpu("graphs").items():
        job, _, network = name.partition(": ")
        steps = {"step": (row["step_seconds"], row["measured"]["reserved"])}
        if replayed := row.get("replayed"):
            steps["replayed"] = (replayed["step_seconds"], replayed["reserved"])
        found = [steps.get(way) for way in ("step", "replayed")]
        times = ["" if step is None else f"{1000 * step[0]:.0f}" for step in found]
        sizes = ["" if step is None else f"{step[1] / MIB:,.0f}" for step in found]
        label = "the same" if network == job else network.removeprefix(f"{job}, ")
        lines.append(" | ".join([job, label, *times, *sizes]))
    heads = "network |  | step, ms: | replayed, ms: | reserved, MiB: | replayed, MiB:"
    return f"{make_table(heads, lines)}\n\n{describe_device('graphs')}"


def gpu_device() -> str:
    """Name the GPU and the versions that its results were measured with."""
    return describe_device("environment")


def describe_device(part: str) -> str:
    """Name the GPU that has measured a part, and its versions."""
    machine = find_gpu_report(part)["environment"]["rows"]["machine"]
    return (
        f"Measured on one {machine['device']} (torch {machine['torch']}, CUDA {machine['cuda']}, "
        f"Triton {machine['triton']}; `make gpu`)."
    )


def unmeasured() -> str:
    """List the results that no file has."""
    parts = {
        "tuned": "other projects' networks channels-last, and compiled at these sizes",
        "pool": "pooling",
        "rivals": "checkpoints, and plain modules compiled with a memory budget",
        "later": "steps with the present kernels, which launch fewer; CUDA graphs on several GPUs, "
        "in prediction and in nnU-Net's trainer; `offload`; many classes tile by tile",
    }
    missing = "; ".join(title for part, title in parts.items() if not read_gpu(part))
    return f"**Not yet measured on a GPU:** {missing}. `make gpu` measures them." if missing else ""
