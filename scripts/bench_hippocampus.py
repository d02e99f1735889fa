"""The Decathlon's Task04 Hippocampus: five folds of a preset, and the poolings side by side.

    unet3d get_data task=Task04_Hippocampus
    python scripts/bench_hippocampus.py folds            # experiment=hippocampus_cpu, fold by fold
    python scripts/bench_hippocampus.py pools            # max, median, approx_median; three seeds
    python scripts/bench_hippocampus.py folds --name h200 experiment=hippocampus

Runs that are done are not done again, so that a stopped benchmark goes on; `--threads` limits
torch's threads. Results go into benchmarks/<name>-hippocampus.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POOLS = ("max", "median", "approx_median")
SEEDS = (0, 1, 2)


def trained(folder: Path, words: list[str], threads: int) -> dict[str, Any]:
    """The report of a run: the one that is there, or of a training now."""
    report = folder / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["finished"]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={folder}"]
        command += ["resume=auto", "trainer.enable_progress_bar=false"]
        print(" ".join(words), flush=True)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())


def row(report: dict[str, Any]) -> dict[str, Any]:
    """What is told of a run."""
    memory = report["memory"]["steady_step"]
    return {
        "dice": {
            name.removeprefix("val/dice").strip("/") or "mean": value
            for name, value in report["metrics"].items()
            if name.startswith("val/dice")
        },
        "evaluation": (report.get("evaluation") or {}).get("per_class"),
        "steps": report["steps"],
        "median_step_seconds": report["speed"]["median_step_seconds"],
        "peak_bytes": {k: v for k, v in memory.items() if k != "phases"},
        "precision": report["precision"],
        "device": report["device"],
        "versions": report["versions"],
    }


def folds(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for fold in arguments.folds:
        folder = arguments.runs / f"fold-{fold}"
        words = [*arguments.overrides, f"fold={fold}"]
        rows[f"fold {fold}"] = row(trained(folder, words, arguments.threads))
        print(f"fold {fold}: {rows[f'fold {fold}']['dice']}", flush=True)
    return {"overrides": arguments.overrides, "rows": rows, "mean": mean(list(rows.values()))}


def pools(arguments: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for seed in arguments.seeds:  # the poolings in turn, so that a machine's moods meet all of them
        for fold in arguments.folds:
            for pool in POOLS:
                folder = arguments.runs / f"{pool}-fold-{fold}-seed-{seed}"
                words = [*arguments.overrides, f"pool={pool}", f"fold={fold}", f"seed={seed}"]
                found = row(trained(folder, words, arguments.threads))
                rows.setdefault(pool, {})[f"fold {fold}, seed {seed}"] = found
                print(f"{pool}, fold {fold}, seed {seed}: {found['dice']}", flush=True)
    means = {pool: mean(list(found.values())) for pool, found in rows.items()}
    return {"overrides": arguments.overrides, "rows": rows, "mean": means}


def mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = rows[0]["dice"]
    return {
        "dice": {name: statistics.mean(r["dice"][name] for r in rows) for name in names},
        "dice_deviation": statistics.stdev(r["dice"]["mean"] for r in rows) if rows[1:] else None,
        "median_step_seconds": statistics.median(r["median_step_seconds"] for r in rows),
        "peak_bytes": {k: max(r["peak_bytes"][k] for r in rows) for k in rows[0]["peak_bytes"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("folds", "pools"))
    parser.add_argument("--name", default="cpu", help="of the result file")
    parser.add_argument("--folds", type=int, nargs="+", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the poolings")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=Path, default=None, help="where the runs are kept")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_intermixed_args()
    arguments.folds = arguments.folds or (list(range(5)) if arguments.part == "folds" else [0])
    if not any(word.startswith("experiment=") for word in arguments.overrides):
        arguments.overrides.insert(0, "experiment=hippocampus_cpu")
    arguments.runs = arguments.runs or Path("outputs") / f"{arguments.name}-{arguments.part}"
    path = ROOT / "benchmarks" / f"{arguments.name}-hippocampus.json"
    result = {"folds": folds, "pools": pools}[arguments.part](arguments)
    results = json.loads(path.read_text()) if path.is_file() else {}
    results[arguments.part] = {"threads": arguments.threads, **result}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(result["mean"], indent=1))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
