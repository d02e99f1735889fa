"""Tables of what was measured on a CPU, or estimated: a function for each table."""

from math import prod
from typing import Any

from scripts.bench.step import CHANNELS_LAST, STRATEGIES
from scripts.docs.tables import (
    OPEN,
    Row,
    format_mib,
    format_shape,
    format_strategy,
    format_time,
    make_table,
    read_estimates,
    read_gpu,
    read_result,
    read_times,
)
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.text import GIB, MIB

CLASS_ROWS = {
    "nnU-Net": "nnU-Net, with its loss",
    "MONAI DynUNet": "MONAI DynUNet, DiceCELoss, no deep supervision",
    "linear_cross_entropy": "nnU-Net, `torch.nn.functional.linear_cross_entropy` alone",
    **{name: f"`{name}`" for name in ("fused", "lean", "leanest")},
}
POOLS = ("median", "max", "avg", "approx_median", "nn.MaxPool3d", "unfold and sort", "soft rank")


def step() -> str:
    """Compare the compute of each checkpointing strategy, and its time on a CPU."""
    estimates, times, lines = read_estimates("forum"), read_times(), []
    for name in STRATEGIES:
        work = f"{estimates[f'small, {name}']['extra_work']:.0%}"
        lines.append(f"{format_strategy(name)} | {work} | {format_time(times[name])}")
    heads = "`checkpointing=` | small: more convolution FLOPs | time of a step on a CPU"
    return make_table(heads, lines)


def step_times() -> str:
    """Compare times of a step on a CPU at several sizes; compiled in the faster layout."""
    titles = {
        "96x64x32": "2 x 96x64x32, 16 channels",
        "64x64x64, width 32": "1 x 64x64x64, 32 channels",
        "patches of 32": "default run, 2 x 32x32x32",
        "patches of 16": "default run, 2 x 16x16x16",
    }
    sizes = [read_times(case) for case in titles]
    slower = (f"MONAI DynUNet{CHANNELS_LAST}", f"nnU-Net PlainConvUNet{CHANNELS_LAST}")
    names = [n for n in sizes[0] if n in sizes[1] and n not in slower]
    compiled = [n for n in sizes[0] if n.endswith("compiled")]
    for network in dict.fromkeys(name.partition(",")[0] for name in compiled):
        layouts = [name for name in compiled if name.partition(",")[0] == network]
        names.append(min(layouts, key=lambda name: sizes[0][name]["time_ratio"]))
    lines = [" | ".join([n, *(format_time(size.get(n)) for size in sizes)]) for n in names]
    return make_table(" | " + " | ".join(titles.values()), lines)


def depthwise() -> str:
    """Compare the times of depthwise convolutions and of MedNeXt with torch's."""
    rows, lines = read_result("cpu-depthwise")["rows"], []
    for name, row in rows.items():
        title, _, precision = name.rpartition(", ")
        if precision == "float32":
            half = rows[f"{title}, bfloat16"]
            lines.append(f"{title} | {row['ratio']:.1f}x | {half['ratio']:.1f}x")
    return make_table("channels-last maps | float32 | bfloat16", lines)


def mednext() -> str:
    """Compare the memory of MedNeXt L and the time of MedNeXt S on a CPU by strategy."""
    report, lines = read_result("cpu-mednext"), []
    for name, row in report["memory"].items():
        sizes = [f"{row[f'peak_{kind}_bytes'] / GIB:.1f}" for kind in ("allocated", "reserved")]
        step = report["steps"].get(name)
        time = "" if step is None else f"{step['ratio']:.2f}x"
        lines.append(" | ".join([f"`{name}`", *sizes, time]))
    size = report["size"]
    heads = f"MedNeXt S at 2 x {size}^3 on a CPU, of MONAI's time"
    return make_table(f"`checkpointing=` | allocated, GiB | reserved, GiB | {heads}", lines)


def classes() -> str:
    """Compare the memory of a step by the number of classes."""
    peaks = read_result("cpu-classes")["peak_mib"]
    counts = list(peaks["nnU-Net"])
    lines = [
        " | ".join([CLASS_ROWS[name], *(f"{row[n]:,}" for n in counts)])
        for name, row in peaks.items()
    ]
    heads = " | ".join(["allocated MiB", *(f"{int(n):,} classes:" for n in counts)])
    return make_table(heads, lines)


