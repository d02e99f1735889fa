"""Held-out Dice over seeds: ours beside MONAI's DynUNet and nnU-Net's network, in the same loop.

    python scripts/bench_quality.py                            # every job and variant, three seeds
    python scripts/bench_quality.py --jobs hard --variants ours nnunet --seeds 0 1 2 --steps 400
    python scripts/bench_quality.py --data spleen data=decathlon data.root=data/Task09_Spleen
    python scripts/bench_quality.py --jobs hard --variant wide model.width=16
    python scripts/bench_quality.py --folds 0 1 2 3 4 -- precision=32   # overrides of every run

A job says what is trained on and for how long, a variant with which network. The peers have the
channels, kernels and strides of our network in that job, and begin as their authors have them,
without deep supervision and our prior bias. A run is a folder in --runs: one that is done is not
done again, one that was killed goes on, and one that another process trains is left to it, so that
several processes share the work. Every run is written into benchmarks/<name>-quality.json as soon
as it is done, in place of runs of the same job and variant with other settings.

The hippocampus as the documents have it, in benchmarks/<name>-hippocampus.json:

    unet3d download task=Task04_Hippocampus
    python scripts/bench_quality.py folds            # experiment=hippocampus_cpu, fold by fold
    python scripts/bench_quality.py pools            # max, median, approx_median; three seeds
    python scripts/bench_quality.py folds --name h200 experiment=hippocampus
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

from quality_results import TAKEN, Row, mean, merge, read_run, row

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d.config.compose import compose_config, get_config_dir  # noqa: E402

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
    "before": ["model.prior_bias=false"],
    "ours": [],
    "dynunet": DYNUNET,
    "nnunet": [
        *("model=dynunet", "model._target_=bench_networks.NnUNet", "~model.spatial_dims"),
        *("~model.norm_name", "~model.upsample_kernel_size", "allow_targets=[bench_networks]"),
    ],
}
POOLS = ("max", "median", "approx_median")
SEEDS = (0, 1, 2)


# One run.


def train(folder: Path, words: Sequence[str], threads: int) -> Row:
    """Return a run's report: the one that is there, or of a training now."""
    report = folder / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["finished"]:
        print(" ".join(words), flush=True)
        with claim(folder) as log:
            path = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
            threading = {"OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={folder}"]
            command += ["resume=auto", "trainer.enable_progress_bar=false"]
            begun = time.monotonic()
            try:
                subprocess.run(
                    command,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **threading},
                    check=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[log],  # a training that outlives this process keeps its claim
                )
            finally:  # a run that is stopped and goes on has several of these lines
                os.write(log, f"{TAKEN}{time.monotonic() - begun:.3f}\n".encode())
    return json.loads(report.read_text())


@contextmanager
def claim(folder: Path) -> Generator[int]:
    """Open a run's log for this process alone; BlockingIOError: another one trains it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(folder.with_suffix(".log"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield log
    finally:
        os.close(log)


# Jobs x variants x folds x seeds.


def compare(
    arguments: argparse.Namespace,
    jobs: Mapping[str, list[str]],
    variants: Mapping[str, list[str]],
) -> int:
    """Train what is asked for, in turn, so that a machine's moods meet all variants."""
    path = arguments.output / f"{arguments.name}-quality.json"
    failed, elsewhere = [], []
    for seed, fold, job, variant in product(arguments.seeds, arguments.folds, jobs, variants):
        name = f"{job}, {variant}, fold {fold}, seed {seed}"
        words = [*jobs[job], *arguments.overrides]
        if arguments.steps is not None:
            words = [w for w in words if not w.startswith("trainer.max_steps=")]
            words += [f"trainer.max_steps={arguments.steps}"]
        words = match_ours(words, variants[variant])
        run = [*words, f"fold={fold}", f"seed={seed}"]
        key = blake2s(json.dumps(run).encode(), digest_size=4).hexdigest()
        folder = arguments.runs / job / f"{variant}_fold-{fold}_seed-{seed}_{key}"
        try:
            found = read_run(folder, train(folder, run, arguments.threads))
        except BlockingIOError:
            elsewhere.append(name)
            continue
        except subprocess.CalledProcessError as error:
            log = folder.with_suffix(".log")
            said = [line for line in log.read_text().splitlines() if not line.startswith(TAKEN)]
            failed.append(f"{name}: exit code {error.returncode}: {' '.join(said[-1:])} ({log})")
            print("failed:", failed[-1], flush=True)
            continue
        found["threads"] = arguments.threads
        summary = merge(path, job, variant, words, f"fold {fold}, seed {seed}", found)
        said = f"{found['dice']['mean']:.4f}, mean of {summary['runs']}: {summary['dice']:.4f}"
        print(f"{name}: {said}", flush=True)
    for said, names in (("failed", failed), ("left to another process", elsewhere)):
        if names:
            print(f"{said}:", *names, sep="\n  ")
    print(f"results: {path}")
    return 1 if failed else 0


