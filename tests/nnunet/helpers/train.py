"""Train and predict with nnU-Net on a tiny dataset: python train.py FOLDER.

nnU-Net's trainer and ours continue from each other's checkpoints. A program of its own: nnU-Net
reads its folders from the environment when it is imported.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
import wandb
from torch import nn
from torch.utils._pytree import tree_leaves

import unet3d
from scripts.bench.nnunet_trainer import set_folders
from tests.contract.helpers.datasets import write_nnunet
from tests.memory.helpers.oracle import measure_script
from tests.training.helpers.operation_recorder import OperationRecorder
from unet3d.__main__ import main as run_unet3d
from unet3d.cuda_graphs import WARMUP_BATCHES

NAME, CPU = "Dataset001_Tiny", torch.device("cpu")
NEARLY_TIED = 2**-9  # of probabilities, from logits below 4 that are rounded to 11 bits


def narrow(planned: Path, written: Path) -> None:
    """Write plans for a quarter of the channels."""
    plans = json.loads(planned.read_text())
    network = plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [n // 4 for n in network["features_per_stage"]]
    written.write_text(json.dumps(plans))


def train(trainer: str, checkpoint: Path | None) -> Path:
    """Train an epoch of two steps, after those of a checkpoint; return the checkpoint."""
    from nnunetv2.run.run_training import get_trainer_from_args

    run = get_trainer_from_args("1", "3d_fullres", 0, trainer, device=torch.device("cpu"))
    run.num_iterations_per_epoch, run.num_val_iterations_per_epoch = 2, 1
    run.initialize()  # with the learning rates of a thousand epochs
    if checkpoint is not None:
        run.load_checkpoint(str(checkpoint))
    run.num_epochs = run.current_epoch + 1
    run.run_training()
    print("network:", type(run.network).__name__, "epochs:", run.current_epoch)
    return Path(run.output_folder) / "checkpoint_final.pth"


def train_on_noise(recorder: Any) -> list[torch.Tensor]:
    """Train until the recorder's operations are replayed, or as often without; return weights."""
    from nnunetv2.run.run_training import get_trainer_from_args

    torch.manual_seed(0)
    device = torch.device("cpu")
    run = get_trainer_from_args("1", "3d_fullres", 0, "nnUNetTrainerLean", device=device)
    run.initialize()
    if recorder is not None:
        run.replay_with(recorder)
    patch = run.configuration_manager.patch_size
    scales = run._get_deep_supervision_scales()
    sizes = [[round(n * s) for n, s in zip(patch, scale, strict=True)] for scale in scales]
    for _ in range(WARMUP_BATCHES + 2):
        target = [torch.randint(0, 2, (2, 1, *size)).float() for size in sizes]
        run.train_step({"data": torch.randn(2, 2, *patch), "target": target})
    assert recorder is None or run.graphed_pass.recording is not None
    weights = [parameter.detach().clone() for parameter in run.network.parameters()]
    run.loss = Constant()  # as a subclass may set it after `initialize`
    assert run.train_step({"data": torch.randn(2, 2, *patch), "target": target})["loss"] == 7
    return weights


class Constant(nn.Module):
    """A loss of another trainer."""

    def forward(self, outputs: Any, target: Any) -> torch.Tensor:
        return 0 * outputs[0].sum() + 7


def compare_estimate() -> tuple[int, int]:
    """Return the peak of a step of nnU-Net's own trainer, estimated and measured."""
    from nnunetv2.run.run_training import get_trainer_from_args

    def build() -> Callable[[], Any]:
        run = get_trainer_from_args("1", "3d_fullres", 0, "nnUNetTrainer", device=CPU)
        run.initialize()
        patch = run.configuration_manager.patch_size
        scales = run._get_deep_supervision_scales()
        sizes = [[round(n * s) for n, s in zip(patch, scale, strict=True)] for scale in scales]
        target = [torch.zeros(2, 1, *size) for size in sizes]
        batch = {"data": torch.randn(2, 2, *patch), "target": target}
        return lambda: run.train_step(batch)

    return unet3d.estimate_step(build, device="cpu").peak, measure_script(build).peak


