"""Tables of trainings, predictions and commands: a function for each table."""

from statistics import fmean

from scripts.docs.tables import (
    format_shape,
    make_table,
    read_result,
)
from unet3d.text import GIB, pluralize

JOBS = {
    "default": "default run",
    "hard": "hard synthetic volumes",
    "hard, 10 minutes": "hard synthetic volumes, 10 minutes",
    "few": "hippocampus, 20 training cases, width 8",
}
"""Jobs of scripts.bench.quality, as the documents call them."""

VARIANTS = {
    "before": "`model.prior_bias=false`",
    "ours": "unet3d (default)",
    "no_warmup": "`scheduler.warmup=0`",
    "deep_supervision": "`model.deep_supervision=true`",
    "resenc": "residual encoder, `pool=strided`",
    "dynunet": "MONAI DynUNet",
    "nnunet": "nnU-Net PlainConvUNet",
    "adamw_light": "`recipe=short`",
    "adamw_nnunet": "`recipe=short augmentation=nnunet`",
    "adamw_turned": "`recipe=short`, rotations and scales",
    "adamw_turned_ema": "rotations and scales, `ema_decay=0.998`",
    "adamw_turned_cosine": "rotations and scales, `scheduler=cosine`",
    "light_1700": "`recipe=short`, 20 passes",
    "turned_1700": "the same, rotations and scales",
    "adamw_nnunet_flips": "the same, flipped along all axes",
    "long": "`recipe=long`",
    "nnunet_trainer": "nnU-Net's own trainer, stopped early",
    "planned": "`unet3d plan max_time=00:00:10:00`",
    "planned_w16": "the same, `model.width=16`",
    "w8_1mm": "width 8, 1 mm",
    "w16_1.34mm": "width 16, 1.34 mm",
    "w32_2mm": "width 32, 2 mm",
}
"""Variants of scripts.bench.quality, as the documents call them."""


def quality(name: str = "cpu-quality", *left_out: str) -> str:
    """Compare validation Dice of each job and network after its full training."""
    lines = []
    for job, variants in read_result(name).items():
        for variant, content in variants.items():
            if job in left_out or variant in left_out:
                continue
            if variant.startswith("nnunet_trainer") and "minutes" not in job:
                continue  # nnU-Net's trainer with a thousandth of its iterations is no peer
            found = content["summary"]
            spread = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
            worst = f"{found['worst_dice']:.4f}"
            if found["worst_class"] is not None:
                worst += f" ({found['worst_class']} {found['worst_class_dice']:.4f})"
            cells = [JOBS.get(job, job), VARIANTS.get(variant, variant)]
            cells += [f"{found['dice']:.4f}{spread}", worst]
            steps = sorted({row["steps"] for row in content["rows"].values()})
            ends = " to ".join(map(str, steps[:1] + steps[1:][-1:]))
            lines.append(" | ".join([*cells, str(found["runs"]), ends]))
    return make_table("job | network or setting | Dice, mean | worst run | runs | steps", lines)


def quality_screen() -> str:
    """Compare validation Dice of networks of other projects with ours in short runs."""
    settings = ("before", "ours", "deep_supervision", "lr_1e-3", "transposed")
    return quality("cpu-screen-quality", *settings)


def recipes() -> str:
    """Compare the recipes of `unet3d plan` in short runs, where there are enough cases."""
    return quality("cpu-recipes", "brain")


def hippocampus() -> str:
    """Compare folds and pooling methods."""
    lines = []
    for variant, content in read_result("cpu-hippocampus")["hippocampus"].items():
        runs, found = list(content["rows"].values()), content["summary"]
        label = f"`pool={variant}`, {len(runs)} runs"
        if variant == "folds":
            label = f"folds {', '.join(str(n) for n in range(len(runs)))}"
        anterior, posterior = (
            fmean(run["dice"][name] for run in runs) for name in ("Anterior", "Posterior")
        )
        lines.append(
            f"{label} | {anterior:.4f} / {posterior:.4f} | "
            f"{found['dice']:.4f} ± {found['deviation']:.4f} | {found['steps']} | "
            f"{found['median_step_seconds']:.2f}"
        )
    heads = " | Dice anterior / posterior | mean | steps | seconds per step"
    return make_table(heads, lines)


def same_dice() -> str:
    """Compare fused blocks with plain modules, seed by seed."""
    titles, lines = {"default": "default run", "hippocampus": "hippocampus, width 8"}, []
    for job, variants in read_result("cpu-same-dice").items():
        for variant, found in variants.items():
            dice = ", ".join(f"{row['dice']['mean']:.4f}" for row in found["rows"].values())
            mean, steps = f"{found['summary']['dice']:.4f}", found["summary"]["steps"]
            lines.append(f"{titles[job]}, {steps} steps | `{variant}` | {dice} | {mean}")
    return make_table(" | `checkpointing=` | Dice of seeds 0, 1 and 2 | mean", lines)


