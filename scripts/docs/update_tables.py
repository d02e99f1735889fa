"""Write measured values into the documents: `python -m scripts.docs.update_tables`.

The text between `<!-- NAME -->` and `<!-- end -->`, in README.md and in docs/, is the result of the
function NAME; a test compares. GPU results come from the <device>.json of scripts.gpu.report. Where
no file has GPU results, tables have no columns for them, and the table `unmeasured` lists what is
missing.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.recorded_names import get_current_name, use_current_names
from scripts.bench.step import CHANNELS_LAST, VARIANTS
from scripts.gpu.steps import GRID, PATCHES
from unet3d.units import CUDA_CONTEXT_BYTES, GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
OPEN = "not measured yet"
FORUM_RUN = "in pure fp16 with SGD"
STRATEGIES = ("plain modules", "fused", "skips", "lean", "leanest", "offload", "blocks")

JOBS = {"default": "default run", "hard": "`data=synthetic_hard`"}
"""Recorded jobs of scripts.bench.quality, and their names in the documents."""

NETWORKS = {
    "before": "`model.prior_bias=false`",
    "ours": "unet3d (default)",
    "no_warmup": "`scheduler.warmup=0`",
    "lr_1e-3": "`optimizer.lr=1e-3`",
    "transposed": "`model.upsampling=transposed`",
    "deep_supervision": "`model.deep_supervision=true`",
    "resenc": "residual encoder, `pool=strided`",
    "dynunet": "MONAI DynUNet",
    "nnunet": "nnU-Net PlainConvUNet",
}
"""Recorded variants of scripts.bench.quality, and their names in the documents."""

SHIPPED_COMPILED = ("nnU-Net PlainConvUNet",)
"""Networks that their project compiles on a GPU, with cudnn.benchmark; on a CPU it does not."""

ESTIMATED_PARTS = ("forum", "tile_size", "peers", "residual", "predict")
PLAIN_NETWORK = re.compile(f"plain modules|blocks|{FORUM_RUN}|nnU-Net|MONAI|pytorch-3dunet")
"""Rows of these parts without blocks of unet3d."""

ERRORS = ("allocated_error_percent", "reserved_error_percent")
POOLS = ("median", "max", "avg", "approx_median", "nn.MaxPool3d", "unfold and sort", "soft rank")

Row = dict[str, Any]
Rows = dict[str, Row]


def front(folder: Path) -> str:
    """Compare one network in four implementations: peak memory, and time of a step."""
    labels = {
        "nnU-Net PlainConvUNet": "nnU-Net's PlainConvUNet",
        "MONAI DynUNet": "MONAI's DynUNet",
        "unet3d, fused": "**unet3d**, default",
        "unet3d, leanest": "**unet3d**, `checkpointing=leanest`",
    }
    return compare_networks(folder, labels)


def peers(folder: Path) -> str:
    """Compare the same channels in networks of other projects."""
    names = get_estimated(result(folder, "cpu-step"), "peers")
    return compare_networks(folder, {name: name for name in names})


def compare_networks(folder: Path, labels: dict[str, str]) -> str:
    """Compare networks of the peers' size; those of plain modules as shipped and at their best."""
    content = result(folder, "cpu-step")
    estimated, times = get_estimated(content, "peers"), get_times(content)
    measured, tuned = gpu(folder, "peers"), gpu(folder, "tuned")
    lines = [
        "| | peak GPU memory, measured (estimated) | step on that GPU | relative time on a CPU |",
        "| --- | --- | --- | --- |",
    ]
    for name, label in labels.items():
        estimate = format_mib(estimated[name]["peak_allocated_mib"] * MIB)
        own = [f"{OPEN} ({estimate})", OPEN]
        if name in measured:
            own = describe_gpu_step(measured[name])
        variants = [name + variant for variant in VARIANTS if name + variant in times]
        if not variants:
            lines.append(f"| {' | '.join([label, *own, format_time(times[name])])} |")
            continue
        if name in SHIPPED_COMPILED:
            row = tuned.get(f"{name}, compiled")
            own = describe_gpu_step(row) if row else [f"{cell}, eager" for cell in own]
        lines.append(f"| {' | '.join([f'{label}, as shipped', *own, format_time(times[name])])} |")
        rows = {n: tuned[n] for n in (name + variant for variant in VARIANTS) if n in tuned}
        best = [OPEN, OPEN]
        if rows and name in measured:
            rows[name] = measured[name]
            fastest = min(rows, key=lambda n: rows[n]["step_seconds"])
            best = describe_gpu_step(rows[fastest])
            best[1] += name_way(fastest, name)
        fastest = min([name, *variants], key=lambda n: times[n]["time_ratio"])
        best.append(format_time(times[fastest]) + name_way(fastest, name))
        lines.append(f"| {' | '.join([f'{label}, at its best', *best])} |")
    return "\n".join(lines)


def describe_gpu_step(row: Row) -> list[str]:
    """Format the peak and the time of a step on a GPU."""
    return [peak(row), f"{1000 * row['step_seconds']:.0f} ms"]


def name_way(variant: str, name: str) -> str:
    """Name the way in which a network runs.

    >>> name_way("DynUNet, channels-last, compiled", "DynUNet")
    ', channels-last, compiled'
    """
    return variant.removeprefix(name) or ", eager"


