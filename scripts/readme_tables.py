"""Take the README's measured tables from benchmarks/: `python scripts/readme_tables.py`.

Between `<!-- NAME -->` and `<!-- end -->` stands what the function of that name makes; a test
compares.
A figure that no result file has reads "not measured yet".
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
OPEN = "not measured yet"
POOLS = ("median", "max", "avg", "approx_median", "nn.MaxPool3d", "unfold and sort", "soft rank")


def pooling() -> str:
    """Forward + backward against eager nn.MaxPool3d, and bytes for each output."""
    content = result("cpu-pool")
    lines = [
        "| | CPU, 320x150x26 fp32 / bf16 | channels-last fp32 / bf16 | saved bytes fp32 | "
        "peak bytes fp32 / bf16 | GPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in POOLS:
        rows = {}
        for volume in content["results"]:
            key = (tuple(volume["shape"]), volume["dtype"], volume["channels_last"])
            rows[key] = {row["pool"]: row for row in volume["rows"]}[name]
        flat, last = (1, 8, 320, 150, 26), (1, 64, 32, 64, 64)
        wide, half = rows[flat, "float32", False], rows[flat, "bfloat16", False]
        wide_last, half_last = rows[last, "float32", True], rows[last, "bfloat16", True]
        kept = " + input" if wide["keeps_input"] else ""
        lines.append(
            f"| `{name}` | {wide['both_ratio']:.2f}x / {half['both_ratio']:.2f}x "
            f"| {wide_last['both_ratio']:.2f}x / {half_last['both_ratio']:.2f}x "
            f"| {wide['saved_bytes']:.0f}{kept} "
            f"| {wide['peak_bytes']:.0f} / {half['peak_bytes']:.0f} | {OPEN} |"
        )
    return "\n".join(lines)


def predict() -> str:
    """The memory of a scan with many classes, in a sentence."""
    case = result("cpu-predict")["cases"][-1]
    size = " x ".join(map(str, case["size"]))
    peak, forecast, whole = (
        f"{case[key] / 2**30:.1f} GiB"
        for key in ("peak_bytes", "forecast_bytes", "whole_logits_bytes")
    )
    return (
        f"{case['classes']} classes at {size} voxels took {peak} of RAM beside the network "
        f"(forecast {forecast}); their logits as a whole would be {whole}\n"
        "(`python scripts/bench_predict.py`)."
    )


def hippocampus() -> str:
    """Folds and poolings, as far as they are measured."""
    measured = result("cpu-hippocampus")
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
        peak = ", ".join(f"{v / 2**20:.0f} MiB {k}" for k, v in mean["peak_bytes"].items())
        lines.append(
            f"| {name} | {dice['Anterior']:.4f} / {dice['Posterior']:.4f} "
            f"| {dice['mean']:.4f}{spread} | {runs[0]['steps']} "
            f"| {mean['median_step_seconds']:.2f} | {peak} |"
        )
    return "\n".join(lines)


def step() -> str:
    """What each rung takes and costs at the forum's job, and on this machine's CPU."""
    content = result("cpu-step")
    rows, times = content["predicted"]["forum"]["rows"], content["time, 32"]["rows"]
    lines = [
        "| `checkpointing=` | small: peak | more convolution work | largest batch in 7000 MiB "
        "| large: peak | time of a step on a CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rung in ("as written", "none", "skips", "lean", "leanest", "offload", "blocks"):
        small, large = rows[f"small, {rung}"], rows[f"large, {rung}"]
        timed = times.get("as written" if rung == "as written" else f"ours, {rung}")
        time = "not measured yet" if timed is None else f"{timed['time_ratio']:.2f}x"
        shown = "as written, no choice" if rung == "as written" else f"`{rung}`"
        batch = small["largest_batch_in_7000_mib"] or "1"
        lines.append(
            f"| {shown} | {small['peak_allocated_mib']} MiB | {small['extra_work'] * 100:.0f} % "
            f"| {batch} | {large['peak_allocated_mib']} MiB | {time} |"
        )
    return "\n".join(lines)


def peers() -> str:
    """The same channels in the networks that others give."""
    content = result("cpu-step")
    rows, times = content["predicted"]["peers"]["rows"], content["time, 32"]["rows"]
    lines = ["| | peak | time of a step on a CPU |", "| --- | --- | --- |"]
    for name, row in rows.items():
        timed = times[name]["time_ratio"]
        lines.append(f"| {name} | {row['peak_allocated_mib']} MiB | {timed:.2f}x |")
    return "\n".join(lines)


def result(name: str) -> Any:
    """A file of benchmarks/."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


TABLES: dict[str, Callable[[], str]] = {
    "pooling": pooling,
    "predict": predict,
    "hippocampus": hippocampus,
    "step": step,
    "peers": peers,
}


def filled(text: str) -> str:
    """The text with every table made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    README.write_text(filled(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