def compare_augmentation() -> bool:
    """Return whether batches that are augmented in the main process are those of nnU-Net's loader.

    With batches of one, both draw their random numbers in the same order, if nnU-Net's spatial
    transform draws from a seed, too.
    """
    from batchgeneratorsv2.transforms.noise.gaussian_blur import GaussianBlurTransform
    from nnunetv2.run.run_training import get_trainer_from_args

    from unet3d.nnunet.context_loader import find_spatial, use_seed
    from unet3d.nnunet.device_augmentation import list_parts

    def seed_spatial(transforms: Any) -> None:
        spatial = find_spatial(transforms)
        assert spatial is not None
        draw = spatial.get_parameters

        def draw_from_seed(**sample: Any) -> Any:
            with use_seed(np.random.randint(2**31)):
                return draw(**sample)

        vars(spatial)["get_parameters"] = draw_from_seed

    os.environ.update(nnUNet_n_proc_DA="0")  # no processes
    batches: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        run = get_trainer_from_args("1", "3d_fullres", 0, "nnUNetTrainerLean", device=CPU)
        run.initialize()
        run.batch_size = 1
        loader, _ = run.augment_on(CPU) if is_ours else run.get_dataloaders()
        assert (run.augmenter is not None) == is_ours
        if not is_ours:
            seed_spatial(loader.data_loader.transforms)
        transforms = loader.transforms if is_ours else loader.data_loader.transforms
        for part in list_parts(transforms):
            if isinstance(blur := getattr(part, "transform", None), GaussianBlurTransform):
                blur.benchmark = False  # which chooses by time between two results
        np.random.seed(0)
        torch.manual_seed(0)
        drawn = [next(loader) for _ in range(12)]
        batches.append(tree_leaves([(batch["data"], batch["target"]) for batch in drawn]))
    return all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(*batches, strict=True))


def choose_strategies() -> list[str]:
    """Return what the trainer chooses on GPUs with ever less memory."""
    from nnunetv2.run.run_training import get_trainer_from_args

    run = get_trainer_from_args("1", "3d_fullres", 0, "nnUNetTrainerLean", device=CPU)
    run.initialize()
    chosen = []
    for free in (2**40, 2**20):
        run.choose_checkpointing(free)
        chosen.append(run.network.checkpointing)
    return chosen


def combine_trainers() -> list[str]:
    """Return the networks of trainers that have two parents, and their norms."""
    from nnunetv2.run.run_training import get_trainer_from_args
    from nnunetv2.training.nnUNetTrainer.variants.network_architecture.nnUNetTrainerBN import (
        nnUNetTrainerBN,
    )

    run = get_trainer_from_args("1", "3d_fullres", 0, "nnUNetTrainerLean", device=CPU)
    found = []
    for parents in ((type(run), nnUNetTrainerBN), (nnUNetTrainerBN, type(run))):
        plans = run.plans_manager.plans | {"continue_training": False}
        both = type("Both", parents, {})(plans, "3d_fullres", 0, run.dataset_json, CPU)
        both.initialize()
        norms = {type(m).__name__ for m in both.network.modules() if "Norm3d" in type(m).__name__}
        found.append(f"{type(both.network).__name__} {' '.join(norms)}")
    return found


def build_2d_network() -> torch.nn.Module:
    """Build the network of a plan for slices."""
    from nnunetv2.run.run_training import get_trainer_from_args

    run = get_trainer_from_args("1", "2d", 0, "nnUNetTrainerLean", device=CPU)
    return run.build_network_architecture(run.plans_manager, run.configuration_manager, 2, 3)


def predict(folder: Path, images: Path, output: Path) -> tuple[np.ndarray, np.ndarray]:
    """Predict with the network of a trainer's folder into OUTPUT.nii.gz.

    Return labels and probabilities.
    """
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(device=torch.device("cpu"), use_mirroring=False, verbose=False)
    predictor.initialize_from_trained_model_folder(str(folder), (0,), "checkpoint_final.pth")
    print("predicts with:", type(predictor.network).__name__)
    files = [str(images / f"case0_{channel:04d}.nii.gz") for channel in (0, 1)]
    predictor.predict_from_files_sequential([files], [str(output)], save_probabilities=True)
    stored = np.load(f"{output}.npz")["probabilities"]
    return read_labels(Path(f"{output}.nii.gz")), stored.transpose(0, 3, 2, 1)


