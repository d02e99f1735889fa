"""Measure what 10,000 tiny cases cost: check, plan, a first epoch, a cached one, predict, evaluate.

The cases have 16 x 16 x 16 voxels and the network is as small as it can be, so that what is counted
is the cost per case. Each command runs in a new process, with one thread of torch: with more, the
threads of so small a network would mostly wait for each other.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from scripts.bench.stages import time_command
from unet3d.machine.system import get_cpu_model
from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[2]

SIDE = 16

HEADER_BYTES = 352

SCANS = 300
"""Cases that are predicted and evaluated."""

TRAIN = [
    *("train", "data=decathlon", "data.cache=cache", "augmentation=none", "trainer.max_epochs=1"),
    *("trainer.accelerator=cpu", "evaluation.enabled=false"),
]

TINY = [
    *("model.width=2", "model.depth=2", f"data.patch_size=[{SIDE},{SIDE},{SIDE}]"),
    "data.batch_size=16",
]

REAL = [
    *("train", "data=decathlon", "data.cache=real", "trainer.max_epochs=1"),
    *("trainer.accelerator=cpu", "evaluation.enabled=false"),
]
"""The default training, but for its length."""


def write_cases(root: Path, count: int) -> None:
    """Write a Decathlon task; the voxels of no two files are the same."""
    rng = np.random.default_rng(0)
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    training, types = [], (np.int16, np.uint8)
    empty = [nibabel.Nifti1Image(np.zeros((SIDE,) * 3, t), np.eye(4)).to_bytes() for t in types]
    headers = [content[:HEADER_BYTES] for content in empty]
    for n in range(count):
        label = np.zeros((SIDE, SIDE, SIDE), np.uint8)
        d, h, w = rng.integers(2, 8, 3)
        label[d : d + 6, h : h + 6, w : w + 6] = 1
        label[0, 0] = [n >> bit & 1 for bit in range(SIDE)]
        image = rng.integers(1, 1000, label.shape, np.int16) + 500 * label.astype(np.int16)
        arrays = {"image": image, "label": label}
        for (kind, array), header in zip(arrays.items(), headers, strict=True):
            content = gzip.compress(header + array.tobytes("F"), 1)
            (root / f"{kind}sTr" / f"case_{n:05d}.nii.gz").write_bytes(content)
        training.append({kind: f"{kind}sTr/case_{n:05d}.nii.gz" for kind in arrays})
    names = {"modality": {"0": "MRI"}, "labels": {"0": "background", "1": "cube"}}
    content = {**names, "numTraining": count, "training": training}
    (root / "dataset.json").write_text(json.dumps(content))


def run_commands(folder: Path, cases: int) -> dict[str, Any]:
    """Run the commands on the cases; return what each took."""
    root = "data.root=cases"
    train = [*TRAIN, *TINY, root]
    scans = min(SCANS, cases)
    (folder / "scans").mkdir()
    for file in sorted((folder / "cases" / "imagesTr").iterdir())[:scans]:
        (folder / "scans" / file.name).symlink_to(file)
    predict = ["predict", "checkpoint=first", "input=scans", "output=labels", "device=cpu"]
    evaluate = ["evaluate", "predictions=labels", "references=cases/labelsTr", "output=scores"]
    return {
        name: time_command(arguments, folder)
        for name, arguments in {
            "train, first epoch": [*train, "hydra.run.dir=first"],
            "train, epoch from the cache": [*train, "hydra.run.dir=cached"],
            "check": ["check", "data=decathlon", root],
            "plan": ["plan", "data=decathlon", root, "data.cache=cache", "budget_gib=2"],
            "plan, from the cache": [
                *("plan", "data=decathlon", root, "data.cache=cache", "budget_gib=2", "name=again"),
            ],
            f"predict {scans} cases": predict,
            f"evaluate {scans} cases": [*evaluate, "missing_predictions=skip"],
        }.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.many_cases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--real", type=Path, help="a task of the Decathlon, trained by default")
    parser.add_argument("--output", type=Path, help="default for 10,000: cpu-many-cases.json")
    options = parser.parse_args()
    if options.output is None and options.cases == parser.get_default("cases"):
        options.output = ROOT / "benchmarks" / "cpu-many-cases.json"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cases(folder / "cases", options.cases)
        commands = run_commands(folder, options.cases)
        files = sum(len(names) for _, _, names in os.walk(folder / "cache"))
        if options.real is not None:
            real = [*REAL, f"data.root={options.real.absolute()}"]
            for n, run in enumerate(("first epoch", "epoch from the cache")):
                name = f"train {options.real.name}, {run}"
                commands[name] = time_command([*real, f"hydra.run.dir=real-{n}"], folder)
    report = {
        "command": f"python -m scripts.bench.many_cases --cases {options.cases}",
        "cases": options.cases,
        "voxels": [SIDE] * 3,
        "training": " ".join([*TRAIN, *TINY]),
        "processor": get_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
        "files_in_cache": files,
        "commands": commands,
    }
    text = json.dumps(report, indent=2) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
