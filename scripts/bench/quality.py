"""Compare validation Dice over seeds: our network, MONAI's DynUNet and nnU-Net's network.

    python -m scripts.bench.quality                         # all jobs and variants, three seeds
    python -m scripts.bench.quality --jobs hard --variants ours nnunet --seeds 0 1 2 --steps 400
    python -m scripts.bench.quality --jobs hard --variant wide model.width=16
    python -m scripts.bench.quality --jobs hippocampus -- precision=32    # overrides of every run

A job is a dataset and a training length, a variant is a network or a setting: `ours` is unet3d with
its defaults, `before` is model.prior_bias=false. All networks train in the same loop. The networks
of other projects have the channels, kernels and strides of ours in the same job and their own
weight initialization; they have no deep supervision, and their heads start without a prior bias.

Each run is a folder in outputs/. Finished runs are not repeated, and interrupted runs are resumed.
Each finished run is written to the file of results at once and replaces runs of the same job and
variant with other settings. The hippocampus needs `unet3d download task=Task04_Hippocampus`.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from scripts.bench.results import ROOT, make_parser, read_results, train
from unet3d.metric.bootstrap import compute_bootstrap_means

Row = dict[str, Any]

JOBS = {
    "default": ["trainer.max_steps=320"],
    "hippocampus": [
        *("experiment=hippocampus_cpu", "trainer.max_time=null", "trainer.max_steps=400"),
        "trainer.check_val_every_n_epoch=1",
    ],
    "few": [  # data/few.json: the first 20 training cases of fold 0, and its validation cases
        *("experiment=hippocampus_cpu", "trainer.max_time=null", "trainer.max_steps=1000"),
        *("data.splits=data/few.json", "data.patches_per_case=50", "model.width=8"),
        "trainer.check_val_every_n_epoch=1",
    ],
    "hard": [
        *("data.layout._target_=scripts.bench.synthetic_hard.SyntheticHard", "data.num_classes=8"),
        *("data.root=data/synthetic_hard", "data.in_channels=2", "data.patch_size=[32,32,16]"),
        *("data.batch_size=2", "data.patches_per_case=4", "data.layout.num_cases=24"),
        *("data.layout.size=[48,48,24]", "data.layout.spacing_mm=[1.0,1.0,3.0]"),
        *("data.layout.noise=0.35", "+data.layout.bias=0.15", "~data.layout.num_classes"),
        *("trainer.max_steps=1000", "trainer.check_val_every_n_epoch=5"),
    ],
    "brain": [
        *("data=nnunet", "data.root=data/Dataset029_BRATS6", "data.spacing_mm=[2,2,2]"),
        *("data.patch_size=[56,48,40]", "data.batch_size=2", "data.patches_per_case=20"),
        *("model=unet_nnunet", "model.width=8", "model.depth=4", "model.deep_supervision=false"),
        "trainer.max_steps=400",
    ],
}
PEER = ["model=dynunet", "model.prior_bias=false"]
VARIANTS = {
    "before": ["model.prior_bias=false", "scheduler.warmup=0"],
    "ours": [],
    "no_warmup": ["scheduler.warmup=0"],
    "dynunet": [*PEER, "model.norm_name=[instance,{affine:true}]"],
    "nnunet": [
        *(*PEER, "model._target_=scripts.bench.networks.NnUNet", "~model.spatial_dims"),
        *("~model.norm_name", "~model.upsample_kernel_size"),
    ],
}
PEER_SIZES = {
    "default": ["model.filters=[8,16,32]"],
    "hippocampus": [
        *("model.filters=[16,32,64,128]", "model.kernel_size=[3,3,3,3]", "model.strides=[1,2,2,2]"),
        *("model.upsample_kernel_size=[2,2,2]", "~model.deep_supervision", "~model.depth"),
        "~model.width",
    ],
    "hard": ["model.filters=[8,16,32]"],
}
"""The size of our network in each job, for networks of other projects."""


def main() -> int:
    """Train all variants in turn, so that other load on the machine affects all of them."""
    parser = make_parser("scripts.bench.quality", __doc__, output="cpu-quality.json")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(PEER_SIZES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all")
    parser.add_argument("--variant", metavar=("NAME", "OVERRIDE"), nargs="+", help="another one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="steps of each run instead of the job's")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a run")
    parser.add_argument("overrides", nargs="*", default=[], help="of every run")
    options = parser.parse_intermixed_args()
    added = {options.variant[0]: options.variant[1:]} if options.variant else {}
    names = options.variants or (() if added else VARIANTS)
    variants, failed = {name: VARIANTS[name] for name in names} | added, []
    runs = ROOT / "outputs" / options.output.stem
    for seed, fold, job, variant in product(options.seeds, options.folds, options.jobs, variants):
        overrides = [*JOBS[job], *options.overrides]
        if options.steps is not None:
            overrides = [word for word in overrides if not word.startswith("trainer.max_steps=")]
            overrides += [f"trainer.max_steps={options.steps}"]
        overrides += PEER_SIZES[job] if "model=dynunet" in variants[variant] else []
        overrides += variants[variant]
        key = f"{crc32(' '.join(overrides).encode()):08x}"  # other overrides are another run
        folder = runs / job / f"{variant}-fold-{fold}-seed-{seed}-{key}"
        name = f"fold {fold}, seed {seed}"
        try:
            report = train([*overrides, f"fold={fold}", f"seed={seed}"], folder, options.threads)
        except subprocess.CalledProcessError as error:
            failed.append(folder)
            print(f"{folder}: {error}", flush=True)
            continue
        row = {**read_run(folder, report), "threads": options.threads}
        summary = write_run(options.output, job, variant, overrides, name, row)
        scores = f"{row['dice']['mean']:.4f}, mean of {summary['runs']}: {summary['dice']:.4f}"
        print(f"{job}, {variant}, {name}: {scores}", flush=True)
    print(f"results: {options.output}")
    return int(bool(failed))


def write_run(path: Path, job: str, variant: str, overrides: list[str], name: str, row: Row) -> Row:
    """Add a run to the result file; return the summary of its job and variant.

    Rows of the same job and variant with other overrides are removed.
    """
    results = read_results(path)
    entry = results.setdefault(job, {}).setdefault(variant, {})
    rows = entry.get("rows", {}) if entry.get("overrides") == overrides else {}
    rows = dict(sorted((rows | {name: row}).items()))
    entry |= {"overrides": overrides, "summary": summarize(rows), "rows": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    return entry["summary"]


# Runs and their summaries.


def read_run(folder: Path, report: Row) -> Row:
    """Return a run's row, with the Dice of its evaluation."""
    memory, evaluation = report["memory"]["steady_step"], report["evaluation"]
    classes = evaluation["per_class"].items()
    content = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    return {
        "dice": {
            "mean": evaluation["mean"]["dice"]["mean"],
            **{name: scores["dice"]["mean"] for name, scores in classes},
        },
        "steps": report["steps"],
        "median_step_seconds": report["speed"]["median_step_seconds"],
        "peak_bytes": {k: v for k, v in memory.items() if k != "phases"},
        "cases": {
            case: {name: scores["dice"] for name, scores in by_class.items()}
            for case, by_class in content["cases"].items()
        },
        "predicted_bytes": (report["memory"].get("estimated") or {}).get("allocated"),
        "parameters": report["parameters"],
        "deep_supervision": report["config"]["model"].get("deep_supervision", False),
    }


