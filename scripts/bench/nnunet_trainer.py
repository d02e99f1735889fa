"""Train nnU-Net's trainer, or ours for nnU-Net, on the cases of a job of `scripts.bench.quality`.

    pip install '.[peers]'
    python -m scripts.bench.nnunet_trainer --job hippocampus --seeds 0 1 2 --steps 400
    python -m scripts.bench.nnunet_trainer --job hard --steps 3700 --name "hard, 10 minutes"
    python -m scripts.bench.nnunet_trainer --job hippocampus --trainer nnUNetTrainerLean

`nnUNetTrainerLean` augments batches as it does on a GPU, with nnU-Net's transforms on the device.
Loop, loss, optimizer, augmentation, sampling and prediction are nnU-Net's, with mirroring. Only
patch, batch and channels are those of our network in the job, and an epoch has 50 iterations. Dice
is nnU-Net's own of the validation cases, which are the same as ours, after the last step. The file
of results is that of `scripts.bench.quality`; each run is a folder in outputs/.
"""

import json
import os
import statistics
import sys
import types
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from scripts.bench.quality import Row, write_run
from scripts.bench.results import ROOT, make_parser
from unet3d.nnunet import fused_network

JOBS: dict[str, tuple[str, list[int], list[int]]] = {
    "hippocampus": ("data/Task04_Hippocampus", [40, 56, 40], [16, 32, 64, 128]),
    "hard": ("data/synthetic_hard/*", [32, 32, 16], [8, 16, 32]),
    "brain": ("data/Dataset029_BRATS6", [56, 48, 40], [8, 16, 32, 64]),
}
"""The dataset's folder, the patch and the channels of each level."""

SPACINGS = {"brain": [2.0, 2.0, 2.0]}
"""Spacings that replace those of nnU-Net's plan, in mm."""

TRAINERS = ("nnUNetTrainer", "nnUNetTrainerLean")
BATCH_SIZE = 2
ITERATIONS = 50  # per epoch; nnU-Net's scheduler and its log change once per epoch


