"""Compare validation Dice over seeds: our network, MONAI's DynUNet and nnU-Net's network.

    python -m scripts.bench.quality                         # all jobs and variants, three seeds
    python -m scripts.bench.quality --jobs hard --variants ours nnunet --seeds 0 1 2 --steps 400
    python -m scripts.bench.quality --data spleen data=decathlon data.root=data/Task09_Spleen
    python -m scripts.bench.quality --jobs hard --variant wide model.width=16
    python -m scripts.bench.quality --folds 0 1 2 3 4 -- precision=32    # overrides of every run

A job is a dataset and a training length, a variant is a network or a setting: `ours` is unet3d with
its defaults, `before` is model.prior_bias=false. All networks train in the same loop. The networks
of other projects have the channels, kernels and strides of ours in the same job and their own
weight initialization; they have no deep supervision, and their heads start without a prior bias.

Each run is a folder in --runs. Finished runs are not repeated, interrupted runs are resumed, and
runs that another process is training are left to it, so several processes can share the work. Each
finished run is written to benchmarks/<name>-quality.json at once and replaces runs of the same job
and variant with other settings.

For the hippocampus results, in benchmarks/<name>-hippocampus.json:

    unet3d download task=Task04_Hippocampus
    python -m scripts.bench.quality folds         # experiment=hippocampus_cpu, fold by fold
    python -m scripts.bench.quality pools         # max, median, approx_median; three seeds
    python -m scripts.bench.quality folds --name h200 experiment=hippocampus
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2s
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench.quality_results import (
    SECONDS_LINE,
    Row,
    average_runs,
    read_report,
    read_run,
    write_run,
)
from unet3d.config.compose import compose_config, get_config_dir

ROOT = Path(__file__).resolve().parents[2]

JOBS = {
    "default": ["trainer.max_steps=320"],
    "hippocampus": [
        *("experiment=hippocampus_cpu", "trainer.max_time=null", "trainer.max_steps=400"),
        "trainer.check_val_every_n_epoch=1",
    ],
    "hard": ["data=synthetic_hard", "trainer.max_steps=1000", "trainer.check_val_every_n_epoch=5"],
}
DYNUNET = ["model=dynunet", "model.norm_name=[instance,{affine:true}]"]
VARIANTS = {
    "before": ["model.prior_bias=false", "scheduler.warmup=0"],
    "ours": [],
    "no_warmup": ["scheduler.warmup=0"],
    "dynunet": DYNUNET,
    "nnunet": [
        *("model=dynunet", "model._target_=scripts.bench.networks.NnUNet", "~model.spatial_dims"),
        *("~model.norm_name", "~model.upsample_kernel_size"),
    ],
}
POOLS = ("max", "median", "approx_median")
SEEDS = (0, 1, 2)


# One run.


def train(folder: Path, overrides: Sequence[str], threads: int) -> Row:
    """Train in a folder unless its run is finished; return the run's report."""
    report = folder / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["finished"]:
        print(" ".join(overrides), flush=True)
        with lock_run(folder) as log:
            path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            environ = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, str(ROOT / "train.py"), *overrides]
            command += [f"hydra.run.dir={folder}", "resume=auto"]
            command += ["trainer.enable_progress_bar=false"]
            start = time.monotonic()
            try:
                subprocess.run(
                    command,
                    env={**os.environ, **environ},
                    check=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[log],  # a training that outlives this process keeps its lock
                )
            finally:  # a run that was interrupted has several of these lines
                os.write(log, f"{SECONDS_LINE}{time.monotonic() - start:.3f}\n".encode())
    return json.loads(report.read_text())


