"""Measure what compiled steps allocate on a CPU, and compare it with the estimate of plain modules.

python -m scripts.bench.compiled    # writes benchmarks/cpu-compiled.json, in a few minutes
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from tests.memory.helpers.oracle import measure
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.machine.device import Precision
from unet3d.memory.compiled import get_fixed_bytes
from unet3d.memory.estimate import estimate_step
from unet3d.report.run_report import collect_versions
from unet3d.workflows.memory.training_step import NullListener, TrainingStep, make_step_factory

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("data.patch_size=[32,32,32]", "data.batch_size=2", "checkpointing=none")
JOBS = (
    "model=unet_tiny",
    "model=unet_tiny model.norm=batch model.upsampling=transposed pool=median",
    "model=naive_small",
    "model=dynunet",
)


def compare(job: str) -> dict[str, float]:
    """Return measured and estimated bytes, and the share of the activations that is left."""
    settings = parse_training(compose_config([*job.split(), *COMMON], "train"))
    make_step = make_step_factory(settings, Precision("32", "32"), cuda=False)

    def make_compiled_step() -> TrainingStep:
        step = make_step()
        step.model.compile()
        for _ in range(2):
            step.train(NullListener())
        return step

    measured = measure(make_compiled_step).peak
    estimate = estimate_step(make_step, cuda=False)
    fixed = get_fixed_bytes(estimate)
    plain = estimate.peak.allocated or 0
    return {
        "compiled_bytes": measured,
        "plain_estimated_bytes": plain,
        "share_of_activations": round((measured - fixed) / (plain - fixed), 3),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "cpu-compiled.json")
    path: Path = parser.parse_args(argv).output
    rows = {}
    for job in JOBS:
        torch._dynamo.reset()
        rows[job] = compare(job)
        print(job, rows[job])
    report = {
        "command": "python -m scripts.bench.compiled",
        "versions": collect_versions(),
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