def summarize(rows: dict[str, Row]) -> Row:
    """Return mean Dice over runs, its spread, and the worst run with its worst class."""
    dice = {
        name: {key: value or 0.0 for key, value in row["dice"].items()}  # 0 if undefined
        for name, row in rows.items()
    }
    means = [scores["mean"] for scores in dice.values()]
    worst = min(dice.values(), key=lambda scores: scores["mean"])
    values = {key: value for key, value in worst.items() if key != "mean"}
    worst_class = min(values, key=lambda name: values[name], default=None)
    seconds = [row["median_step_seconds"] for row in rows.values()]
    return {
        "runs": len(rows),
        "dice": statistics.mean(means),
        "deviation": statistics.stdev(means) if means[1:] else None,
        "interval_over_cases": bootstrap_cases(rows),
        "worst_dice": worst["mean"],
        "worst_class": worst_class,
        "worst_class_dice": None if worst_class is None else values[worst_class],
        "steps": max(row["steps"] for row in rows.values()),
        "median_step_seconds": None if None in seconds else statistics.median(seconds),
        "predicted_bytes": max(row["predicted_bytes"] or 0 for row in rows.values()) or None,
    }


def bootstrap_cases(rows: dict[str, Row]) -> list[float] | None:
    """Return the bootstrap interval of the mean over cases, after averaging each case over runs."""
    scores: dict[str, list[list[float]]] = {}
    for row in rows.values():
        for case, classes in row["cases"].items():
            values = [math.nan if d is None else d for d in classes.values()]
            scores.setdefault(case, []).append(values)
    if len(scores) < 2:
        return None
    interval = compute_bootstrap_means(
        np.array([np.mean(runs, axis=0) for runs in scores.values()])
    )[1]
    return [interval["low"], interval["high"]]


if __name__ == "__main__":
    sys.exit(main())
