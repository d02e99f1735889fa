"""Compare the loader and the steps of `nnUNetTrainerLean` with those of nnU-Net's trainer.

    pip install '.[peers]'
    python -m scripts.bench.nnunet_loader    # writes benchmarks/cpu-nnunet-loader.json

The loader has two processes and reads patches of 128 x 128 x 128 of brain tumors at their own
spacing; the trainer takes those without transforms, which its GPU computes. Iterations of both
trainers are measured with a small plan for the hippocampus, on a CPU, where transforms run in a
process of the loader, as nnU-Net's do.
"""

import os
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch

from scripts.bench.nnunet_trainer import JOBS, SPACINGS, prepare, set_folders
from scripts.bench.results import ROOT, make_parser, run_in_new_process, write_results

CPU, PROCESSES, SECONDS, ITERATIONS = torch.device("cpu"), 2, 60, 100
TRAINERS = ("nnUNetTrainer", "nnUNetTrainerLean")


def start_trainer(job: str, trainer: str, *, processes: int) -> Any:
    """Return a trainer of nnU-Net, after its dataset has been preprocessed."""
    root = ROOT / "outputs" / "nnunet_loader" / job
    set_folders(root)
    os.environ.update(nnUNet_n_proc_DA=str(processes))
    if not root.exists():
        prepare(root, job)
    from nnunetv2.run.run_training import get_trainer_from_args

    run = get_trainer_from_args("1", "3d_fullres", 0, trainer, device=CPU)
    run.initialize()
    return run


class RawBatches:
    """Stands for the augmenter: the batches of the loader as they are."""

    def __init__(self, loader: Any, transforms: Any, device: torch.device):
        self.loader = loader

    def __next__(self) -> Any:
        return next(self.loader)


def measure_loader(raw: bool) -> float:
    """Return the patches per second of a loader with a batch of two."""
    JOBS["brain"] = (JOBS["brain"][0], [128] * 3, JOBS["brain"][2])
    SPACINGS.pop("brain")
    run = start_trainer("brain", "nnUNetTrainerLean", processes=PROCESSES)
    if raw:
        with patch.dict(type(run).augment_on.__globals__, DeviceAugmenter=RawBatches):
            loader, validation = run.augment_on(CPU)
    else:
        loader, validation = run.get_dataloaders()
    for _ in range(8):  # what is in the queue
        next(loader)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        count += len(next(loader)["data"])
    rate = count / (time.perf_counter() - start)
    run.close_loaders(getattr(loader, "loader", loader), validation)
    return round(rate, 2)


def measure_iterations(trainer: str) -> float:
    """Return the median seconds of an iteration, from batch to batch."""
    run = start_trainer("hippocampus", trainer, processes=1)
    loader, validation = run.get_dataloaders()
    run.network.train()
    run.set_deep_supervision_enabled(run.enable_deep_supervision)
    seconds = []
    for _ in range(ITERATIONS):
        start = time.perf_counter()
        run.train_step(next(loader))
        seconds.append(time.perf_counter() - start)
    for part in (loader, validation):
        part._finish()
    return round(statistics.median(seconds[10:]), 4)


def main() -> None:
    parser = make_parser("scripts.bench.nnunet_loader", __doc__, output="cpu-nnunet-loader.json")
    options = parser.parse_args()
    rates = {
        name: run_in_new_process(measure_loader, raw)
        for name, raw in {"nnU-Net": False, "without transforms": True}.items()
    }
    seconds = {name: run_in_new_process(measure_iterations, name) for name in TRAINERS}
    results = {"processes": PROCESSES, "patches_per_second": rates, "iteration_seconds": seconds}
    write_results(options.output, results)
    print(results)


if __name__ == "__main__":
    main()