def front_limits(folder: Path) -> str:
    """List what the tables of the front page do not show."""
    plans = result(folder, "predicted-nnunet-fused")["rows"]
    shares = {
        kind: [
            row["strategies"]["fused"]["peak_allocated_bytes"]
            / row["strategies"]["plain modules"]["peak_allocated_bytes"]
            for name, row in plans.items()
            if name.startswith(kind)
        ]
        for kind in ("nnU-Net org", "ResEnc")
    }
    ranges = {kind: f"{min(x):.2f}x to {max(x):.2f}x" for kind, x in shares.items()}
    pools = result(folder, "cpu-hippocampus")["pools"]
    dice = {pool: f"{mean['dice']['mean']:.4f}" for pool, mean in pools["mean"].items()}
    runs = list(pools["rows"]["median"].values())
    lines = [
        "- This network is the most favorable one. In nnU-Net's own plans, fused blocks are "
        f"estimated to need {ranges['nnU-Net org']} of the memory of its eager network, and "
        f"{ranges['ResEnc']} of its residual encoders.",
        f"- Median pooling did not raise Dice: {dice['median']} against {dice['max']} with max "
        f"pooling (hippocampus, fold 0, {runs[0]['steps']} steps, means of {len(runs)} runs).",
    ]
    cases = result(folder, "cpu-step")["times, 32"]["cases"]
    sizes = [cases[case]["rows"] for case in ("96x64x32", "64x64x64, width 32")]
    plain, fused = (
        " and ".join(f"{rows[name]['time_ratio']:.2f}x" for rows in sizes)
        for name in (f"plain modules{CHANNELS_LAST}", "fused")
    )
    lines.append(
        "- On a CPU, one line (`channels_last_3d`) gives plain modules much of the speed of fused "
        f"blocks: {plain} at two sizes, against {fused}."
    )
    errors = list_errors(folder)
    if "reserved" in errors:
        low, high = (f"{f(errors['reserved']):+.0f}%" for f in (min, max))
        lines.append(
            f"- In {len(errors['reserved'])} steps on that GPU, the estimate was off by "
            f"{min(errors['allocated']):+.1f}% to {max(errors['allocated']):+.1f}% for allocated "
            f"memory, and {low} to {high} for reserved memory, which decides what fits."
        )
    return "\n".join(lines)


def pooling_bytes(folder: Path) -> str:
    """Compare the bytes that pooling methods store and allocate per output, in fp32."""
    lines = ["| | stored | allocated at the peak |", "| --- | --- | --- |"]
    for name, rows in pooling_rows(folder).items():
        row = rows[(1, 8, 320, 150, 26), "float32", False]
        lines.append(f"| `{name}` | {format_stored(row)} | {row['peak_bytes']:.0f} |")
    return "\n".join(lines)


def pooling_rows(folder: Path) -> dict[str, dict[tuple, Row]]:
    """Return the results of each pooling method by shape, type and memory layout."""
    found: dict[str, dict[tuple, Row]] = {name: {} for name in POOLS}
    for volume in result(folder, "cpu-pool")["results"]:
        key = (tuple(volume["shape"]), volume["dtype"], volume["channels_last"])
        for row in volume["rows"]:
            if row["pool"] in found:
                found[row["pool"]][key] = row
    return found