def larger_than_memory() -> str:
    """Show time and resident memory of commands on stores of OME-Zarr."""
    stores = read_result("cpu-larger-than-memory")["stores"]
    lines = [
        f"{name} | {row['seconds']:.0f} | {row['resident_mib']:,}" for name, row in stores.items()
    ]
    return make_table(" | seconds: | resident memory, MiB:", lines)


def monai_parts() -> str:
    """Compare time and memory of parts of MONAI with ours."""
    lines = []
    for part, content in read_result("cpu-monai-parts")["parts"].items():
        base = content["rows"]["unet3d"]["seconds"]
        for name, row in content["rows"].items():
            owner = name if name == "unet3d" else f"MONAI: {name}"
            label = part if name == next(iter(content["rows"])) else ""
            cells = f"{label} | {owner} | {row['seconds'] / base:.1f}x"
            lines.append(f"{cells} | {row['peak_mib']:,.0f}")
    return make_table("one CPU core |  | time: | MiB:", lines)


def predict() -> str:
    """Compare the memory of a scan with few and with many classes."""
    lines = []
    for case in read_result("cpu-predict")["cases"]:
        keys = ("peak_bytes", "forecast_bytes", "whole_logits_bytes")
        sizes = " | ".join(f"{case[key] / GIB:.1f}" for key in keys)
        network = f"{case['classes']} | {case['spacing_mm']:g}"
        lines.append(f"{network} | {sizes} | {case['seconds']:.0f}")
    heads = "RAM, GiB: | estimated, GiB: | logits as one array, GiB: | seconds on one thread:"
    return make_table(f"classes | voxels of the network, mm | {heads}", lines)


def nnunet_loader() -> str:
    """Compare the loader and the CPU steps of nnU-Net's trainer with ours in a sentence."""
    result = read_result("cpu-nnunet-loader")
    rates, seconds = result["patches_per_second"], result["iteration_seconds"]
    theirs, ours = seconds["nnUNetTrainer"], seconds["nnUNetTrainerLean"]
    return (
        f"Two processes of nnU-Net's loader deliver {rates['nnU-Net']:.1f} patches of 128x128x128 "
        f"per second, or {rates['without transforms']:.1f} without transforms.\n"
        f"On a CPU, an iteration of a small plan takes {ours / theirs:.2f}x of nnU-Net's time\n"
        f"(`python -m scripts.bench.nnunet_loader`)."
    )


def predict_speed() -> str:
    """Compare the time of a scan with MONAI's sliding window, as ratios."""
    networks = {"unet_tiny": "`unet_tiny`", "dynunet": "MONAI's DynUNet"}
    ways = {
        "MONAI, fused blocks": "MONAI",
        "unet3d": "default",
        "skip_background": "`skip_background=0.1`",
        "backend=onnx": "`backend=onnx`",
        "backend=openvino": "`backend=openvino`",
        "all": "all",
    }
    lines = []
    for name, row in read_result("cpu-predict-speed").items():
        if not isinstance(row, dict) or "one_scan" not in row:
            continue
        network, scan = name.split(", ")
        found = {"MONAI, fused blocks": {"ratio": 1.0}, **row["one_scan"]}
        same = [way for n, way in row["one_scan"].items() if n not in ("skip_background", "all")]
        differ = max(way["labels_that_differ"] for way in same)
        size = f"{format_shape(row['size'], ' x ')}, {pluralize(row['windows'], 'window')}"
        ratios = [f"{found[way]['ratio']:.2f}" if way in found else "" for way in ways]
        cells = [f"{networks[network]}, {scan} ({size})", *ratios]
        lines.append(" | ".join([*cells, f"{differ:,} of {row['voxels']:,}"]))
    heads = ["network and scan", *ways.values(), "labels that differ, all voxels computed"]
    return make_table(" | ".join(heads), lines)


def start() -> str:
    """List the seconds until a command begins its work."""
    commands = read_result("cpu-start")["commands"]
    names = ("unet3d --help", "unet3d train --help", "unet3d memory", "unet3d doctor")
    lines = [f"`{name}` | {commands[name]['median_seconds']:.2f}" for name in names]
    first = commands["unet3d train, to its first step"]
    phases = first["median_seconds_by_phase"].items()
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in phases if taken >= 0.05)
    seconds = first["median_seconds"]
    lines.append(f"`unet3d train`, to its first step ({parts}) | {seconds:.2f}")
    return make_table(" | seconds", lines)


NAMES = {1: "training", 2: "training in two processes"}


def chaos() -> str:
    """List how often runs were stopped, and how they ended."""
    lines = [
        f"{NAMES.get(row.get('ranks'), 'prediction by slabs')} | "
        f"{sum(n for end, n in row['ends'].items() if 'after' in end)} | "
        f"{'identical' if row['identical'] else 'different'}"
        for row in read_result("cpu-chaos")["rows"]
    ]
    return make_table("stopped | stops: | weights, or labels, at the end", lines)
