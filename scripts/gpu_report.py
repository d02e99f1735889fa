"""Everything that needs a GPU, in parts that can be run one by one: `make gpu`.

Each part takes under ten minutes and adds its results to benchmarks/<device>.json; parts that are
there already are skipped unless they are named. Without a GPU it says so and leaves with 2.

    python scripts/gpu_report.py                # the parts that are missing
    python scripts/gpu_report.py pool forum  # these, again
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GRID = {
    "model": ("unet_small", "unet_nn"),
    "precision": ("32", "16", "bf16", "16-true"),
    "checkpointing": ("none", "leanest"),
    "optimizer": ("adamw", "sgd"),
}
"""32 configurations on each patch; each is predicted and measured in a process of its own."""


GOAL = 0.88
"""The Dice whose time is told."""


def unet3d(*words: str) -> dict[str, Any]:
    """Run a verb that prints one JSON object."""
    done = run([sys.executable, "-m", "unet3d.commands.main", *words])
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def tests() -> dict[str, Any]:
    """The tests that are marked gpu."""
    done = run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--override-ini", "addopts="])
    return {"exit_code": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}


def pool() -> dict[str, Any]:
    """The poolings against nn.MaxPool3d; writes its own file as well."""
    done = run([sys.executable, "scripts/bench_pool.py"])
    return {
        "exit_code": done.returncode,
        "output": done.stdout[-6000:],
        "error": done.stderr[-500:],
    }


def predict(patch: str) -> dict[str, Any]:
    """Predicted against measured over the grid, on one patch."""
    rows: list[dict[str, Any]] = []
    for values in product(*GRID.values()):
        words = [f"{key}={value}" for key, value in zip(GRID, values, strict=True)]
        words.append(f"data.patch_size={patch}")
        rows.append({"overrides": words, **compared(words)})
    errors: list[float] = sorted(r["error_percent"] for r in rows if "error_percent" in r)
    sizes = sorted(abs(error) for error in errors)
    summary = {
        "configurations": len(rows),
        "failed": sum("error_percent" not in row for row in rows),
        "median_error_percent": statistics.median(sizes) if sizes else None,
        "p95_error_percent": sizes[int(0.95 * (len(sizes) - 1))] if sizes else None,
        "most_too_low_percent": errors[0] if errors else None,
    }
    return {"summary": summary, "rows": rows}


def compared(words: list[str]) -> dict[str, Any]:
    """One configuration: what was predicted, what was measured, and how far apart they are."""
    found = unet3d("memory", *words, "data.num_classes=5", "format=json", "measure=true")
    if "error" in found:
        return found
    phases = found["measured_phases"].values()
    allocated = max(phase["allocated"] for phase in phases)
    predicted = found["peak_allocated_bytes"]
    return {
        "predicted_allocated_bytes": predicted,
        "measured_allocated_bytes": allocated,
        "error_percent": 100 * (predicted / allocated - 1),
        "predicted_reserved_bytes": found["peak_reserved_bytes"],
        "measured_reserved_bytes": max(phase["reserved"] for phase in phases),
        "predicted_by_phase": found["phases"],
        "measured_by_phase": found["measured_phases"],
    }


def forum() -> dict[str, Any]:
    """The forum's job as it was written and with the project's own network."""
    job = ["data.patch_size=[320,150,26]", "data.batch_size=2", "data.num_classes=5"]
    choices = {
        "as the forum ran it": ["experiment=forum_small"],
        "as written, mixed 16": ["model=forum_small", "precision=16", *job],
    }
    for rung in ("none", "skips", "lean", "leanest", "offload", "blocks"):
        words = ["model=unet_small", "precision=16", f"checkpointing={rung}", *job]
        choices[f"unet_small, mixed 16, {rung}"] = words
    return {name: compared(words) for name, words in choices.items()}


def step() -> dict[str, Any]:
    """Time and peak of a step beside the peers that are installed, in half precision."""
    words = ["time", "--name", "gpu-part", "--precision", "16", "--width", "64", "--rounds", "5"]
    done = run([sys.executable, "scripts/bench_step.py", *words, "--size", "320", "160", "32"])
    path = ROOT / "benchmarks" / "gpu-part-step.json"
    if done.returncode:
        return {"exit_code": done.returncode, "error": done.stderr[-500:]}
    content = json.loads(path.read_text())["time, 16"]
    path.unlink()
    path.with_suffix(".png").unlink()
    return {"summary": content["rows"], **content}


def hippocampus() -> dict[str, Any]:
    """Dice against time on the Decathlon's Task04, if it lies under data/."""
    if not (ROOT / "data" / "Task04_Hippocampus" / "dataset.json").is_file():
        return {"skipped": "data/Task04_Hippocampus is not there"}
    folder = ROOT / "outputs" / "gpu_report"
    words = ["experiment=hippocampus", "trainer.max_time=00:00:06:00", f"hydra.run.dir={folder}"]
    done = run([sys.executable, "train.py", *words, "trainer.enable_progress_bar=false"])
    report = folder / "report.json"
    if done.returncode or not report.is_file():
        return {"exit_code": done.returncode, "error": done.stderr[-500:]}
    content = json.loads(report.read_text())
    curve = validations(folder)
    reached = [seconds for seconds, dice in curve if dice >= GOAL]
    return {
        "summary": {"dice": content["evaluation"]["mean"]["dice"]},
        f"seconds_to_{GOAL}": reached[0] if reached else None,
        "dice_by_seconds": curve,
    } | {
        key: content[key]
        for key in ("evaluation", "metrics", "memory", "speed", "steps", "precision")
    }


def validations(folder: Path) -> list[tuple[float, float]]:
    """(seconds since the first step, Dice) of every validation of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    begun = events.Scalars("train/loss")[0].wall_time
    return [(e.wall_time - begun, e.value) for e in events.Scalars("val/dice")]


def pools() -> dict[str, Any]:
    """Max, median and approximate median on one fold, a seed each: short trainings."""
    words = ["pools", "--name", "gpu-part", "--seeds", "0", "experiment=hippocampus"]
    limits = ["trainer.max_time=00:00:02:00", "evaluation.enabled=true"]
    done = run([sys.executable, "scripts/bench_hippocampus.py", *words, *limits])
    path = ROOT / "benchmarks" / "gpu-part-hippocampus.json"
    if done.returncode:
        return {"exit_code": done.returncode, "error": done.stderr[-500:]}
    content = json.loads(path.read_text())["pools"]
    path.unlink()
    return {"summary": content["mean"], **content}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": tests,
    "pool": pool,
    "predict_cube": partial(predict, "[64,64,64]"),
    "predict_flat": partial(predict, "[160,144,32]"),
    "forum": forum,
    "step": step,
    "hippocampus": hippocampus,
    "pools": pools,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: what is missing")
    parts = parser.parse_args().parts
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        print(f"no part {unknown[0]!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("gpu_report needs a GPU, and torch finds none here", file=sys.stderr)
        return 2
    device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    path = ROOT / "benchmarks" / f"{device}.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    for name in parts or [part for part in PARTS if part not in results]:
        print(f"{name} ...", flush=True)
        results[name] = PARTS[name]()
        results["environment"] = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results[name].get("summary", results[name]))[:2000], flush=True)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
