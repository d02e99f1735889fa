"""Compare the losses of conf/loss: time on a CPU, memory and launches on a GPU.

    python -m scripts.bench.losses    # writes benchmarks/<name>-losses.json, in a few minutes

A step trains unet_tiny on two patches of 64^3 with four classes. Shares are of a step with the
default loss, timed in turns with the loss alone; memory and launches are predicted, in precision
16. The labels are balls, as in the synthetic dataset.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.machine.device import Precision
from unet3d.memory.estimate import estimate_step
from unet3d.report.run_report import collect_versions
from unet3d.roofline.operations import count_operations, sum_launches
from unet3d.units import MIB
from unet3d.workflows.memory.training_step import NullListener, make_step_factory
from unet3d.workflows.shared.loss import build_loss

ROOT = Path(__file__).resolve().parents[2]
JOB = ("model=unet_tiny", "data.patch_size=[64,64,64]", "data.batch_size=2")
EXTRA = ("dice_ce loss.voxel_loss=focal", "dice_ce loss.voxel_loss=topk")


def make_labels(batch: int, size: int, classes: int) -> torch.Tensor:
    """Return volumes with one ball of each class."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij"))
    labels = torch.zeros(batch, size, size, size, dtype=torch.uint8)
    for label in range(1, classes):
        center = torch.full((3, 1, 1, 1), size * label / classes)
        labels[:, ((grid - center) ** 2).sum(0) < (size / (2 * classes)) ** 2] = label
    return labels


def measure(loss: str, repeats: int) -> dict[str, Any]:
    """Return the costs of a loss, given as words after `loss=`."""
    settings = parse_training(compose_config([*JOB, *f"loss={loss}".split()], "train"))
    default = parse_training(compose_config([*JOB], "train"))
    step = make_step_factory(default, Precision("32", "32"), cuda=False)()
    compute, labels = build_loss(settings), make_labels(2, 64, 4)
    logits = torch.randn(2, 4, 64, 64, 64, requires_grad=True)
    step.train(NullListener())
    times: dict[str, list[float]] = {"step": [], "loss": []}
    for _ in range(repeats):
        start = time.perf_counter()
        step.train(NullListener())
        times["step"].append(time.perf_counter() - start)
        for _ in range(3):
            start = time.perf_counter()
            compute(logits, labels).backward()
            times["loss"].append(time.perf_counter() - start)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # MONAI sets it: a larger workspace
    make_step = make_step_factory(settings, Precision("16", "16"), cuda=True)
    peak = estimate_step(make_step, cuda=True).peak.allocated or 0
    return {
        "loss_ms": round(1e3 * median(times["loss"]), 1),
        "share_of_step": round(median(times["loss"]) / median(times["step"]), 4),
        "peak_allocated_mib": round(peak / MIB, 1),
        "launches": sum_launches(count_operations(make_step)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="steps with each loss")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    rows = {}
    for loss in sorted([*(f.stem for f in (ROOT / "conf" / "loss").glob("*.yaml")), *EXTRA]):
        rows[loss] = measure(loss, options.repeats)
        print(loss, rows[loss], flush=True)
    report = {
        "command": "python -m scripts.bench.losses",
        "versions": collect_versions(),
        "job": " ".join(JOB),
        "threads": options.threads,
        "rows": rows,
    }
    path = ROOT / "benchmarks" / f"{options.name}-losses.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
