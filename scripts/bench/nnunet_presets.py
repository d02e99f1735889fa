"""Estimate the memory of nnU-Net's presets, and compare it with what nnU-Net's documentation says.

    pip install '.[peers]'
    python -m scripts.bench.nnunet_presets    # no GPU; benchmarks/predicted-nnunet.json

The documentation states neither patch nor dataset, so the patches are those that nnU-Net's planners
choose for the datasets below. Loss and optimizer are nnU-Net's, too.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from torch import Tensor, nn

from scripts.bench.nnunet_planner import PRESETS, plan_with_nnunet
from unet3d.memory.any_network import NetworkEstimate, estimate_memory
from unet3d.report.run_report import collect_versions
from unet3d.units import CUDA_CONTEXT_BYTES

ROOT = Path(__file__).resolve().parents[2]
VRAM = ROOT / "tests" / "memory" / "evidence" / "nnunet_vram.csv"

DATASETS: dict[str, dict[str, Any]] = {
    "like AMOS": {"spacing": (0.68, 0.68, 5.0), "shape": (592, 592, 103), "classes": 16},
    "like KiTS": {"spacing": (0.78, 0.78, 0.78), "shape": (512, 512, 512), "classes": 4},
}
"""Sizes of CT datasets of nnU-Net's table; all cases have the same size and spacing here."""
NUM_CASES = 400


def estimate_preset(preset: str, dataset: str) -> tuple[dict[str, Any], NetworkEstimate]:
    """Plan with nnU-Net; return the shape of its input, and the estimate of a step."""
    plan, classes = plan_preset(preset, dataset), DATASETS[dataset]["classes"]
    shape = [plan["batch_size"], 1, *map(int, plan["patch_size"])]
    return {"input_shape": shape}, estimate_step(build_network(plan, classes), shape)


def plan_preset(preset: str, dataset: str) -> dict[str, Any]:
    """Return the configuration that nnU-Net plans at full resolution."""
    data = DATASETS[dataset]
    with redirect_stdout(sys.stderr):
        return plan_with_nnunet(
            [data["spacing"]] * NUM_CASES,
            [data["shape"]] * NUM_CASES,
            classes=data["classes"],
            preset=preset,
        ).configuration


def build_network(plan: dict[str, Any], classes: int) -> nn.Module:
    """Build nnU-Net's network of a configuration."""
    architecture = plan["architecture"]
    return get_network_from_plans(
        architecture["network_class_name"],
        architecture["arch_kwargs"],
        architecture["_kw_requires_import"],
        input_channels=1,
        output_channels=classes,
        deep_supervision=True,
    )


def estimate_step(network: nn.Module, shape: Sequence[int]) -> NetworkEstimate:
    """Estimate a step with nnU-Net's loss and optimizer."""
    return estimate_memory(
        network, shape, loss=make_loss(), optimizer=make_optimizer, precision="16"
    )


def make_loss() -> Callable[[Sequence[Tensor]], Tensor]:
    """Return nnU-Net's loss with deep supervision, as a function of the outputs alone."""
    dice = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    loss = DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss)

    def compute(outputs: Sequence[Tensor]) -> Tensor:
        weights = [*(0.5**n for n in range(len(outputs) - 1)), 0.0]  # none for the smallest
        labels = [torch.zeros(len(x), 1, *x.shape[2:]) for x in outputs]
        return DeepSupervisionWrapper(loss, weights)(outputs, labels)

    return compute


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return nnU-Net's optimizer."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.99, nesterov=True)


def compare(preset: str, dataset: str, documented: float) -> dict[str, Any]:
    """Return a row: the estimate of a preset, and its error relative to the documented memory."""
    row, estimate = estimate_preset(preset, dataset)
    process = estimate.reserved + CUDA_CONTEXT_BYTES
    return row | {
        "peak_allocated_bytes": estimate.peak,
        "peak_reserved_bytes": estimate.reserved,
        "process_bytes": process,
        "documented_gb": documented,
        "error_percent": round(100 * (process / (documented * 1e9) - 1), 1),
    }


def read_documented() -> dict[str, float]:
    """Return decimal GB by preset, as nnU-Net documents them."""
    with VRAM.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    return {name: float(value) for name, value in rows[1:] if name in PRESETS}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.nnunet_presets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    output = ROOT / "benchmarks" / "predicted-nnunet.json"
    parser.add_argument("--output", type=Path, default=output)
    path: Path = parser.parse_args(argv).output
    documented = read_documented()
    rows = {
        f"{preset}, {dataset}": compare(preset, dataset, documented[preset])
        for dataset in DATASETS
        for preset in PRESETS
    }
    report = {
        "command": "python -m scripts.bench.nnunet_presets",
        "versions": collect_versions(),
        "datasets": DATASETS,
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name}: {row['process_bytes'] / 1e9:.2f} GB, {row['error_percent']:+.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