class Absent(types.ModuleType):
    """Stands for a module with networks that need torchvision, which has no build for any torch."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def set_folders(root: Path) -> None:
    """Set nnU-Net's folders and options, which it reads when it is imported."""
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(root / name)
    trainers = Path(fused_network.__file__).parent / "trainer"
    os.environ |= {"nnUNet_extTrainer": str(trainers), "nnUNet_compile": "f"}
    os.environ |= {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1"}
    try:
        import_module("torchvision")
    except Exception:  # a build for another torch raises RuntimeError
        sys.modules["dynamic_network_architectures.architectures.primus"] = Absent("primus")


def convert(source: Path, target: Path) -> None:
    """Write a Decathlon task in nnU-Net's layout, one file per channel; link one that has it."""
    from nnunetv2.dataset_conversion.convert_MSD_dataset import split_4d_nifti

    content = json.loads((source / "dataset.json").read_text())
    if "channel_names" in content:
        target.parent.mkdir(parents=True)
        target.symlink_to(source.resolve())
        return
    for part in ("imagesTr", "labelsTr"):
        (target / part).mkdir(parents=True)
    for case in content["training"]:
        label = source / case["label"]
        (target / "labelsTr" / label.name).symlink_to(label.resolve())
        split_4d_nifti(str(source / case["image"]), str(target / "imagesTr"))
    labels = {name: int(value) for value, name in content["labels"].items()}
    description = {"channel_names": content["modality"], "labels": labels}
    description |= {"numTraining": len(content["training"]), "file_ending": ".nii.gz"}
    (target / "dataset.json").write_text(json.dumps(description))


def prepare(root: Path, job: str) -> None:
    """Convert, plan and preprocess a job's dataset with nnU-Net, in the sizes of our network."""
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    pattern, patch, channels = JOBS[job]
    (source,) = ROOT.glob(pattern)
    name = f"Dataset001_{job}"
    convert(source, root / "raw" / name)
    extract_fingerprints([1], num_processes=1)
    plan_experiments([1])
    file = root / "preprocessed" / name / "nnUNetPlans.json"
    plans = json.loads(file.read_text())
    configuration = plans["configurations"]["3d_fullres"]
    configuration |= {"patch_size": patch[::-1], "batch_size": BATCH_SIZE}  # its axes are reversed
    configuration["spacing"] = SPACINGS.get(job, configuration["spacing"])
    levels = len(channels)
    configuration["architecture"]["arch_kwargs"] |= {
        "n_stages": levels,
        "features_per_stage": channels,
        "kernel_sizes": [[3, 3, 3]] * levels,
        "strides": [[1, 1, 1]] + [[2, 2, 2]] * (levels - 1),
        "n_conv_per_stage": [2] * levels,
        "n_conv_per_stage_decoder": [2] * (levels - 1),
    }
    file.write_text(json.dumps(plans))
    preprocess([1], configurations=["3d_fullres"], num_processes=[1])


def train(trainer: str, fold: int, seed: int, steps: int) -> Row:
    """Train and validate; return the run's row of results."""
    from nnunetv2.run.run_training import get_trainer_from_args

    seed_everything(seed)
    device = torch.device("cpu")
    run: Any = get_trainer_from_args("1", "3d_fullres", fold, trainer, device=device)
    if trainer != TRAINERS[0]:
        run.get_dataloaders = lambda: run.augment_on(device)
    run.output_folder += f"_seed_{seed}"
    Path(run.output_folder).mkdir(parents=True, exist_ok=True)
    run.num_iterations_per_epoch, run.num_val_iterations_per_epoch = ITERATIONS, 1
    run.num_epochs, run.disable_checkpointing = steps // ITERATIONS, True
    run.run_training()
    run.perform_actual_validation()
    summary = json.loads((Path(run.output_folder) / "validation" / "summary.json").read_text())
    names = {str(value): name for name, value in run.dataset_json["labels"].items() if value}
    starts, ends = (
        run.logger.get_value(f"epoch_{part}_timestamps", None) for part in ("start", "end")
    )
    seconds = [(end - start) / ITERATIONS for start, end in zip(starts, ends, strict=True)]
    mean = {name: summary["mean"][label]["Dice"] for label, name in names.items()}
    cases = {
        Path(case["reference_file"]).name.removesuffix(".nii.gz"): {
            name: case["metrics"][label]["Dice"] for label, name in names.items()
        }
        for case in summary["metric_per_case"]
    }
    return {
        "dice": {"mean": statistics.mean(mean.values()), **mean},
        "steps": run.num_epochs * ITERATIONS,
        "median_step_seconds": statistics.median(seconds),
        "peak_bytes": {},
        "cases": cases,
        "predicted_bytes": None,
        "parameters": sum(p.numel() for p in run.network.parameters()),
        "deep_supervision": run.enable_deep_supervision,
    }


def main() -> None:
    """Train one run after the other."""
    parser = make_parser("scripts.bench.nnunet_trainer", __doc__, output="cpu-recipes.json")
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--trainer", choices=TRAINERS, default=TRAINERS[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--name", help="of the job in the file of results")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    root = ROOT / "outputs" / "nnunet_trainer" / options.job
    set_folders(root)
    if not root.exists():
        prepare(root, options.job)
    words = [f"iterations={options.steps}", f"trainer={options.trainer}"]
    variant = "nnunet_trainer" if options.trainer == TRAINERS[0] else "nnunet_trainer_lean"
    for seed, fold in product(options.seeds, options.folds):
        row = {**train(options.trainer, fold, seed, options.steps), "threads": options.threads}
        name = f"fold {fold}, seed {seed}"
        job = options.name or options.job
        write_run(options.output, job, variant, words, name, row)
        print(f"{options.job}, {options.trainer}, {name}: {row['dice']['mean']:.4f}", flush=True)


if __name__ == "__main__":
    main()