def rivals() -> str:
    """Compare fused blocks with checkpoints and with Inductor's memory budget."""
    results = read_result("cpu-rivals")
    peaks, rows = results["predicted"]["rows"], results["measured"]["rows"]
    plain, lines = rows["plain modules"]["seconds"], []
    for name, row in rows.items():
        if name.endswith(("0.7", "0.3")):
            continue  # between its neighbors
        peak = f"{peaks[name]['allocated_mib']:,}" if name in peaks else ""
        cpu = f"{row['saved_mib']} | {row['peak_mib']} | {row['seconds'] / plain:.2f}x"
        lines.append(f"{format_strategy(name)} | {cpu} | {peak}")
    gpu = "allocated on a GPU, MiB (estimated):"
    return make_table(f" | stored for backward, MiB: | peak, MiB: | time: | {gpu}", lines)


def residual_encoder() -> str:
    """Compare nnU-Net's residual encoder with ours by strategy: memory, FLOPs and time."""
    estimates, times = read_estimates("residual encoder"), read_times("residual encoder")
    plain, lines = estimates["plain modules"]["convolution_flops"], []
    for name, row in estimates.items():
        more = f"{row['convolution_flops'] / plain - 1:.1%}" if name in STRATEGIES else ""
        cells = f"{format_strategy(name)} | {row['peak_allocated_mib']:,} | {more}"
        lines.append(f"{cells} | {format_time(times.get(name))}")
        if (last := name + CHANNELS_LAST) in times:
            lines.append(f"{last} |  |  | {format_time(times[last])}")
    heads = " | allocated MiB (estimated) | more convolution FLOPs | time of a step on a CPU"
    return make_table(heads, lines)


def big() -> str:
    """Compare checkpointing strategies on the job of the tutorial about large volumes."""
    study = read_result("predicted-big")["study"]
    lines = [
        f"`{row['value'].removeprefix('checkpointing=')}` | "
        f"{row['peak_allocated_bytes'] / MIB:,.0f} | {row['peak_reserved_bytes'] / MIB:,.0f}"
        for row in sorted(study, key=lambda row: -row["peak_allocated_bytes"])
        if row["value"] != "checkpointing=offload"  # recorded with fused blocks
    ]
    return make_table("`checkpointing=` | allocated, MiB: | reserved, MiB:", lines)


def big_fit() -> str:
    """List settings that fit, as options to paste."""
    fit = read_result("predicted-big")["fit"]
    # As `unet3d suggest` sorts them; they were recorded before batches of one came last.
    fit.sort(key=lambda row: "data.batch_size=1" in row["overrides"])
    lines = [
        f"`{' '.join(row['overrides'])}` | {format_mib(row['peak_reserved_bytes'])} | "
        f"{row['extra_compute']:.0%}"
        for row in fit
    ]
    return make_table("options | reserved | more convolution FLOPs", lines)


def nnunet_presets() -> str:
    """Compare estimates of nnU-Net's presets with the memory that its documentation states."""
    report, lines = read_result("predicted-nnunet"), []
    for preset in dict.fromkeys(name.split(", ")[0] for name in report["rows"]):
        rows = [report["rows"][f"{preset}, {dataset}"] for dataset in report["datasets"]]
        documented = rows[0]["documented_gb"]
        cells = [preset, f"{documented:.1f}"]
        for row in rows:
            reserved = row["strategies"]["plain modules"]["peak_reserved_bytes"]
            gb = (reserved + CUDA_CONTEXT_BYTES) / 1e9
            cells.append(f"{gb:.1f} for {format_shape(row['input_shape'])}")
            cells.append(f"{gb / documented - 1:+.0%}")
        lines.append(" | ".join(cells))
    heads = [f"{dataset}: estimate, GB | error:" for dataset in report["datasets"]]
    return make_table(" | ".join(["preset | documented, GB:", *heads]), lines)


def nnunet_fused() -> str:
    """Compare estimates of nnU-Net's presets with plain modules and with fused blocks."""
    strategies, lines = ("plain modules", "fused", "lean", "leanest"), []
    for name, row in read_result("predicted-nnunet")["rows"].items():
        plain, *peaks = (row["strategies"][s]["peak_reserved_bytes"] for s in strategies)
        cells = [f"{peak / GIB:.2f} ({peak / plain:.2f}x)" for peak in peaks]
        plan = f"{name}: {format_shape(row['input_shape'])}"
        lines.append(" | ".join([plan, f"{plain / GIB:.2f}", *cells]))
    return make_table(" | ".join(["plan of nnU-Net", *(f"{s}, GiB" for s in strategies)]), lines)


def nnunet_patches() -> str:
    """Show the largest patches of ResEnc L in the memory that nnU-Net needs for its own."""
    report, lines = read_result("predicted-nnunet"), []
    for name, found in report["largest_patches"].items():
        case = report["datasets"][name]["shape"][::-1]
        rows = [report["rows"][f"ResEnc L, {name}"], found["lean"], found["leanest"]]
        cells = [name, format_shape(case)]
        for _, _, *patch in (row["input_shape"] for row in rows):
            share = prod(map(min, patch, case)) / prod(case)
            cells.append(f"{format_shape(patch)}, {share:.0%} of the case")
        lines.append(" | ".join(cells))
    heads = "data | median case | patch that nnU-Net plans | with `lean` | with `leanest`"
    return make_table(heads, lines)


