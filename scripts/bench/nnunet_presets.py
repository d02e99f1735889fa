"""Estimate the memory of nnU-Net's presets, with nnU-Net's modules and with fused blocks.

    pip install '.[peers]'
    python -m scripts.bench.nnunet_presets    # no GPU; benchmarks/predicted-nnunet.json

nnU-Net's documentation says how much memory its presets need, but neither patch nor dataset, so the
patches are those that nnU-Net's planners choose for the datasets below. Loss and optimizer are
nnU-Net's, too. With fused blocks, as nnUNetTrainerLean trains them, the largest patches are found
that fit the documented memory.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import product
from typing import Any

import torch
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from torch import Tensor, nn

from scripts.bench.nnunet_planner import PRESETS, plan_with_nnunet
from scripts.bench.results import ROOT, make_parser, write_results
from scripts.bench.step import SGD
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.any_network import NetworkEstimate, estimate_memory
from unet3d.nnunet.fused_network import use_fused_blocks

VRAM = ROOT / "tests" / "memory" / "evidence" / "nnunet_vram.csv"

DATASETS: dict[str, dict[str, Any]] = {
    "like AMOS": {"spacing": (0.68, 0.68, 5.0), "shape": (592, 592, 103), "classes": 16},
    "like KiTS": {"spacing": (0.78, 0.78, 0.78), "shape": (512, 512, 512), "classes": 4},
}
"""Sizes of CT datasets of nnU-Net's table; all cases have the same size and spacing here."""
NUM_CASES = 400

STRATEGIES = ("plain modules", "fused", "lean", "leanest")
GROWTH = {"like AMOS": (8, 32, 32), "like KiTS": (32, 32, 32)}
"""By how much a patch grows per axis, in nnU-Net's order; the network's strides divide it."""

BUDGET_PRESET = "ResEnc L"
"""The preset whose documented memory is the budget of larger patches; they have its network."""


def estimate_preset(
    preset: str, dataset: str, strategy: str = "plain modules"
) -> tuple[list[int], NetworkEstimate]:
    """Plan with nnU-Net; return the shape of its input, and the estimate of a step."""
    plan, classes = plan_preset(preset, dataset), DATASETS[dataset]["classes"]
    shape = [plan["batch_size"], 1, *map(int, plan["patch_size"])]
    return shape, estimate_network(build_network(plan, classes, strategy), shape)


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


def build_network(plan: dict[str, Any], classes: int, strategy: str = "plain modules") -> nn.Module:
    """Build nnU-Net's network of a configuration, with a checkpointing strategy."""
    architecture = plan["architecture"]
    network = get_network_from_plans(
        architecture["network_class_name"],
        architecture["arch_kwargs"],
        architecture["_kw_requires_import"],
        input_channels=1,
        output_channels=classes,
        deep_supervision=True,
    )
    if strategy != "plain modules":
        use_fused_blocks(network, strategy)
    return network


def estimate_network(network: nn.Module, shape: Sequence[int]) -> NetworkEstimate:
    """Estimate a step with nnU-Net's loss and optimizer."""
    return estimate_memory(network, shape, loss=make_loss(), optimizer=SGD, precision="16")


def make_loss() -> Callable[[Sequence[Tensor]], Tensor]:
    """Return nnU-Net's loss with deep supervision, as a function of the outputs alone."""
    dice = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    loss = DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss)

    def compute(outputs: Sequence[Tensor]) -> Tensor:
        weights = [*(0.5**n for n in range(len(outputs) - 1)), 0.0]  # none for the smallest
        labels = [torch.zeros(len(x), 1, *x.shape[2:]) for x in outputs]
        return DeepSupervisionWrapper(loss, weights)(outputs, labels)

    return compute


def read_documented() -> dict[str, float]:
    """Return decimal GB by preset, as nnU-Net documents them."""
    rows = csv.reader(VRAM.read_text("utf-8").splitlines())
    return {name: float(value) for name, value in rows if name in PRESETS}


def describe_peaks(estimate: NetworkEstimate) -> dict[str, int]:
    return {"peak_allocated_bytes": estimate.peak, "peak_reserved_bytes": estimate.reserved}


def estimate_row(preset: str, dataset: str, documented_gb: float) -> dict[str, Any]:
    """Return the memory of a step of a preset with each strategy."""
    estimates = {s: estimate_preset(preset, dataset, s) for s in STRATEGIES}
    return {
        "input_shape": estimates["fused"][0],
        "documented_gb": documented_gb,
        "strategies": {s: describe_peaks(estimate) for s, (_, estimate) in estimates.items()},
    }


def find_largest_patch(dataset: str, strategy: str, budget: float) -> dict[str, Any]:
    """Grow the patch of a plan while a step of two stays within the budget."""
    data, plan = DATASETS[dataset], plan_preset(BUDGET_PRESET, dataset)
    found: dict[str, Any] = {}
    for patch in grow(plan["patch_size"], GROWTH[dataset], data["shape"][::-1]):
        network = build_network(plan, data["classes"], strategy)
        estimate = estimate_network(network, [2, 1, *patch])
        replayed = estimate.details.peak.reserved_at_most or 0
        if replayed + CUDA_CONTEXT_BYTES > budget:
            break
        found = {"input_shape": [2, 1, *patch], **describe_peaks(estimate)}
    return found


def grow(patch: Sequence[int], steps: Sequence[int], case: Sequence[int]) -> Iterator[list[int]]:
    """Yield patches of which each is longer along the axis that covers least of the case.

    >>> list(grow([4, 4], [2, 4], [6, 9]))
    [[4, 4], [4, 8], [6, 8], [6, 12]]
    """
    sizes = list(map(int, patch))
    yield list(sizes)
    while any(size < n for size, n in zip(sizes, case, strict=True)):
        axis = min(range(len(sizes)), key=lambda n: sizes[n] / case[n])
        sizes[axis] += steps[axis]
        yield list(sizes)


def main() -> None:
    parser = make_parser("scripts.bench.nnunet_presets", __doc__, output="predicted-nnunet.json")
    options = parser.parse_args()
    documented, pairs = read_documented(), list(product(PRESETS, DATASETS))
    budget = documented[BUDGET_PRESET] * 1e9
    report = {
        "command": "python -m scripts.bench.nnunet_presets",
        "datasets": DATASETS,
        "rows": {
            f"{p}, {dataset}": estimate_row(p, dataset, documented[p]) for p, dataset in pairs
        },
        "budget_bytes": budget,
        "largest_patches": {
            name: {s: find_largest_patch(name, s, budget) for s in ("lean", "leanest")}
            for name in DATASETS
        },
    }
    write_results(options.output, report)


if __name__ == "__main__":
    main()