def pooling(folder: Path) -> str:
    """Compare forward + backward with eager nn.MaxPool3d, and the bytes per output."""
    raced = gpu(folder, "pool")
    heads = ["", "CPU, 320x150x26 fp32 / bf16", "channels-last fp32 / bf16"]
    heads += ["saved bytes fp32", "peak bytes fp32 / bf16"]
    if raced:
        heads += ["GPU, 320x150x26 fp32 / bf16", "channels-last fp32 / bf16"]
    lines = [f"|{' |'.join(f' {h}' if h else h for h in heads)} |", "| --- " * len(heads) + "|"]
    for name, rows in pooling_rows(folder).items():
        flat, last = (1, 8, 320, 150, 26), (1, 64, 32, 64, 64)
        wide, half = rows[flat, "float32", False], rows[flat, "bfloat16", False]
        wide_last, half_last = rows[last, "float32", True], rows[last, "bfloat16", True]
        cells = [
            f"`{name}`",
            f"{wide['both_ratio']:.2f}x / {half['both_ratio']:.2f}x",
            f"{wide_last['both_ratio']:.2f}x / {half_last['both_ratio']:.2f}x",
            format_stored(wide),
            f"{wide['peak_bytes']:.0f} / {half['peak_bytes']:.0f}",
        ]
        if raced:
            cells += [both(raced, name, ""), both(raced, name, " channels-last")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_stored(row: Row) -> str:
    """Format the bytes that backward needs per output, besides the input if it needs that too.

    >>> format_stored({"saved_bytes": 0.0, "keeps_input": True})
    'input'
    >>> format_stored({"saved_bytes": 8.0, "keeps_input": True})
    '8 per output + input'
    """
    nbytes = f"{row['saved_bytes']:.0f}"
    if not row["keeps_input"]:
        return nbytes
    return "input" if nbytes == "0" else f"{nbytes} per output + input"


def both(raced: Rows, name: str, layout: str) -> str:
    """Return the ratios of a pooling method on a GPU, in both precisions."""
    found = []
    for dtype in ("float32", "bfloat16"):
        row = raced.get(f"2x64x320x150x26 {dtype}{layout}", {}).get("rows", {}).get(name)
        found.append(OPEN if row is None else f"{row['both_ratio']:.2f}x")
    return OPEN if set(found) == {OPEN} else " / ".join(found)


def predict(folder: Path) -> str:
    """State the memory of a scan with many classes in a sentence."""
    case = result(folder, "cpu-predict")["cases"][-1]
    size = " x ".join(map(str, case["size"]))
    peak, estimate, whole = (
        f"{case[key] / GIB:.1f} GiB"
        for key in ("peak_bytes", "forecast_bytes", "whole_logits_bytes")
    )
    return (
        f"A scan with {case['classes']} classes at {size} voxels needed {peak} of RAM in addition "
        f"to the network ({estimate} estimated).\nIts logits as one array would be {whole} "
        "(`python -m scripts.bench.inference`)."
    )


def predict_speed(folder: Path) -> str:
    """Compare the time of a scan with MONAI's sliding window, as ratios."""
    report = result(folder, "cpu-predict-speed")
    networks = {"unet_tiny": "`unet_tiny`", "dynunet": "MONAI's DynUNet"}
    ways = {
        "MONAI, fused blocks": "MONAI",
        "unet3d": "default",
        "skip_background": "`skip_background=0.1`",
        "backend=onnx": "`backend=onnx`",
        "backend=openvino": "`backend=openvino`",
        "all": "all",
    }
    lines = [
        f"| network and scan | {' | '.join(ways.values())} | labels that differ |",
        f"| --- |{' --- |' * (len(ways) + 1)}",
    ]
    for name, row in report.items():
        if not isinstance(row, dict) or "one_scan" not in row:
            continue
        network, scan = name.split(", ")
        size = " x ".join(map(str, row["size"]))
        cells = [row["one_scan"].get(way, {}).get("ratio") for way in ways]
        if "MONAI, fused blocks" not in row["one_scan"]:
            cells[0] = 1.0
        numbers = " | ".join("" if n is None else f"{n:.2f}" for n in cells)
        same = [w for n, w in row["one_scan"].items() if n not in ("skip_background", "all")]
        differ = max(way["labels_that_differ"] for way in same)
        label = f"{networks[network]}, {scan} ({size}, {row['windows']} windows)"
        lines.append(f"| {label} | {numbers} | {differ:,} of {row['voxels']:,} |")
    return "\n".join(lines)


def skip_background(folder: Path) -> str:
    """Compare Dice and windows with and without skipped windows."""
    report = result(folder, "cpu-skip-background")
    lines = ["| scans | `skip_background=` | windows skipped | Dice |", "| --- | --- | --- | --- |"]
    for name, found in report.items():
        if name == "versions":
            continue
        for row in found["rows"]:
            level = "null" if row["level"] is None else f"{row['level']:g}"
            share = f"{row['skipped']} of {found['windows']}"
            lines.append(
                f"| {found['scans']} of {name} | `{level}` | {share} | {row['dice']:.4f} |"
            )
    return "\n".join(lines)


def hippocampus(folder: Path) -> str:
    """Compare folds and pooling methods, as far as they are measured."""
    measured = result(folder, "cpu-hippocampus")
    lines = [
        "| | Dice anterior / posterior | mean | steps | seconds per step | peak of a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = {}
    if "folds" in measured:
        numbers = [name.removeprefix("fold ") for name in measured["folds"]["rows"]]
        rows[f"folds {', '.join(numbers)}"] = measured["folds"]
    for pool, mean in measured.get("pools", {}).get("mean", {}).items():
        rows[f"`pool={pool}`, {len(measured['pools']['rows'][pool])} runs"] = {
            "mean": mean,
            "rows": measured["pools"]["rows"][pool],
        }
    for name, part in rows.items():
        mean, runs = part["mean"], list(part["rows"].values())
        dice = mean["dice"]
        spread = "" if mean["dice_deviation"] is None else f" ± {mean['dice_deviation']:.4f}"
        peak = ", ".join(f"{format_mib(v)} {k}" for k, v in mean["peak_bytes"].items())
        lines.append(
            f"| {name} | {dice['Anterior']:.4f} / {dice['Posterior']:.4f} "
            f"| {dice['mean']:.4f}{spread} | {runs[0]['steps']} "
            f"| {mean['median_step_seconds']:.2f} | {peak} |"
        )
    return "\n".join(lines)


def quality(folder: Path) -> str:
    """Compare validation Dice of each job after its full training."""
    return quality_table(folder, "cpu-quality")


def quality_screen(folder: Path) -> str:
    """Compare validation Dice of short runs with other settings and networks."""
    return quality_table(folder, "cpu-screen-quality")


def quality_table(folder: Path, name: str) -> str:
    """Compare validation Dice of each job and network."""
    if not (folder / f"{name}.json").is_file():
        return ""
    lines = [
        "| job | network or setting | Dice, mean | 95% over cases | worst run | runs | steps "
        "| seconds per step | estimated peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for job, variants in result(folder, name).items():
        for variant, content in variants.items():
            found = content["summary"]
            spread = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
            over = found["interval_over_cases"]
            between = "" if over is None else f"{over[0]:.4f} to {over[1]:.4f}"
            worst = f"{found['worst_dice']:.4f}"
            if found["worst_class"] is not None:
                worst += f" ({found['worst_class']} {found['worst_class_dice']:.4f})"
            tensors = found["predicted_bytes"]
            lines.append(
                f"| {JOBS.get(job, job)} | {NETWORKS.get(variant, variant)} "
                f"| {found['dice']:.4f}{spread} | {between} | {worst} "
                f"| {found['runs']} | {found['steps']} | {found['median_step_seconds']:.2f} "
                f"| {OPEN if tensors is None else format_mib(tensors)} |"
            )
    return "\n".join(lines)


def step(folder: Path) -> str:
    """Compare memory and compute of each checkpointing strategy, and its time on a CPU."""
    content = result(folder, "cpu-step")
    rows, times = get_estimated(content, "forum"), get_times(content)
    lines = [
        "| `checkpointing=` | small: peak | more convolution FLOPs | largest batch in 7000 MiB "
        "| large: peak | time of a step on a CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in STRATEGIES:
        small, large = (rows[f"{net}, {name}"] for net in ("small", "large"))
        time = format_time(times[name])
        label = name if name == "plain modules" else f"`{name}`"
        batch = small["largest_batch_in_7000_mib"] or "below 2"
        lines.append(
            f"| {label} | {small['peak_allocated_mib']} MiB | {small['extra_work'] * 100:.0f}% "
            f"| {batch} | {large['peak_allocated_mib']} MiB | {time} |"
        )
    time = format_time(times[f"plain modules{CHANNELS_LAST}"])
    lines.insert(3, f"| plain modules{CHANNELS_LAST} | | 0% | | | {time} |")
    return "\n".join(lines)


def modeled(folder: Path) -> str:
    """Compare launches and modeled times of checkpointing strategies and sizes of tiles."""
    lines = [
        "| `checkpointing=`, MiB of a tile | kernels | peak | host | H100 | A100 | RTX 4090 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result(folder, "cpu-step")["modeled"]["rows"].items():
        strategy, _, size = name.removesuffix(" MiB").partition(", ")
        label = f"`{strategy}`, {size}" if size else "plain modules (`naive_small`)"
        times = (f"{row['step_ms'][gpu]:.0f} ms ({r:.2f}x)" for gpu, r in row["time_ratio"].items())
        lines.append(
            f"| {label} | {row['launches']:,} | {row['peak_allocated_mib']} MiB "
            f"| {row['host_ms']:.0f} ms | {' | '.join(times)} |"
        )
    return "\n".join(lines)


def step_times(folder: Path) -> str:
    """Compare times of a step on a CPU at several sizes."""
    cases = result(folder, "cpu-step")["times, 32"]["cases"]
    titles = {
        "96x64x32": "2 x 96x64x32, 16 channels",
        "64x64x64, width 32": "1 x 64x64x64, 32 channels",
        "patches of 32": "default run, 2 x 32x32x32",
        "patches of 16": "default run, 2 x 16x16x16",
    }
    titles = {case: title for case, title in titles.items() if case in cases}
    compared = cases["64x64x64, width 32"]["rows"]
    names = [n for n in cases["96x64x32"]["rows"] if n in compared or n.endswith("compiled")]
    lines = ["| | " + " | ".join(titles.values()) + " |", "| --- " * (len(titles) + 1) + "|"]
    for name in names:
        cells = [cases[case]["rows"].get(name) for case in titles]
        times = ["" if cell is None else format_time(cell) for cell in cells]
        lines.append(f"| {name} | {' | '.join(times)} |")
    return "\n".join(lines)


def host_time(folder: Path) -> str:
    """Compare what the host does in a step, by strategy and size of tiles."""
    lines = ["| `checkpointing=`, MiB of a tile | host | |", "| --- | --- | --- |"]
    for name, row in use_current_names(result(folder, "cpu-step")["host"]).items():
        strategy, _, size = name.removesuffix(" MiB").partition(", ")
        label = f"`{strategy}`, {size}" if size else "plain modules (`naive_small`)"
        lines.append(f"| {label} | {row['host_ms']:.0f} ms | {row['ratio']:.1f}x |")
    return "\n".join(lines)


def gpu_device(folder: Path) -> str:
    """Name the GPU and the versions that its results were measured with."""
    found = gpu(folder, "environment").get("machine")
    if found is None:
        return ""
    versions = ", ".join(
        f"{name} {found[key]}"
        for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("Triton", "triton"))
        if found.get(key)
    )
    return f"Measured on one {found['device']} ({versions}; `make gpu`)."


def gpu_error(folder: Path) -> str:
    """Compare estimates with all peaks of a GPU, and name the tests that failed in that run."""
    everything = list_errors(folder)
    if not everything:
        return ""
    groups = {
        "": everything,
        "own blocks": list_errors(folder, plain=False),
        "plain modules": list_errors(folder, plain=True),
    }
    lines = [
        "| error of the estimate | cases | median | 95th percentile | lowest | highest "
        "| beyond 8% |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, group in product(everything, groups):
        if errors := sorted(groups[group].get(kind, [])):
            sizes = sorted(map(abs, errors))
            cells = [
                f"{kind}, {group}" if group else f"**{kind}**",
                str(len(errors)),
                f"{median(sizes):.1f}%",
                f"{sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]:.1f}%",
                f"{errors[0]:+.1f}%",
                f"{errors[-1]:+.1f}%",
                str(sum(size > 8 for size in sizes)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    notes = []
    if gpu_part(folder, "predict").get("state") == "cut off":
        total = len(PATCHES) * prod(map(len, GRID.values()))
        measured = len(gpu(folder, "predict"))
        notes.append(f"The part *predict* was cut off after {measured} of {total} combinations.")
    tests = gpu(folder, "tests").values()
    if tests:
        passed, failed = (sum(row.get(k, 0) for row in tests) for k in ("passed", "failed"))
        names = {re.split(r"::|\[", line)[1]: None for row in tests for line in row["failures"]}
        named = f" ({', '.join(f'`{name}`' for name in names)})" if names else ""
        notes.append(f"Of the tests in the same run, {passed} passed and {failed} failed{named}.")
    return "\n".join([*lines, *(["", " ".join(notes)] if notes else [])])


def list_errors(folder: Path, *, plain: bool | None = None) -> dict[str, list[float]]:
    """Return the signed errors in percent of all estimates, or of those of plain modules or not."""
    errors: dict[str, list[float]] = defaultdict(list)
    for part in ESTIMATED_PARTS:
        for name, row in gpu(folder, part).items():
            if plain not in (None, PLAIN_NETWORK.search(name) is not None):
                continue
            for kind in ("allocated", "reserved"):
                if f"{kind}_error_percent" in row:
                    errors[kind].append(row[f"{kind}_error_percent"])
            if "process" in row["measured"]:
                estimate = row["predicted"]["reserved"] + CUDA_CONTEXT_BYTES
                errors["process"].append(100 * (estimate / row["measured"]["process"] - 1))
    return errors


def gpu_evidence(folder: Path) -> str:
    """Compare estimates with what real GPUs recorded: cases, and signed errors."""
    lines = [
        "| recorded by | cases | allocated: error | reserved: error |",
        "| --- | --- | --- | --- |",
        "| 13 snapshots of various GPUs, published by others | 54,043 blocks | "
        "every block at its address | 0 in all 13 |",
        "| failed requests of `Conv3d`, in PyTorch's issues | 3 | 0 to the digit printed | |",
        "| peaks of single `Conv3d` layers, in the same issues | 7 | -0.7% to +0.1% | |",
        "| a step of ResNet-50, published by others | 1,088 events | all in order; peak -1.6%, "
        "without workspaces +0.1% | |",
    ]
    device = gpu(folder, "environment").get("machine", {}).get("device")
    titles = {
        "forum": "`experiment=forum_*` with each strategy",
        "tile_size": "tiles of 4 to 256 MiB",
        "peers": "networks of MONAI and nnU-Net, and the same in unet3d",
        "predict": "precisions, optimizers, networks and patches, all combined",
    }
    for part, title in titles.items():
        rows = gpu(folder, part).values()
        if rows:
            cells = [format_errors([row[key] for row in rows if key in row]) for key in ERRORS]
            lines.append(f"| {device}: {title} | {len(rows)} | {' | '.join(cells)} |")
    lines.append(
        f"| {device}: runs with Lightning (`checkpointing=fused` and `offload`, CUDA graphs) | 3 | "
        "-0.0% to +0.1%, below 0.5% in 3 | -13.0% to -2.0%, below 0.5% in 0 |"
    )
    return "\n".join(lines)


def residual_encoder(folder: Path) -> str:
    """Compare nnU-Net's residual encoder with ours by strategy: memory, FLOPs and time."""
    content = result(folder, "cpu-step")
    rows = content["residual encoder"]["rows"]
    times = content["residual encoder times"]["rows"]
    base = rows["plain modules"]["convolution_flops"]
    lines = [
        "| | peak (estimated) | more convolution FLOPs | time of a step on a CPU |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        ours = name in STRATEGIES
        label = f"`{name}`" if ours and name != "plain modules" else name
        more = f"{100 * row['convolution_flops'] / base - 100:.1f}%" if ours else ""
        time = format_time(times[name]) if name in times else ""
        lines.append(f"| {label} | {row['peak_allocated_mib']:,} MiB | {more} | {time} |")
        if f"{name}{CHANNELS_LAST}" in times:
            time = format_time(times[f"{name}{CHANNELS_LAST}"])
            lines.append(f"| {name}{CHANNELS_LAST} | | | {time} |")
    return "\n".join(lines)


def nnunet_presets(folder: Path) -> str:
    """Compare estimates of nnU-Net's presets with the memory that its documentation states."""
    report = result(folder, "predicted-nnunet")
    datasets = list(report["datasets"])
    lines = [
        f"| preset | documented GB | {' | '.join(f'{d}: estimate | error' for d in datasets)} |",
        "| --- | ---: |" + " --- | ---: |" * len(datasets),
    ]
    presets = dict.fromkeys(name.split(", ")[0] for name in report["rows"])
    for preset in presets:
        rows = [report["rows"][f"{preset}, {dataset}"] for dataset in datasets]
        cells = [
            f"{row['process_bytes'] / 1e9:.1f} GB for {format_shape(row['input_shape'])} | "
            f"{row['error_percent']:+.0f}%"
            for row in rows
        ]
        lines.append(f"| {preset} | {rows[0]['documented_gb']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def nnunet_fused(folder: Path) -> str:
    """Compare estimates of nnU-Net's presets with plain modules and with fused blocks."""
    report = result(folder, "predicted-nnunet-fused")
    strategies = ("plain modules", "fused", "lean")
    lines = [
        f"| plan of nnU-Net | {' | '.join(strategies)} |",
        "| --- |" + " --- |" * len(strategies),
    ]
    for name, row in report["rows"].items():
        peaks = [row["strategies"][s]["peak_allocated_bytes"] for s in strategies]
        cells = [
            format_gib(peaks[0]),
            *(f"{format_gib(p)} ({p / peaks[0]:.2f}x)" for p in peaks[1:]),
        ]
        lines.append(f"| {name}: {format_shape(row['input_shape'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def monai_networks(folder: Path) -> str:
    """Compare MONAI's networks on the default job."""
    lines = [
        "| `model=` | parameters | Dice | step on a CPU | predicted GPU memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in result(folder, "cpu-monai-networks")["rows"].items():
        label = f"`{' '.join([name, *row['overrides']])}`"
        numbers = (
            f"{row['parameters'] / 1e6:.1f} M | {row['dice']:.3f} | {row['step_seconds']:.2f} s"
        )
        lines.append(f"| {label} | {numbers} | {row['predicted_gpu_mib']:,} MiB |")
    return "\n".join(lines)


def nnunet_patches(folder: Path) -> str:
    """Show the largest patches of ResEnc L in the memory that nnU-Net needs for its own."""
    report = result(folder, "predicted-nnunet-fused")
    lines = [
        "| data | median case | patch that nnU-Net plans | with `lean` | with `leanest` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in report["largest_patches"].items():
        case = report["datasets"][name]["shape"][::-1]
        planned = report["rows"][f"ResEnc L, {name}"]["input_shape"][2:]
        patches = [planned, *(found[s]["input_shape"][2:] for s in ("lean", "leanest"))]
        cells = [
            f"{format_shape(patch)}, {100 * cover(patch, case):.0f}% of the case"
            for patch in patches
        ]
        lines.append(f"| {name} | {format_shape(case)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cover(patch: list[int], case: list[int]) -> float:
    """Return the fraction of a case that a patch covers.

    >>> cover([4, 8], [8, 4])
    0.5
    """
    return prod(min(p, n) for p, n in zip(patch, case, strict=True)) / prod(case)


def format_gib(value: int) -> str:
    """Format bytes in GiB.

    >>> format_gib(3 * 2**29)
    '1.50 GiB'
    """
    return f"{value / 2**30:.2f} GiB"


def format_shape(shape: list[int]) -> str:
    """Format a shape.

    >>> format_shape([2, 1, 128, 128, 64])
    '2x1x128x128x64'
    """
    return "x".join(map(str, shape))


def format_errors(errors: list[float]) -> str:
    """Format the range of errors in percent, and how many are below a half.

    >>> format_errors([-1.0, 0.1, 0.4])
    '-1.0% to +0.4%, below 0.5% in 2'
    """
    if not errors:
        return OPEN
    small = sum(abs(error) < 0.5 for error in errors)
    return f"{min(errors):+.1f}% to {max(errors):+.1f}%, below 0.5% in {small}"


def gpu_tiles(folder: Path) -> str:
    """Compare peaks and times on a GPU by the size of a tile, and what its kernels take."""
    rows, profiles = gpu(folder, "tile_size"), gpu(folder, "profile")
    if not rows:
        return ""
    lines = [
        "| `checkpointing=`, MiB of a tile | peak (estimated) | step | host |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        strategy, _, size = name.removesuffix(" MiB").partition(", ")
        times = [1000 * row[key] for key in ("step_seconds", "launch_seconds")]
        cells = f"{peak(row)} | {times[0]:.0f} ms | {times[1]:.0f} ms"
        lines.append(f"| `{strategy}`, {size} | {cells} |")
    kernels = ", ".join(
        f"{f'`{name}`' if name in STRATEGIES[1:] else name} {row['device_ms']:.0f} ms"
        for name, row in profiles.items()
    )
    return "\n".join(lines) + (f"\n\nKernels alone take: {kernels}." if kernels else "")


def gpu_step(folder: Path) -> str:
    """Compare peaks with their estimates on a GPU, with batch sizes and times."""
    rows, batches = gpu(folder, "forum"), gpu(folder, "batch")
    estimated = get_estimated(result(folder, "cpu-step"), "forum")
    if not rows and not batches:
        return ""
    lines = [
        "| on a GPU | small: peak (estimated) | seconds per step | largest batch in 7000 MiB "
        "(estimated) | large: peak (estimated) | seconds per step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in (FORUM_RUN, *STRATEGIES):
        cells = []
        for net in ("small", "large"):
            row = rows.get(f"{net}, {name}")
            cells += [peak(row), seconds(row)]
            if net == "small":
                tried = batches.get(f"{net}, {name}")
                batch = estimated.get(f"{net}, {name}", {}).get("largest_batch_in_7000_mib")
                cells.append(
                    OPEN if tried is None else f"{tried['largest']} ({batch or 'below 2'})"
                )
        if name == FORUM_RUN:
            cells[2] = ""  # it is what everything is compared with
        label = f"`{name}`" if name in STRATEGIES[1:] else name
        lines.append(f"| {label} | {' | '.join(cells)} |")
    for name, row in gpu(folder, "tuned").items():
        if name.startswith("small, "):
            lines.append(f"| {name.removeprefix('small, ')} | {peak(row)} | {seconds(row)} | | | |")
    return "\n".join(lines)


def gpu_residual(folder: Path) -> str:
    """Compare nnU-Net's residual encoder with ours on a GPU."""
    return gpu_table(gpu(folder, "residual"))


def gpu_table(rows: Rows) -> str:
    """Show the peak and the time of each row."""
    if not rows:
        return ""
    lines = ["| on a GPU | peak (estimated) | seconds per step |", "| --- | --- | --- |"]
    lines += [f"| {name} | {peak(row)} | {seconds(row)} |" for name, row in rows.items()]
    return "\n".join(lines)


def gpu_hippocampus(folder: Path) -> str:
    """State how long the hippocampus takes on a GPU, and the Dice with each pooling method."""
    found, pools = gpu(folder, "hippocampus").get("fold 0"), gpu(folder, "pools")
    parts = []
    if found is not None:
        goal, reached = found["goal"], found["seconds_to_goal"]
        when = "not reached" if reached is None else f"reached after {reached:.0f} s"
        parts.append(
            f"`experiment=hippocampus` on a GPU, fold 0: a Dice of {goal} {when}, "
            f"{found['dice']['mean']:.4f} at the end of {found['steps']} steps of "
            f"{found['median_step_seconds']:.3f} s."
        )
    if pools:
        each = ", ".join(f"`{pool}` {row['dice']['mean']:.4f}" for pool, row in pools.items())
        parts.append(f"The pooling methods, one run each: {each}.")
    return " ".join(parts)


def gpu_callbacks(folder: Path) -> str:
    """State what fraction of a step on a GPU the callbacks take."""
    rows = gpu(folder, "callbacks")
    whole = [rows[name]["median_step_seconds"] for name in ("all", "all, again") if name in rows]
    parts = []
    for name, row in rows.items():
        if whole and name.startswith("without "):
            share = 1 - row["median_step_seconds"] / median(whole)
            parts.append(f"{name.removeprefix('without ')} takes {100 * share:.1f}%")
    if not parts:
        return ""
    return f"Of a step of {1000 * median(whole):.0f} ms on a GPU, {' and '.join(parts)}."


def unmeasured(folder: Path) -> str:
    """List the results that no file has."""
    missing = {
        "estimation error": gpu_error(folder),
        "peak, largest batch size and time of each strategy": gpu_step(folder),
        "other projects' networks": gpu(folder, "peers"),
        "other projects' networks compiled and channels-last": gpu(folder, "tuned"),
        "residual encoders": gpu(folder, "residual"),
        "pooling": gpu(folder, "pool"),
        "hippocampus training": gpu_hippocampus(folder),
        "callback overhead": gpu_callbacks(folder),
    }
    open_parts = [name for name, found in missing.items() if not found]
    if not open_parts:
        return ""
    listed = "; ".join(open_parts)
    return f"**Not yet measured on a GPU:** {listed}. `make gpu` measures them."


def peak(row: Row | None) -> str:
    """Format the measured peak of a step, with the estimate in brackets where there is one."""
    if row is None:
        return OPEN
    found = row["measured"].get("allocated")
    estimate = f" ({format_mib(row['predicted']['allocated'])})" if "predicted" in row else ""
    return f"{OPEN if found is None else format_mib(found)}{estimate}"


def seconds(row: Row | None) -> str:
    """Format the seconds of a step."""
    return OPEN if row is None else f"{row['step_seconds']:.3f}"


def format_mib(nbytes: int) -> str:
    """Format bytes in MiB."""
    return f"{nbytes / MIB:,.0f} MiB"


def huge(folder: Path) -> str:
    """Compare checkpointing strategies on a whole volume at once."""
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    for name, row in get_estimated(result(folder, "cpu-step"), "huge").items():
        peak, reserved = (
            f"{row[f'peak_{kind}_gib']:.1f} GiB" for kind in ("allocated", "reserved")
        )
        lines.append(f"| `{name}` | {peak} | {reserved} |")
    return "\n".join(lines)


def same_dice(folder: Path) -> str:
    """Compare fused blocks with plain modules."""
    lines = ["| | `checkpointing=` | Dice |", "| --- | --- | --- |"]
    for job, found in result(folder, "cpu-same-dice").items():
        for name, dice in found["dice"].items():
            values = ", ".join(f"{d:.4f}" for d in (dice if isinstance(dice, list) else [dice]))
            label = "plain modules" if name == "plain" else f"`{name}`"
            lines.append(f"| {job} | {label} | {values} |")
    return "\n".join(lines)


def chaos(folder: Path) -> str:
    """List what interrupted runs, and what was found."""
    lines = ["| interruption, and check | found | goal | |", "| --- | --- | --- | --- |"]
    for part in result(folder, "cpu-chaos")["parts"].values():
        for row in part["rows"]:
            missed = "" if row["good"] else "missed"
            cells = (row["check"], row["found"], row["goal"], missed)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def slurm(folder: Path) -> str:
    """List how jobs of two nodes were interrupted and resumed."""
    lines = [
        "| launcher | interruption | weights at the end | message |",
        "| --- | --- | --- | --- |",
    ]
    for scene in result(folder, "cpu-slurm")["scenes"]:
        row = (scene[key] for key in ("launcher", "scene", "weights", "said"))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def corrupted_inputs(folder: Path) -> str:
    """Count corrupted inputs by kind and verdict."""
    cases = result(folder, "cpu-corrupted-inputs")["cases"]
    verdicts = sorted(
        {case["verdict"] for case in cases}, key="refused harmless".find, reverse=True
    )
    lines = [f"| | {' | '.join(verdicts)} |", f"| --- |{' --- |' * len(verdicts)}"]
    for kind in sorted({case["kind"] for case in cases}):
        met = Counter(case["verdict"] for case in cases if case["kind"] == kind)
        lines.append(f"| {kind} | {' | '.join(str(met[verdict]) for verdict in verdicts)} |")
    return "\n".join(lines)


def fuzz(folder: Path) -> str:
    """Count random inputs by kind and verdict."""
    lines = ["| | inputs | accepted | refused | failures |", "| --- | --- | --- | --- | --- |"]
    for kind, verdicts in result(folder, "cpu-fuzz")["kinds"].items():
        total, fine = sum(verdicts.values()), [verdicts["accepted"], verdicts["refused"]]
        cells = (total, *fine, total - sum(fine))
        lines.append(f"| {kind} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


def storage_faults(folder: Path) -> str:
    """Count faults of storage by command and verdict."""
    content = result(folder, "cpu-storage-faults")
    lines = [
        f"{content['tried']:,} of {content['faults']:,} faults, drawn at random:",
        "",
        "| | went on | ended | not met | failures |",
        "| --- | --- | --- | --- | --- |",
    ]
    commands = dict.fromkeys(case["fault"].partition(":")[0] for case in content["cases"])
    for command in commands:
        met = Counter(
            case["verdict"] for case in content["cases"] if case["fault"].startswith(f"{command}:")
        )
        fine = [met[verdict] for verdict in ("went on", "ended", "not met")]
        lines.append(f"| {command} | {' | '.join(map(str, fine))} | {met.total() - sum(fine)} |")
    return "\n".join(lines)


def environments(folder: Path) -> str:
    """Count scenarios of environments, and name those that were not tried or failed."""
    content = result(folder, "cpu-environments")
    others = [
        f"- {case['verdict']}: {case['scenario']} ({case['reason']})"
        for case in content["cases"]
        if case["verdict"] != "passed"
    ]
    counts = f"{content['passed']} of {content['scenarios']} scenarios passed"
    return "\n".join([f"{counts}:\n" if others else f"{counts}.", *others])


def start(folder: Path) -> str:
    """List the seconds until a command begins its work."""
    commands = result(folder, "cpu-start")["commands"]
    lines = ["| | seconds |", "| --- | --- |"]
    for name in ("unet3d --help", "unet3d train --help", "unet3d memory", "unet3d doctor"):
        lines.append(f"| `{name}` | {commands[name]['median_seconds']:.2f} |")
    first = commands["unet3d train, to its first step"]
    phases = first["median_seconds_by_phase"].items()
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in phases if taken >= 0.05)
    lines.append(f"| `unet3d train`, to its first step ({parts}) | {first['median_seconds']:.2f} |")
    return "\n".join(lines)


def results(folder: Path) -> str:
    """List files with the commands that recreate them, as in benchmarks/README.md."""
    rows = re.findall(r"^\|.*\|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    return "\n".join(rows)


def big(folder: Path) -> str:
    """Compare checkpointing strategies on the job of the tutorial about large volumes."""
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    study = result(folder, "predicted-big")["study"]
    rows = use_current_names({row["value"]: row for row in study})
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["peak_allocated_bytes"]):
        peak, reserved = (format_mib(row[f"peak_{k}_bytes"]) for k in ("allocated", "reserved"))
        strategy = name.removeprefix("checkpointing=")
        lines.append(f"| `{strategy}` | {peak} | {reserved} |")
    return "\n".join(lines)


def big_fit(folder: Path) -> str:
    """List settings that fit, as options to paste."""
    lines = ["| options | reserved | more convolution FLOPs |", "| --- | --- | --- |"]
    content = result(folder, "predicted-big")
    recorded = [row["value"] for row in content["study"]]
    # As `unet3d suggest` sorts them; they were recorded before batches of one came last.
    for row in sorted(content["fit"], key=lambda row: "data.batch_size=1" in row["overrides"]):
        reserved = format_mib(row["peak_reserved_bytes"])
        words = " ".join(get_current_name(word, recorded) for word in row["overrides"])
        lines.append(f"| `{words}` | {reserved} | {100 * row['extra_compute']:.0f}% |")
    return "\n".join(lines)


def monai_parts(folder: Path) -> str:
    lines = ["| one CPU core | | time | memory |", "| --- | --- | ---: | ---: |"]
    for part, content in result(folder, "cpu-monai-parts")["parts"].items():
        ours = next(iter(content["rows"].values()))
        for name, row in content["rows"].items():
            owner = "unet3d" if name == "unet3d" else f"MONAI: {name}"
            ratio = row["seconds"] / ours["seconds"]
            lines.append(f"| {part} | {owner} | {ratio:.1f}x | {row['peak_mib']:,.0f} MiB |")
    return "\n".join(lines)


def partial_labels(folder: Path) -> str:
    content = result(folder, "cpu-partial-labels")
    rows = {
        "full": "all labels",
        "partial": "half of the cases with one structure, half with the other, `data.annotated`",
        "background": "the same, without `data.annotated`",
    }
    names = list(content["dice"]["full"])
    lines = [
        f"| training cases of fold 0 of the hippocampus, {content['steps']:,} steps | "
        f"{' | '.join(names)} | mean Dice | of full labels |",
        f"| --- | {'---: | ' * len(names)}---: | ---: |",
    ]
    for kind, about in rows.items():
        scores = " | ".join(f"{content['dice'][kind][name]:.3f}" for name in names)
        mean, ratio = content["mean"][kind], content["ratio"][kind]
        lines.append(f"| {about} | {scores} | {mean:.3f} | {ratio:.3f} |")
    lines += ["", f"One run each, evaluated on full labels: `{content['command']}`."]
    return "\n".join(lines)


def bundle_labels(folder: Path) -> str:
    content = result(folder, "cpu-bundle")
    runtimes = {"script": "`./scripts/predict.py` with onnxruntime", "monai": "`monai.bundle run`"}
    lines = [
        "| scans | without unet3d | voxels | of structures | labels that differ | largest distance "
        "of their two largest logits |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for dataset, measured in content.items():
        for key, name in runtimes.items() if dataset != "versions" else ():
            found = measured[key]
            gap = f"{found['largest_gap']:.0e}" if found["different"] else "-"
            lines.append(
                f"| {measured['cases']} of {dataset} | {name} | {found['voxels']:,} | "
                f"{found['foreground']:,} | {found['different']:,} | {gap} |"
            )
    return "\n".join(lines)


def result(folder: Path, name: str) -> Any:
    """Read a file of benchmarks/."""
    return json.loads((folder / f"{name}.json").read_text())


def get_estimated(content: Any, part: str) -> Rows:
    """Return the estimated rows of a part of cpu-step.json."""
    return use_current_names(content["predicted"][part]["rows"])


def get_times(content: Any) -> Rows:
    """Return the timed rows of cpu-step.json at the size with all networks."""
    return content["times, 32"]["cases"]["96x64x32"]["rows"]


def format_time(row: Row) -> str:
    """Return the relative time of a step, with the range over processes."""
    low, high = row["time_ratio_range"]
    if low == high:
        return f"{low:.2f}x"
    return f"{row['time_ratio']:.2f}x ({low:.2f} to {high:.2f})"


def gpu(folder: Path, part: str) -> Rows:
    """Return the rows of a part; none if it has not been measured."""
    return use_current_names(gpu_part(folder, part).get("rows", {}))


def gpu_part(folder: Path, part: str) -> dict[str, Any]:
    """Return a part of the GPU report, of the device with the most parts."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    reports = [c["parts"] for c in found if "environment" in c.get("parts", {})]
    return max(reports, key=len, default={}).get(part, {})


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__: table
    for table in (
        *(
            front,
            front_limits,
            unmeasured,
            pooling_bytes,
            pooling,
            predict,
            predict_speed,
            skip_background,
            hippocampus,
            quality,
            quality_screen,
            step,
            step_times,
            residual_encoder,
            modeled,
            host_time,
            peers,
        ),
        *(
            huge,
            same_dice,
            chaos,
            slurm,
            corrupted_inputs,
            fuzz,
            storage_faults,
            environments,
            start,
            results,
            big,
            big_fit,
        ),
        *(
            gpu_device,
            gpu_error,
            gpu_step,
            gpu_tiles,
            gpu_evidence,
            nnunet_presets,
            nnunet_fused,
            monai_networks,
            monai_parts,
            partial_labels,
            bundle_labels,
            nnunet_patches,
            gpu_residual,
            gpu_hippocampus,
            gpu_callbacks,
        ),
    )
}


def filled(text: str, folder: Path = BENCHMARKS) -> str:
    """Return the text with all tables recomputed."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        if re.search(pattern, text, re.DOTALL):
            made = table(folder)
            made = f"{made}\n" if made else ""
            text = re.sub(pattern, lambda m, t=made: f"{m[1]}{t}{m[2]}", text, flags=re.DOTALL)
    return text


def documents() -> list[Path]:
    """List the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    for document in documents():
        text = document.read_text()
        if (made := filled(text)) != text:
            document.write_text(made)
            print(document.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
