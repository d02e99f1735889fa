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
Each finished run is written to benchmarks/<name>-quality.json at once and replaces runs of the same
job and variant with other settings.

For the hippocampus results, in benchmarks/<name>-hippocampus.json:

    unet3d download task=Task04_Hippocampus
    python -m scripts.bench.quality folds         # experiment=hippocampus_cpu, fold by fold
    python -m scripts.bench.quality pools         # max, median, approx_median; three seeds
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from scripts.bench.quality_results import Row, average_runs, read_report, read_run, summarize
from scripts.bench.results import BENCHMARKS, ROOT, read_results
from unet3d.config.compose import compose_config, get_config_dir

JOBS = {
    "default": ["trainer.max_steps=320"],
    "hippocampus": [
        *("experiment=hippocampus_cpu", "trainer.max_time=null", "trainer.max_steps=400"),
        "trainer.check_val_every_n_epoch=1",
    ],
    "hard": ["data=synthetic_hard", "trainer.max_steps=1000", "trainer.check_val_every_n_epoch=5"],
}
VARIANTS = {
    "before": ["model.prior_bias=false", "scheduler.warmup=0"],
    "ours": [],
    "no_warmup": ["scheduler.warmup=0"],
    "dynunet": ["model=dynunet", "model.norm_name=[instance,{affine:true}]"],
    "nnunet": [
        *("model=dynunet", "model._target_=scripts.bench.networks.NnUNet", "~model.spatial_dims"),
        *("~model.norm_name", "~model.upsample_kernel_size"),
    ],
}
POOLS = ("max", "median", "approx_median")


def train(folder: Path, overrides: Sequence[str], threads: int) -> Row:
    """Train in a folder unless its run is finished; return the run's report."""
    report = folder / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["finished"]:
        print(" ".join(overrides), flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"hydra.run.dir={folder}"]
        command += ["resume=auto", "trainer.enable_progress_bar=false"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        with folder.with_suffix(".log").open("a") as log:
            subprocess.run(command, env=environ, check=True, stdout=log, stderr=log)
    return json.loads(report.read_text())


# Jobs x variants x folds x seeds.


def compare(options: argparse.Namespace, variants: dict[str, list[str]]) -> int:
    """Train all variants in turn, so that other load on the machine affects all of them."""
    path, failed = options.output / f"{options.name}-quality.json", []
    for seed, fold, job, variant in product(options.seeds, options.folds, options.jobs, variants):
        overrides = [*JOBS[job], *options.overrides]
        if options.steps is not None:
            overrides = [word for word in overrides if not word.startswith("trainer.max_steps=")]
            overrides += [f"trainer.max_steps={options.steps}"]
        overrides = match_network_size(overrides, variants[variant])
        key = f"{crc32(' '.join(overrides).encode()):08x}"  # other overrides are another run
        folder = options.runs / job / f"{variant}-fold-{fold}-seed-{seed}-{key}"
        name = f"{job}, {variant}, fold {fold}, seed {seed}"
        try:
            report = train(folder, [*overrides, f"fold={fold}", f"seed={seed}"], options.threads)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name}: exit code {error.returncode} ({folder.with_suffix('.log')})")
            print("failed:", failed[-1], flush=True)
            continue
        row = {**read_run(folder, report), "threads": options.threads}
        summary = write_run(path, job, variant, overrides, f"fold {fold}, seed {seed}", row)
        scores = f"{row['dice']['mean']:.4f}, mean of {summary['runs']}: {summary['dice']:.4f}"
        print(f"{name}: {scores}", flush=True)
    print(f"results: {path}")
    return 1 if failed else 0


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


