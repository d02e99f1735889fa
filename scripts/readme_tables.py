"""Take the documents' measured tables from benchmarks/: `python scripts/readme_tables.py`.

Between `<!-- NAME -->` and `<!-- end -->`, in the README and in docs/, stands what the function of
that name makes; a test compares. A figure that no result file has reads "not measured yet".
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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


def huge() -> str:
    """A whole volume at once, by what is redone."""
    content = result("cpu-step")["predicted"]["huge"]
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    for rung, row in content["rows"].items():
        peak, reserved = (
            f"{row[f'peak_{kind}_gib']:.1f} GiB" for kind in ("allocated", "reserved")
        )
        lines.append(f"| `{rung}` | {peak} | {reserved} |")
    return "\n".join(lines)


def same_dice() -> str:
    """Lean blocks beside plain modules."""
    lines = ["| | `checkpointing=` | Dice |", "| --- | --- | --- |"]
    for job, found in result("cpu-same-dice").items():
        for rung, dice in found["dice"].items():
            shown = ", ".join(f"{d:.4f}" for d in (dice if isinstance(dice, list) else [dice]))
            lines.append(
                f"| {job} | {'plain modules' if rung == 'plain' else f'`{rung}`'} | {shown} |"
            )
    return "\n".join(lines)


def chaos() -> str:
    """What was done to runs, and what became of them."""
    lines = ["| | found | goal | |", "| --- | --- | --- | --- |"]
    for part in result("cpu-chaos")["parts"].values():
        for row in part["rows"]:
            missed = "" if row["good"] else "missed"
            lines.append(f"| {row['check']} | {row['found']} | {row['goal']} | {missed} |")
    return "\n".join(lines)


def slurm() -> str:
    """Jobs of two nodes that were stopped, and went on."""
    lines = ["| launcher | scene | weights at the end | said |", "| --- | --- | --- | --- |"]
    for scene in result("cpu-slurm")["scenes"]:
        row = (scene[key] for key in ("launcher", "scene", "weights", "said"))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def hostile() -> str:
    """Corrupted inputs by kind and by how they were met."""
    cases = result("cpu-hostile")["cases"]
    verdicts = sorted(
        {case["verdict"] for case in cases}, key="refused harmless".find, reverse=True
    )
    lines = [f"| | {' | '.join(verdicts)} |", f"| --- |{' --- |' * len(verdicts)}"]
    for kind in sorted({case["kind"] for case in cases}):
        met = Counter(case["verdict"] for case in cases if case["kind"] == kind)
        lines.append(f"| {kind} | {' | '.join(str(met[verdict]) for verdict in verdicts)} |")
    return "\n".join(lines)


def results() -> str:
    """Which file comes from which command, as benchmarks/README.md has it."""
    rows = re.findall(r"^\|.*\|$", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    return "\n".join(rows)


def big() -> str:
    """The tutorial's job on a small card, by what is redone."""
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    for row in sorted(
        result("predicted-big")["study"], key=lambda row: -row["peak_allocated_bytes"]
    ):
        peak, reserved = (row[f"peak_{kind}_bytes"] / 2**20 for kind in ("allocated", "reserved"))
        name = row["value"].removeprefix("checkpointing=")
        lines.append(f"| `{name}` | {peak:,.0f} MiB | {reserved:,.0f} MiB |")
    return "\n".join(lines)


def big_fit() -> str:
    """What fits, as lines to paste."""
    lines = ["| overrides | reserved | more convolution work |", "| --- | --- | --- |"]
    for row in result("predicted-big")["fit"]:
        reserved = row["peak_reserved_bytes"] / 2**20
        words = " ".join(row["overrides"])
        lines.append(f"| `{words}` | {reserved:,.0f} MiB | {100 * row['extra_compute']:.0f} % |")
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
    "huge": huge,
    "same dice": same_dice,
    "chaos": chaos,
    "slurm": slurm,
    "hostile": hostile,
    "results": results,
    "big": big,
    "big fit": big_fit,
}


def filled(text: str) -> str:
    """The text with every table made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL)
    return text


def pages() -> list[Path]:
    """Documents with a table."""
    every = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in every if "<!-- end -->" in page.read_text()]


def main() -> int:
    for page in pages():
        page.write_text(filled(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