def read_labels(file: Path) -> np.ndarray:
    return np.asarray(nib.nifti1.load(file).dataobj)


def describe_labels(ours: np.ndarray, theirs: np.ndarray, probabilities: np.ndarray) -> str:
    """Compare labels but where nnU-Net's logits, which it keeps in half precision, nearly tie."""
    _, second, first = np.sort(probabilities, 0)
    decided = first - second > NEARLY_TIED
    equal = bool((ours == theirs)[decided].all()) and decided.mean() > 0.95
    return f"{equal} foreground: {theirs.any()}"


def train_here_and_export(root: Path, images: Path, checkpoint: Path) -> None:
    """Train on nnU-Net's plans and weights; compare our labels with the exported folder's.

    A patch holds a whole volume: nnU-Net has its own positions and weights of windows.
    """
    plans = root / "preprocessed" / NAME / "nnUNetPlans.json"
    run, folder = root / "ours", root / "exported"
    words = [f"experiment={plans}", f"init_from={checkpoint}", f"hydra.run.dir={run}"]
    words += ["data.patches_per_case=1", "trainer.max_steps=2"]
    words += ["trainer.check_val_every_n_epoch=1", "precision=32", "trainer.accelerator=cpu"]
    commands = [
        ["train", *words, "optimizer.lr=1e-4", f"data.cache={root / 'cache'}"],
        ["export", f"checkpoint={run}", f"output={folder}", "format=nnunet"],
        [
            *("predict", f"checkpoint={run}", f"input={images}"),
            *(f"output={root / 'labels'}", "keep_largest_component=none", "tta=false"),
        ],
    ]
    print("exit codes:", [run_unet3d(command) for command in commands])
    theirs = predict(folder, images, root / "theirs")
    ours = read_labels(root / "labels" / "case0.nii.gz")
    print("equal after export:", describe_labels(ours, *theirs))


def main() -> None:
    root = Path(sys.argv[1])
    set_folders(root)
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    write_nnunet(root / "raw" / NAME, [f"case{n}" for n in range(5)])
    extract_fingerprints([1], num_processes=1)
    plan_experiments([1], experiment_planner_class_name="nnUNetPlannerResEncM")
    plans = root / "preprocessed" / NAME
    narrow(plans / "nnUNetResEncUNetMPlans.json", plans / "nnUNetPlans.json")
    preprocess([1], configurations=["3d_fullres"], num_processes=[1])
    os.environ |= {"nnUNet_wandb_enabled": "1", "nnUNet_wandb_mode": "offline"}
    ours = train("nnUNetTrainerLean", None)
    wandb.finish()
    os.environ.update(nnUNet_wandb_enabled="0")  # it takes one trainer per process
    print("logs to W&B:", len([*ours.parent.glob("wandb/offline-run-*/*.wandb")]))
    theirs = train("nnUNetTrainer", ours)
    again = train("nnUNetTrainerLean", theirs)
    pairs = zip(train_on_noise(None), train_on_noise(OperationRecorder()), strict=True)
    print("equal when replayed:", all(torch.equal(eager, replayed) for eager, replayed in pairs))
    estimated, measured = compare_estimate()
    print("equal estimate:", estimated == measured)
    print("equal augmentation:", compare_augmentation())
    print("chooses:", choose_strategies())
    print("network of two parents:", ", ".join(combine_trainers()))
    print("network of 2D slices:", type(build_2d_network()).__name__)
    weights = torch.load(again, weights_only=False)["network_weights"]
    stored = torch.load(theirs, weights_only=False)
    torch.save(stored | {"network_weights": weights}, theirs)
    images, results = root / "raw" / NAME / "imagesTr", root / "results"
    (fused, _), plain = (
        predict(c.parents[1], images, results / c.parents[1].name) for c in (again, theirs)
    )
    print("equal labels:", describe_labels(fused, *plain))
    train_here_and_export(root, images, theirs)


if __name__ == "__main__":
    main()