@contextmanager
def lock_run(folder: Path) -> Generator[int]:
    """Open and lock the log of a run; BlockingIOError if another process trains it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(folder.with_suffix(".log"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield log
    finally:
        os.close(log)


# Jobs x variants x folds x seeds.


def compare(
    options: argparse.Namespace,
    jobs: Mapping[str, list[str]],
    variants: Mapping[str, list[str]],
) -> int:
    """Train all variants in turn, so that other load on the machine affects all of them."""
    path = options.output / f"{options.name}-quality.json"
    failed, skipped = [], []
    for seed, fold, job, variant in product(options.seeds, options.folds, jobs, variants):
        name = f"{job}, {variant}, fold {fold}, seed {seed}"
        overrides = [*jobs[job], *options.overrides]
        if options.steps is not None:
            overrides = [word for word in overrides if not word.startswith("trainer.max_steps=")]
            overrides += [f"trainer.max_steps={options.steps}"]
        overrides = match_network_size(overrides, variants[variant])
        run = [*overrides, f"fold={fold}", f"seed={seed}"]
        key = blake2s(json.dumps(run).encode(), digest_size=4).hexdigest()
        folder = options.runs / job / f"{variant}_fold-{fold}_seed-{seed}_{key}"
        try:
            row = read_run(folder, train(folder, run, options.threads))
        except BlockingIOError:
            skipped.append(name)
            continue
        except subprocess.CalledProcessError as error:
            log = folder.with_suffix(".log")
            lines = [s for s in log.read_text().splitlines() if not s.startswith(SECONDS_LINE)]
            failed.append(f"{name}: exit code {error.returncode}: {' '.join(lines[-1:])} ({log})")
            print("failed:", failed[-1], flush=True)
            continue
        row["threads"] = options.threads
        summary = write_run(path, job, variant, overrides, f"fold {fold}, seed {seed}", row)
        scores = f"{row['dice']['mean']:.4f}, mean of {summary['runs']}: {summary['dice']:.4f}"
        print(f"{name}: {scores}", flush=True)
    for what, names in (
        ("failed", failed),
        ("skipped because another process trains them", skipped),
    ):
        if names:
            print(f"{what}:", *names, sep="\n  ")
    print(f"results: {path}")
    return 1 if failed else 0


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
    foreign = set(model) - get_dynunet_keys()  # keys that experiments set for our network
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


def get_dynunet_keys() -> set[str]:
    """Return the keys of conf/model/dynunet.yaml."""
    import yaml

    return set(yaml.safe_load((get_config_dir() / "model" / "dynunet.yaml").read_text()))


# The hippocampus: folds and pooling methods.


def train_folds(options: argparse.Namespace) -> Row:
    rows = {}
    for fold in options.folds:
        folder = options.runs / f"fold-{fold}"
        overrides = [*options.overrides, f"fold={fold}"]
        rows[f"fold {fold}"] = read_report(train(folder, overrides, options.threads))
        print(f"fold {fold}: {rows[f'fold {fold}']['dice']}", flush=True)
    return {"overrides": options.overrides, "rows": rows, "mean": average_runs(list(rows.values()))}


def train_pools(options: argparse.Namespace) -> Row:
    rows: Row = {}
    for seed, fold, pool in product(options.seeds, options.folds, POOLS):
        folder = options.runs / f"{pool}-fold-{fold}-seed-{seed}"
        overrides = [*options.overrides, f"pool={pool}", f"fold={fold}", f"seed={seed}"]
        row = read_report(train(folder, overrides, options.threads))
        rows.setdefault(pool, {})[f"fold {fold}, seed {seed}"] = row
        print(f"{pool}, fold {fold}, seed {seed}: {row['dice']}", flush=True)
    means = {pool: average_runs(list(runs.values())) for pool, runs in rows.items()}
    return {"overrides": options.overrides, "rows": rows, "mean": means}


def measure_hippocampus(part: str, options: argparse.Namespace) -> int:
    """Train folds or pooling methods, and replace that part of the result file."""
    if not any(word.startswith("experiment=") for word in options.overrides):
        options.overrides.insert(0, "experiment=hippocampus_cpu")
    if options.steps is not None:
        limits = ["trainer.max_time=null", f"trainer.max_steps={options.steps}"]
        options.overrides += limits
    path = options.output / f"{options.name}-hippocampus.json"
    result = {"folds": train_folds, "pools": train_pools}[part](options)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results[part] = {"threads": options.threads, **result}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(result["mean"], indent=1))
    print(f"wrote {path}")
    return 0


# The command line.


def parse_named(options: list[list[str]]) -> dict[str, list[str]]:
    """Return {name: overrides} of options whose first word is a name."""
    return {name: overrides for name, *overrides in options}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named: dict[str, Any] = {"nargs": "+", "action": "append", "default": []}
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, help="default: all; none with --data")
    parser.add_argument("--data", metavar=("NAME", "OVERRIDE"), **named, help="add a job")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="default: all; none with --variant"
    )
    parser.add_argument("--variant", metavar=("NAME", "OVERRIDE"), **named, help="add a variant")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="ignored by folds"
    )
    parser.add_argument("--folds", type=int, nargs="+", help="default: 0; for folds: all five")
    parser.add_argument("--steps", type=int, help="steps of each run instead of the job's")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a run")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: in outputs/")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks", help="folder of the result file"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="[folds | pools] and overrides")
    options = parser.parse_intermixed_args(argv)
    part = "quality"
    if options.overrides and options.overrides[0] in ("folds", "pools"):
        part = options.overrides.pop(0)
    options.folds = options.folds or (list(range(5)) if part == "folds" else [0])
    options.runs = (options.runs or Path("outputs") / f"{options.name}-{part}").absolute()
    if part != "quality":
        return measure_hippocampus(part, options)
    jobs, variants = parse_named(options.data), parse_named(options.variant)
    jobs = {n: JOBS[n] for n in options.jobs or (() if jobs else JOBS)} | jobs
    variants = {
        n: VARIANTS[n] for n in options.variants or (() if variants else VARIANTS)
    } | variants
    return compare(options, jobs, variants)


if __name__ == "__main__":
    sys.exit(main())
