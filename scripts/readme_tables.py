"""Take the documents' measured figures from benchmarks/: `python scripts/readme_tables.py`.

Between `<!-- NAME -->` and `<!-- end -->`, in README.md and in docs/, stands what the function of
that name makes; a test compares. GPU figures are those of gpu_report.py's <device>.json, where
there is one. A figure that no result file has reads "not measured yet".
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
OPEN = "not measured yet"
FORUM = ("as written", "none", "skips", "lean", "leanest", "offload", "blocks")
POOLS = ("median", "max", "avg", "approx_median", "nn.MaxPool3d", "unfold and sort", "soft rank")

Row = dict[str, Any]
Rows = dict[str, Row]


def pooling(folder: Path) -> str:
    """Forward + backward against eager nn.MaxPool3d, and bytes for each output."""
    content, raced = result(folder, "cpu-pool"), gpu(folder, "pool")
    lines = [
        "| | CPU, 320x150x26 fp32 / bf16 | channels-last fp32 / bf16 | saved bytes fp32 | "
        "peak bytes fp32 / bf16 | GPU, 320x150x26 fp32 / bf16 | channels-last fp32 / bf16 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
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
            f"| {wide['peak_bytes']:.0f} / {half['peak_bytes']:.0f} "
            f"| {both(raced, name, '')} | {both(raced, name, ' channels-last')} |"
        )
    return "\n".join(lines)


def both(raced: Rows, name: str, layout: str) -> str:
    """A pooling's ratios on a GPU, in both precisions."""
    found = []
    for dtype in ("float32", "bfloat16"):
        row = raced.get(f"2x64x320x150x26 {dtype}{layout}", {}).get("rows", {}).get(name)
        found.append(OPEN if row is None else f"{row['both_ratio']:.2f}x")
    return OPEN if set(found) == {OPEN} else " / ".join(found)


def predict(folder: Path) -> str:
    """The memory of a scan with many classes, in a sentence."""
    case = result(folder, "cpu-predict")["cases"][-1]
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


def hippocampus(folder: Path) -> str:
    """Folds and poolings, as far as they are measured."""
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
        peak = ", ".join(f"{v / 2**20:.0f} MiB {k}" for k, v in mean["peak_bytes"].items())
        lines.append(
            f"| {name} | {dice['Anterior']:.4f} / {dice['Posterior']:.4f} "
            f"| {dice['mean']:.4f}{spread} | {runs[0]['steps']} "
            f"| {mean['median_step_seconds']:.2f} | {peak} |"
        )
    return "\n".join(lines)


def quality(folder: Path) -> str:
    """Held-out Dice of each job, trained as long as it is meant to be."""
    return quality_table(folder, "cpu-quality")


def quality_screen(folder: Path) -> str:
    """Held-out Dice of short runs with other settings and other networks."""
    return quality_table(folder, "cpu-screen-quality")


def quality_table(folder: Path, name: str) -> str:
    """Held-out Dice of each job by each variant."""
    if not (folder / f"{name}.json").is_file():
        return f"Dice of several networks over seeds: {OPEN}."
    lines = [
        "| job | network | Dice, mean | 95 % over cases | worst run | runs | steps "
        "| seconds per step | predicted peak |",
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
                f"| {job} | {variant} | {found['dice']:.4f}{spread} | {between} | {worst} "
                f"| {found['runs']} | {found['steps']} | {found['median_step_seconds']:.2f} "
                f"| {OPEN if tensors is None else mib(tensors)} |"
            )
    return "\n".join(lines)


def step(folder: Path) -> str:
    """What each rung takes and costs at the forum's job, and on this machine's CPU."""
    content = result(folder, "cpu-step")
    rows, times = content["predicted"]["forum"]["rows"], content["time, 32"]["rows"]
    lines = [
        "| `checkpointing=` | small: peak | more convolution work | largest batch in 7000 MiB "
        "| large: peak | time of a step on a CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rung in FORUM:
        small, large = rows[f"small, {rung}"], rows[f"large, {rung}"]
        timed = times.get("as written" if rung == "as written" else f"ours, {rung}")
        time = OPEN if timed is None else f"{timed['time_ratio']:.2f}x"
        shown = "as written, no choice" if rung == "as written" else f"`{rung}`"
        batch = small["largest_batch_in_7000_mib"] or "1"
        lines.append(
            f"| {shown} | {small['peak_allocated_mib']} MiB | {small['extra_work'] * 100:.0f} % "
            f"| {batch} | {large['peak_allocated_mib']} MiB | {time} |"
        )
    return "\n".join(lines)


def peers(folder: Path) -> str:
    """The same channels in the networks that others give."""
    content = result(folder, "cpu-step")
    rows, times = content["predicted"]["peers"]["rows"], content["time, 32"]["rows"]
    lines = ["| | peak | time of a step on a CPU |", "| --- | --- | --- |"]
    for name, row in rows.items():
        timed = times[name]["time_ratio"]
        lines.append(f"| {name} | {row['peak_allocated_mib']} MiB | {timed:.2f}x |")
    return "\n".join(lines)


def gpu_device(folder: Path) -> str:
    """What the GPU's figures were measured on."""
    found = gpu(folder, "environment").get("machine")
    if found is None:
        return f"The figures of a GPU: {OPEN}."
    versions = ", ".join(
        f"{name} {found[key]}"
        for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("Triton", "triton"))
        if found.get(key)
    )
    return f"Measured on one {found['device']} ({versions}; `make gpu`)."