def fits() -> str:
    """Show the largest cubes of which two fit cards of some sizes."""
    lines = []
    for name, needed in read_result("cpu-step")["predicted"]["fits"]["rows"].items():
        model, strategy = name.split(", ")
        cells = [
            max((int(side) for side, mib in needed.items() if mib <= gib * 1024), default=0)
            for gib in (6, 8, 12, 24, 80)
        ]
        largest = max(map(int, needed))
        sides = " | ".join(f"{'≥ ' * (side == largest)}{side}³" if side else "" for side in cells)
        lines.append(f"`{model}` | `{strategy}` | {sides}")
    return make_table("`model=` | `checkpointing=` | 6 GB | 8 GB | 12 GB | 24 GB | 80 GB", lines)


def pooling_bytes() -> str:
    """Compare the bytes that pooling methods store and allocate per output, in fp32."""
    lines = []
    for name, rows in read_poolings().items():
        row = rows["1x8x320x150x26 float32"]
        lines.append(f"`{name}` | {format_stored(row)} | {row['peak_bytes']:.0f}")
    return make_table(" | stored | allocated at the peak", lines)


def pooling() -> str:
    """Compare the time of forward + backward with eager nn.MaxPool3d."""
    heads = " | CPU, 320x150x26 fp32 / bf16 | channels-last fp32 / bf16"
    measured, dtypes, lines = read_gpu("pool"), ("float32", "bfloat16"), []
    if measured:
        heads += " | GPU, 320x150x26 fp32 / bf16 | channels-last fp32 / bf16"
    for name, rows in read_poolings().items():
        first = [rows[f"1x8x320x150x26 {dtype}"] for dtype in dtypes]
        last = [rows[f"1x64x32x64x64 {dtype} channels-last"] for dtype in dtypes]
        cells = [f"`{name}`", join_ratios(first), join_ratios(last)]
        for layout in ("", " channels-last") if measured else ():
            cases = [measured.get(f"2x64x320x150x26 {dtype}{layout}", {}) for dtype in dtypes]
            cells.append(join_ratios([case.get("rows", {}).get(name) for case in cases]))
        lines.append(" | ".join(cells))
    return make_table(heads, lines)


def read_poolings() -> dict[str, dict[str, Row]]:
    """Return the results of each pooling method by title of the volume."""
    volumes = read_result("cpu-pool")["results"]
    rows = {volume["title"]: {row["pool"]: row for row in volume["rows"]} for volume in volumes}
    return {pool: {title: row[pool] for title, row in rows.items()} for pool in POOLS}


def join_ratios(rows: list[Any]) -> str:
    """Format times relative to nn.MaxPool3d in two precisions."""
    return " / ".join(f"{row['both_ratio']:.2f}x" if row else OPEN for row in rows)


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


def any_step() -> str:
    """Compare estimates of everyday steps with real CPU steps, by who estimates."""
    steps, lines = read_result("any-step-cpu")["steps"].values(), []
    names = {"error": "`estimate_step`", "MemTracker": "torch's MemTracker, of a real step"}
    names["formula"] = "weights, gradients and optimizer state"
    for key, name in names.items():
        off = [
            100 * s[key] / s["measured"] for s in steps if isinstance(s.get(key), int) and s[key]
        ]
        failed = sum(not isinstance(s.get(key), int) for s in steps)
        exact = len(steps) - len(off) - failed
        spread = f"{min(off):+.1f}% to {max(off):+.1f}%" if off else ""
        lines.append(f"{name} | {exact} | {len(off)} | {spread} | {failed}")
    heads = f"of {len(steps)} everyday steps | exact: | off: | error: | fail:"
    return make_table(heads, lines)


def any_network() -> str:
    """Compare estimates of a step of others' networks with real CPU steps, by package."""
    rows, lines = read_result("any-step-cpu")["networks"], []
    for package in dict.fromkeys(name.split()[0] for name in rows):
        found = [row for name, row in rows.items() if name.split()[0] == package]
        off = [100 * row["error"] / row["measured"] for row in found if row.get("error")]
        exact = sum(row.get("error") == 0 for row in found)
        spread = f"{min(off):+.1f}% to {max(off):+.1f}%" if off else ""
        refused = sum("refused" in row for row in found)
        lines.append(f"{package} | {exact} | {len(off)} | {spread} | {refused}")
    return make_table(f"{len(rows)} networks of | exact: | off: | error: | refused:", lines)
