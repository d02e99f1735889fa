"""Train nnU-Net with its own trainer and with fused blocks, and compare held-out Dice.

    pip install '.[peers]'
    unet3d download task=Task04_Hippocampus
    python -m scripts.bench.nnunet_trainers data/Task04_Hippocampus

Both trainers run in nnU-Net, on fold 0 of the same plans, for the same number of steps; batch and
width of the plans are replaced by ones that suit a CPU. The Dice is that of nnU-Net's own
validation. nnU-Net has no seed: runs of one trainer differ, too. The result is
benchmarks/<name>-nnunet-trainers.json; finished runs are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from unet3d.report.run_report import collect_versions
from unet3d.workflows.nnunet import fused_network

ROOT = Path(__file__).resolve().parents[2]
DATASET = "Dataset004_Hippocampus"
TRAINERS = ("nnUNetTrainer", "nnUNetTrainerLean")
STEPS_PER_EPOCH = 50


class _Absent(types.ModuleType):
    """Stands for a module with networks that need torchvision, which has no build for any torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def do_without_torchvision() -> None:
    """Let nnU-Net import where torchvision cannot: only its Primus networks need it."""
    try:
        import_module("torchvision")
    except Exception:  # a build for another torch raises RuntimeError
        sys.modules["dynamic_network_architectures.architectures.primus"] = _Absent("primus")


def set_folders(root: Path) -> None:
    """Set nnU-Net's folders and options, which it reads when it is imported."""
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(root / name)
    trainers = Path(fused_network.__file__).parent / "trainer"
    os.environ |= {"nnUNet_extTrainer": str(trainers), "nnUNet_compile": "f"}
    os.environ |= {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1"}
    do_without_torchvision()


def prepare(task: Path, root: Path, batch_size: int, width: int) -> None:
    """Convert a task of the Decathlon, plan and preprocess it with nnU-Net."""
    raw = root / "raw" / DATASET
    if (root / "preprocessed" / DATASET / "prepared").is_file():
        return
    content = json.loads((task / "dataset.json").read_text())
    for folder, suffix in (("imagesTr", "_0000"), ("labelsTr", "")):
        (raw / folder).mkdir(parents=True, exist_ok=True)
        for file in (task / folder).glob("[!.]*.nii.gz"):
            name = file.name.removesuffix(".nii.gz")
            link = raw / folder / f"{name}{suffix}.nii.gz"
            if not link.exists():
                link.symlink_to(file.absolute())
    facts = {
        "channel_names": content["modality"],
        "labels": {name: int(number) for number, name in content["labels"].items()},
        "numTraining": len(list((raw / "labelsTr").iterdir())),
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(facts))
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    extract_fingerprints([4], num_processes=1)
    plan_experiments([4])
    plans = root / "preprocessed" / DATASET / "nnUNetPlans.json"
    content = json.loads(plans.read_text())
    sizes = content["configurations"]["3d_fullres"]
    sizes["batch_size"] = batch_size
    network = sizes["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [width * 2**n for n in range(network["n_stages"])]
    plans.write_text(json.dumps(content, indent=1))
    preprocess([4], configurations=["3d_fullres"], num_processes=[1])
    (plans.parent / "prepared").touch()


def train(trainer: str, steps: int) -> dict[str, float]:
    """Train and validate fold 0; return the Dice of each class."""
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = get_trainer_from_args("4", "3d_fullres", 0, trainer, device=device)
    run.num_iterations_per_epoch, run.num_val_iterations_per_epoch = STEPS_PER_EPOCH, 2
    run.num_epochs = steps // STEPS_PER_EPOCH
    run.run_training()
    run.perform_actual_validation()
    summary = json.loads((Path(run.output_folder) / "validation" / "summary.json").read_text())
    return {label: scores["Dice"] for label, scores in summary["mean"].items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.nnunet_trainers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", type=Path, help="folder of Task04_Hippocampus")
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--steps", type=int, default=3000, help=f"a multiple of {STEPS_PER_EPOCH}")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=8, help="channels at full resolution")
    parser.add_argument("--runs", type=int, default=1, help="runs of each trainer")
    parser.add_argument("--folder", type=Path, default=Path("outputs/nnunet-trainers"))
    parser.add_argument("--trainer", choices=TRAINERS, help=argparse.SUPPRESS)  # one run
    options = parser.parse_args(argv)
    folder = options.folder.absolute()
    if options.trainer is not None:
        set_folders(folder)
        print(json.dumps(train(options.trainer, options.steps)))
        return 0
    set_folders(folder)
    prepare(options.task, folder, options.batch, options.width)
    rows: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in TRAINERS}
    for number in range(options.runs):
        for trainer in TRAINERS:
            result = folder / f"{trainer}-{options.steps}-{number}.json"
            if not result.is_file():
                words = [sys.executable, "-m", "scripts.bench.nnunet_trainers", str(options.task)]
                words += ["--trainer", trainer, "--steps", str(options.steps)]
                words += ["--folder", str(folder)]
                ended = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE)
                result.write_bytes(ended.stdout.splitlines()[-1])
            rows[trainer].append(json.loads(result.read_text()))
            print(trainer, rows[trainer][-1], flush=True)
    report = {
        "command": f"python -m scripts.bench.nnunet_trainers data/{options.task.name}",
        "versions": collect_versions(),
        "steps": options.steps,
        "batch_size": options.batch,
        "width": options.width,
        "dice": rows,
        "mean": {name: mean(mean(run.values()) for run in runs) for name, runs in rows.items()},
    }
    path = ROOT / "benchmarks" / f"{options.name}-nnunet-trainers.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