def match_network_size(overrides: Sequence[str], variant: Sequence[str]) -> list[str]:
    """Return a job's overrides with a variant's; DynUNet gets the sizes of our network in the job.

    >>> match_network_size(["seed=1", "model.width=4"], ["model=dynunet"])[:3]
    ['seed=1', 'model=dynunet', 'model.filters=[4,8,16]']
    """
    if "model=dynunet" not in variant:
        return [*overrides, *variant]
    model = compose_config(overrides, "train").config.model
    levels = len(model.channels) if model.channels else model.depth
    filters = model.channels or [
        min(model.width * 2**level, model.max_width) for level in range(levels)
    ]
    strides = expand_levels(model.pool_kernel, levels - 1)
    sizes = {
        "filters": list(filters),
        "kernel_size": expand_levels(model.kernel_size, levels),
        "strides": [[1, 1, 1], *strides],
        "upsample_kernel_size": strides,
    }
    others = [w for w in overrides if not w.lstrip("+~").startswith(("model.", "model="))]
    model = compose_config([*others, "model=dynunet"], "train").config.model
    dynunet = yaml.safe_load((get_config_dir() / "model" / "dynunet.yaml").read_text())
    foreign = set(model) - set(dynunet)  # keys that experiments set for our network
    variant = [word for word in variant if word != "model=dynunet"]
    if "prior_bias" in foreign:
        foreign.remove("prior_bias")
        variant = ["model.prior_bias=false", *variant]
    return [
        *others,
        "model=dynunet",
        *(f"model.{key}={json.dumps(value).replace(' ', '')}" for key, value in sizes.items()),
        *(f"~model.{key}" for key in sorted(foreign)),
        *variant,
    ]


def expand_levels(value: Any, levels: int) -> list[list[int]]:
    """Return [D, H, W] for each level from an int, from [D, H, W], or from a list by level.

    >>> expand_levels(2, 2), expand_levels([1, 2, 2], 1), expand_levels([3, [1, 3, 3]], 2)
    ([[2, 2, 2], [2, 2, 2]], [[1, 2, 2]], [[3, 3, 3], [1, 3, 3]])
    """
    if isinstance(value, int):
        return [[value] * 3] * levels
    if len(value) == 3 and all(isinstance(v, int) for v in value):
        return [list(value)] * levels
    return [expand_levels(v, 1)[0] for v in value]


# The hippocampus: folds and pooling methods.


def train_folds(options: argparse.Namespace) -> Row:
    rows = {}
    for fold in options.folds:
        overrides = [*options.overrides, f"fold={fold}"]
        report = train(options.runs / f"fold-{fold}", overrides, options.threads)
        rows[f"fold {fold}"] = read_report(report)
    return {"rows": rows, "mean": average_runs(list(rows.values()))}


def train_pools(options: argparse.Namespace) -> Row:
    rows: Row = {pool: {} for pool in POOLS}
    for seed, fold, pool in product(options.seeds, options.folds, POOLS):
        folder = options.runs / f"{pool}-fold-{fold}-seed-{seed}"
        overrides = [*options.overrides, f"pool={pool}", f"fold={fold}", f"seed={seed}"]
        report = train(folder, overrides, options.threads)
        rows[pool][f"fold {fold}, seed {seed}"] = read_report(report)
    means = {pool: average_runs(list(runs.values())) for pool, runs in rows.items()}
    return {"rows": rows, "mean": means}


def measure_hippocampus(part: str, options: argparse.Namespace) -> int:
    """Train folds or pooling methods, and replace that part of the result file."""
    if not any(word.startswith("experiment=") for word in options.overrides):
        options.overrides.insert(0, "experiment=hippocampus_cpu")
    if options.steps is not None:
        options.overrides += ["trainer.max_time=null", f"trainer.max_steps={options.steps}"]
    result = {"folds": train_folds, "pools": train_pools}[part](options)
    path = options.output / f"{options.name}-hippocampus.json"
    facts = {"threads": options.threads, "overrides": options.overrides}
    path.write_text(json.dumps(read_results(path) | {part: facts | result}, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all")
    parser.add_argument("--variant", metavar=("NAME", "OVERRIDE"), nargs="+", help="another one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="not of folds")
    parser.add_argument("--folds", type=int, nargs="+", help="default: 0; for folds: all five")
    parser.add_argument("--steps", type=int, help="steps of each run instead of the job's")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a run")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: in outputs/")
    parser.add_argument("--output", type=Path, default=BENCHMARKS, help="folder of the results")
    parser.add_argument("overrides", nargs="*", default=[], help="[folds | pools] and overrides")
    options = parser.parse_intermixed_args(argv)
    part = "quality"
    if options.overrides and options.overrides[0] in ("folds", "pools"):
        part = options.overrides.pop(0)
    options.folds = options.folds or (list(range(5)) if part == "folds" else [0])
    options.runs = (options.runs or Path("outputs") / f"{options.name}-{part}").absolute()
    if part != "quality":
        return measure_hippocampus(part, options)
    added = {options.variant[0]: options.variant[1:]} if options.variant else {}
    names = options.variants or (() if added else VARIANTS)
    return compare(options, {name: VARIANTS[name] for name in names} | added)


if __name__ == "__main__":
    sys.exit(main())
