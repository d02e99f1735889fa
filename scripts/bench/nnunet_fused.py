"""Estimate nnU-Net's presets with fused blocks, and the largest patch that then fits.

    pip install '.[peers]'
    python -m scripts.bench.nnunet_fused      # no GPU; benchmarks/predicted-nnunet-fused.json

Networks, loss and optimizer are those of scripts.bench.nnunet_presets, as nnUNetTrainerLean trains
them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.nnunet_planner import PRESETS
from scripts.bench.nnunet_presets import (
    DATASETS,
    ROOT,
    build_network,
    estimate_step,
    plan_preset,
    read_documented,
)
from unet3d.report.run_report import collect_versions
from unet3d.units import CUDA_CONTEXT_BYTES
from unet3d.workflows.nnunet.fused_network import use_fused_blocks

STRATEGIES = ("plain modules", "fused", "lean")

STEPS = {"like AMOS": (8, 32, 32), "like KiTS": (32, 32, 32)}
"""By how much a patch grows per axis, in nnU-Net's order; the network's strides divide it."""

BUDGET_PRESET = "ResEnc L"
"""The preset whose documented memory is the budget of larger patches; they have its network."""


def estimate_rows(plan: dict[str, Any], shape: Sequence[int], classes: int) -> dict[str, Any]:
    """Return the memory of a step with each strategy."""
    rows = {}
    for strategy in STRATEGIES:
        network = build_network(plan, classes)
        if strategy != "plain modules":
            use_fused_blocks(network, strategy)
        estimate = estimate_step(network, shape)
        rows[strategy] = {
            "peak_allocated_bytes": estimate.peak,
            "peak_reserved_bytes": estimate.reserved,
        }
    return {"input_shape": list(shape), "strategies": rows}


def find_largest_patch(dataset: str, strategy: str, budget: float) -> dict[str, Any]:
    """Grow the patch of a plan while a step of two stays within the budget."""
    data, plan = DATASETS[dataset], plan_preset(BUDGET_PRESET, dataset)
    case = [*reversed(data["shape"])]
    found: dict[str, Any] = {}
    for patch in grow(plan["patch_size"], STEPS[dataset], case):
        network = build_network(plan, data["classes"])
        use_fused_blocks(network, strategy)
        estimate = estimate_step(network, [2, 1, *patch])
        print(dataset, strategy, patch, f"{estimate.reserved / 2**30:.2f} GiB", flush=True)
        if estimate.reserved + CUDA_CONTEXT_BYTES > budget:
            break
        found = {
            "input_shape": [2, 1, *patch],
            "peak_allocated_bytes": estimate.peak,
            "peak_reserved_bytes": estimate.reserved,
        }
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.nnunet_fused",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    output = ROOT / "benchmarks" / "predicted-nnunet-fused.json"
    parser.add_argument("--output", type=Path, default=output)
    path: Path = parser.parse_args(argv).output
    documented = read_documented()
    rows = {}
    for preset in PRESETS:
        for dataset, data in DATASETS.items():
            plan = plan_preset(preset, dataset)
            shape = [plan["batch_size"], 1, *map(int, plan["patch_size"])]
            rows[f"{preset}, {dataset}"] = estimate_rows(plan, shape, data["classes"])
            print(preset, dataset, flush=True)
    budget = documented[BUDGET_PRESET] * 1e9
    report = {
        "command": "python -m scripts.bench.nnunet_fused",
        "versions": collect_versions(),
        "datasets": DATASETS,
        "rows": rows,
        "budget_bytes": budget,
        "largest_patches": {
            name: {s: find_largest_patch(name, s, budget) for s in ("lean", "leanest")}
            for name in DATASETS
        },
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