def match_ours(words: Sequence[str], variant: Sequence[str]) -> list[str]:
    """Return a job's overrides with a variant's; a peer gets the sizes that ours has in the job.

    >>> match_ours(["seed=1", "model.width=4"], ["model=dynunet"])[:3]
    ['seed=1', 'model=dynunet', 'model.filters=[4,8,16]']
    """
    if "model=dynunet" not in variant:
        return [*words, *variant]
    model = compose_config(words, "train").config.model
    levels = len(model.channels) if model.channels else model.depth
    filters = model.channels or [
        min(model.width * 2**level, model.max_width) for level in range(levels)
    ]
    windows = per_level(model.pool_kernel, levels - 1)
    sizes = {
        "filters": list(filters),
        "kernel_size": per_level(model.kernel_size, levels),
        "strides": [[1, 1, 1], *windows],
        "upsample_kernel_size": windows,
    }
    others = [w for w in words if not w.lstrip("+~").startswith(("model.", "model="))]
    stray = set(compose_config([*others, "model=dynunet"], "train").config.model) - dynunet_keys()
    rest = [w for w in variant if w != "model=dynunet"]
    if "prior_bias" in stray:  # ours; peers begin as their authors have them
        stray.remove("prior_bias")
        rest = ["model.prior_bias=false", *rest]
    return [
        *others,
        "model=dynunet",
        *(f"model.{key}={json.dumps(value).replace(' ', '')}" for key, value in sizes.items()),
        *(f"~model.{key}" for key in sorted(stray)),
        *rest,
    ]


def per_level(value: Any, levels: int) -> list[list[int]]:
    """Return [D, H, W] for each level, of an int, of [D, H, W], or of a list with one per level.

    >>> per_level(2, 2), per_level([1, 2, 2], 1), per_level([3, [1, 3, 3]], 2)
    ([[2, 2, 2], [2, 2, 2]], [[1, 2, 2]], [[3, 3, 3], [1, 3, 3]])
    """
    if isinstance(value, int):
        return [[value] * 3] * levels
    if len(value) == 3 and all(isinstance(v, int) for v in value):
        return [list(value)] * levels
    return [per_level(v, 1)[0] for v in value]


def dynunet_keys() -> set[str]:
    """Return those of conf/model/dynunet.yaml."""
    import yaml

    return set(yaml.safe_load((get_config_dir() / "model" / "dynunet.yaml").read_text()))


# The hippocampus: folds and poolings.


def folds(arguments: argparse.Namespace) -> Row:
    rows = {}
    for fold in arguments.folds:
        folder = arguments.runs / f"fold-{fold}"
        words = [*arguments.overrides, f"fold={fold}"]
        rows[f"fold {fold}"] = row(train(folder, words, arguments.threads))
        print(f"fold {fold}: {rows[f'fold {fold}']['dice']}", flush=True)
    return {"overrides": arguments.overrides, "rows": rows, "mean": mean(list(rows.values()))}


def pools(arguments: argparse.Namespace) -> Row:
    rows: Row = {}
    for seed in arguments.seeds:  # the poolings in turn, so that a machine's moods meet all of them
        for fold in arguments.folds:
            for pool in POOLS:
                folder = arguments.runs / f"{pool}-fold-{fold}-seed-{seed}"
                words = [*arguments.overrides, f"pool={pool}", f"fold={fold}", f"seed={seed}"]
                found = row(train(folder, words, arguments.threads))
                rows.setdefault(pool, {})[f"fold {fold}, seed {seed}"] = found
                print(f"{pool}, fold {fold}, seed {seed}: {found['dice']}", flush=True)
    means = {pool: mean(list(found.values())) for pool, found in rows.items()}
    return {"overrides": arguments.overrides, "rows": rows, "mean": means}


def hippocampus(part: str, arguments: argparse.Namespace) -> int:
    """Write folds or poolings beside what the file has."""
    if not any(word.startswith("experiment=") for word in arguments.overrides):
        arguments.overrides.insert(0, "experiment=hippocampus_cpu")
    if arguments.steps is not None:
        limits = ["trainer.max_time=null", f"trainer.max_steps={arguments.steps}"]
        arguments.overrides += limits
    path = arguments.output / f"{arguments.name}-hippocampus.json"
    result = {"folds": folds, "pools": pools}[part](arguments)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results[part] = {"threads": arguments.threads, **result}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(result["mean"], indent=1))
    print(f"wrote {path}")
    return 0


# The command line.


def parse_named(given: list[list[str]]) -> dict[str, list[str]]:
    """Return {name: overrides} of options whose first word is a name."""
    return {name: words for name, *words in given}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own: dict[str, Any] = {"nargs": "+", "action": "append", "default": []}
    parser.add_argument("--name", default="cpu", help="of the result file")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, help="default: all, or --data alone")
    parser.add_argument("--data", metavar=("NAME", "OVERRIDE"), **own, help="a job of your own")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="default: all, or --variant alone"
    )
    parser.add_argument(
        "--variant", metavar=("NAME", "OVERRIDE"), **own, help="a variant of your own"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="not of folds")
    parser.add_argument("--folds", type=int, nargs="+", help="default: 0; of the part folds: all")
    parser.add_argument("--steps", type=int, help="of each run, in place of the job's")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--runs", type=Path, help="where the runs are kept")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", help="a folder")
    parser.add_argument("overrides", nargs="*", default=[], help="[folds | pools] and overrides")
    arguments = parser.parse_intermixed_args(words)
    part = "quality"
    if arguments.overrides and arguments.overrides[0] in ("folds", "pools"):
        part = arguments.overrides.pop(0)
    arguments.folds = arguments.folds or (list(range(5)) if part == "folds" else [0])
    arguments.runs = (arguments.runs or Path("outputs") / f"{arguments.name}-{part}").absolute()
    if part != "quality":
        return hippocampus(part, arguments)
    jobs, variants = parse_named(arguments.data), parse_named(arguments.variant)
    jobs = {n: JOBS[n] for n in arguments.jobs or (() if jobs else JOBS)} | jobs
    variants = {
        n: VARIANTS[n] for n in arguments.variants or (() if variants else VARIANTS)
    } | variants
    return compare(arguments, jobs, variants)


if __name__ == "__main__":
    sys.exit(main())