def gpu_prediction(folder: Path) -> str:
    """How far predictions are from measured peaks."""
    errors, said = gpu_part(folder, "predict").get("summary", {}), []
    for kind in ("allocated", "reserved"):
        if kind in errors:
            of = errors[kind]
            said.append(
                f"{kind} memory is off by {of['median_percent']:.1f} % in the median, by at most "
                f"{of['p95_percent']:.1f} % in 95 of 100, at the worst "
                f"{-of['worst_too_low_percent']:.1f} % too low"
            )
    if not said:
        return f"The error of predictions on a GPU: {OPEN}."
    return f"On a GPU, over {errors['configurations']} configurations, {'; '.join(said)}."


def gpu_step(folder: Path) -> str:
    """The forum's job on a GPU: peaks beside their predictions, batches, times."""
    rows, batches = gpu(folder, "forum"), gpu(folder, "batch")
    if not rows and not batches:
        return f"Peak and time of the forum's job on a GPU: {OPEN}."
    lines = [
        "| on a GPU | small: peak (predicted) | seconds per step | largest batch in 7000 MiB "
        "(predicted) | large: peak (predicted) | seconds per step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rung in ("as the forum ran it", *FORUM):
        cells = []
        for net in ("small", "large"):
            cells += [peak(rows.get(f"{net}, {rung}")), seconds(rows.get(f"{net}, {rung}"))]
            if net == "small":
                tried = batches.get(f"{net}, {rung}")
                cells.append(
                    OPEN if tried is None else f"{tried['largest']} ({tried['predicted']})"
                )
        shown = f"`{rung}`" if rung in FORUM[1:] else rung
        if rung == "as the forum ran it":
            cells[2] = ""  # it is what everything is compared with
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_peers(folder: Path) -> str:
    """The same channels in the networks that others give, on a GPU."""
    rows = gpu(folder, "peers")
    if not rows:
        return f"The same on a GPU: {OPEN}."
    lines = ["| on a GPU | peak (predicted) | seconds per step |", "| --- | --- | --- |"]
    lines += [f"| {name} | {peak(row)} | {seconds(row)} |" for name, row in rows.items()]
    return "\n".join(lines)


def gpu_hippocampus(folder: Path) -> str:
    """How long a GPU takes to learn the hippocampus, and what poolings make of it."""
    found, pools = gpu(folder, "hippocampus").get("fold 0"), gpu(folder, "pools")
    said = []
    if found is not None:
        goal, reached = found["goal"], found["seconds_to_goal"]
        there = "not reached" if reached is None else f"reached after {reached:.0f} s"
        said.append(
            f"`experiment=hippocampus` on a GPU, fold 0: a Dice of {goal} {there}, "
            f"{found['dice']['mean']:.4f} at the end of {found['steps']} steps of "
            f"{found['median_step_seconds']:.3f} s."
        )
    if pools:
        each = ", ".join(f"`{pool}` {row['dice']['mean']:.4f}" for pool, row in pools.items())
        said.append(f"The poolings, one run each: {each}.")
    return " ".join(said) or f"The hippocampus on a GPU: {OPEN}."


def gpu_callbacks(folder: Path) -> str:
    """What the meter and surviving take of a step on a GPU."""
    rows = gpu(folder, "callbacks")
    whole = [rows[name]["median_step_seconds"] for name in ("all", "all, again") if name in rows]
    said = []
    for shown in ("the meter", "what survives"):
        if whole and (row := rows.get(f"without {shown}")) is not None:
            share = 1 - row["median_step_seconds"] / median(whole)
            said.append(f"{shown} takes {100 * share:.1f} %")
    if not said:
        return f"What the meter and surviving take of a step on a GPU: {OPEN}."
    return f"Of a step of {1000 * median(whole):.0f} ms on a GPU, {' and '.join(said)}."


def peak(row: Row | None) -> str:
    """What a step took, and in brackets what was predicted."""
    if row is None:
        return OPEN
    found, expected = row["measured"].get("allocated"), row["predicted"]["allocated"]
    return f"{OPEN if found is None else mib(found)} ({mib(expected)})"


def seconds(row: Row | None) -> str:
    """Of a step."""
    return OPEN if row is None else f"{row['step_seconds']:.3f}"


def mib(nbytes: int) -> str:
    """In MiB."""
    return f"{nbytes / 2**20:.0f} MiB"


def huge(folder: Path) -> str:
    """A whole volume at once, by what is redone."""
    content = result(folder, "cpu-step")["predicted"]["huge"]
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    for rung, row in content["rows"].items():
        peak, reserved = (
            f"{row[f'peak_{kind}_gib']:.1f} GiB" for kind in ("allocated", "reserved")
        )
        lines.append(f"| `{rung}` | {peak} | {reserved} |")
    return "\n".join(lines)


def same_dice(folder: Path) -> str:
    """Lean blocks beside plain modules."""
    lines = ["| | `checkpointing=` | Dice |", "| --- | --- | --- |"]
    for job, found in result(folder, "cpu-same-dice").items():
        for rung, dice in found["dice"].items():
            shown = ", ".join(f"{d:.4f}" for d in (dice if isinstance(dice, list) else [dice]))
            lines.append(
                f"| {job} | {'plain modules' if rung == 'plain' else f'`{rung}`'} | {shown} |"
            )
    return "\n".join(lines)


def chaos(folder: Path) -> str:
    """What was done to runs, and what became of them."""
    lines = ["| | found | goal | |", "| --- | --- | --- | --- |"]
    for part in result(folder, "cpu-chaos")["parts"].values():
        for row in part["rows"]:
            missed = "" if row["good"] else "missed"
            lines.append(f"| {row['check']} | {row['found']} | {row['goal']} | {missed} |")
    return "\n".join(lines)


def slurm(folder: Path) -> str:
    """Jobs of two nodes that were stopped, and went on."""
    lines = ["| launcher | scene | weights at the end | said |", "| --- | --- | --- | --- |"]
    for scene in result(folder, "cpu-slurm")["scenes"]:
        row = (scene[key] for key in ("launcher", "scene", "weights", "said"))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def hostile(folder: Path) -> str:
    """Corrupted inputs by kind and by how they were met."""
    cases = result(folder, "cpu-hostile")["cases"]
    verdicts = sorted(
        {case["verdict"] for case in cases}, key="refused harmless".find, reverse=True
    )
    lines = [f"| | {' | '.join(verdicts)} |", f"| --- |{' --- |' * len(verdicts)}"]
    for kind in sorted({case["kind"] for case in cases}):
        met = Counter(case["verdict"] for case in cases if case["kind"] == kind)
        lines.append(f"| {kind} | {' | '.join(str(met[verdict]) for verdict in verdicts)} |")
    return "\n".join(lines)


def start(folder: Path) -> str:
    """Seconds until a command begins."""
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
    """Which file comes from which command, as benchmarks/README.md has it."""
    rows = re.findall(r"^\|.*\|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    return "\n".join(rows)


def big(folder: Path) -> str:
    """The tutorial's job on a small card, by what is redone."""
    lines = ["| `checkpointing=` | allocated | reserved |", "| --- | --- | --- |"]
    for row in sorted(
        result(folder, "predicted-big")["study"], key=lambda row: -row["peak_allocated_bytes"]
    ):
        peak, reserved = (row[f"peak_{kind}_bytes"] / 2**20 for kind in ("allocated", "reserved"))
        name = row["value"].removeprefix("checkpointing=")
        lines.append(f"| `{name}` | {peak:,.0f} MiB | {reserved:,.0f} MiB |")
    return "\n".join(lines)


def big_fit(folder: Path) -> str:
    """What fits, as lines to paste."""
    lines = ["| overrides | reserved | more convolution work |", "| --- | --- | --- |"]
    for row in result(folder, "predicted-big")["fit"]:
        reserved = row["peak_reserved_bytes"] / 2**20
        words = " ".join(row["overrides"])
        lines.append(f"| `{words}` | {reserved:,.0f} MiB | {100 * row['extra_compute']:.0f} % |")
    return "\n".join(lines)


def result(folder: Path, name: str) -> Any:
    """A file of benchmarks/."""
    return json.loads((folder / f"{name}.json").read_text())


def gpu(folder: Path, part: str) -> Rows:
    """A part's rows; none if it has not been measured."""
    return gpu_part(folder, part).get("rows", {})


def gpu_part(folder: Path, part: str) -> dict[str, Any]:
    """What gpu_report.py found, on the device of which it has the most parts."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    reports = [c["parts"] for c in found if "environment" in c.get("parts", {})]
    return max(reports, key=len, default={}).get(part, {})


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__: table
    for table in (
        *(pooling, predict, hippocampus, quality, quality_screen, step, peers),
        *(huge, same_dice, chaos, slurm, hostile, start, results, big, big_fit),
        *(gpu_device, gpu_prediction, gpu_step, gpu_peers, gpu_hippocampus, gpu_callbacks),
    )
}


def filled(text: str, folder: Path = BENCHMARKS) -> str:
    """The text with every figure made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        if re.search(pattern, text, re.DOTALL):
            made = table(folder)
            text = re.sub(pattern, lambda m, t=made: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    return text


def documents() -> list[Path]:
    """What may hold such figures."""
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
