"""Plan with nnU-Net's own planner for cases of which only sizes and spacings are known.

Axes are in the order of nibabel, as everywhere here; nnU-Net reverses them, as SimpleITK does.
"""

import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch as replaced

import numpy as np
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import (
    ExperimentPlanner,
)
from nnunetv2.experiment_planning.experiment_planners.network_topology import (
    get_pool_and_conv_props,
)
from nnunetv2.experiment_planning.experiment_planners.residual_unets import (
    residual_encoder_unet_planners as residual,
)
from nnunetv2.preprocessing.resampling.default_resampling import compute_new_shape

from unet3d.planning.topology import Levels
from unet3d.types import Triple

NAME = "Dataset001_Synthetic"
PRESETS: dict[str, type[ExperimentPlanner]] = {
    "nnU-Net org": ExperimentPlanner,
    "ResEnc M": residual.nnUNetPlannerResEncM,
    "ResEnc L": residual.nnUNetPlannerResEncL,
    "ResEnc XL": residual.nnUNetPlannerResEncXL,
}
"""nnU-Net's planners, by the names of its table of presets."""


@dataclass(frozen=True, kw_only=True)
class NnUnetPlan:
    """What nnU-Net decides at full resolution."""

    spacing_mm: tuple[float, ...]
    median: tuple[float, ...]  # voxels of the median case at that spacing
    patches: tuple[Triple, ...]  # that were estimated, the largest first
    patch: Triple
    levels: Levels
    batch: int
    configuration: dict  # as in nnUNetPlans.json, in nnU-Net's order of axes


def plan_levels_with_nnunet(
    spacing_mm: Sequence[float], patch: Sequence[int]
) -> tuple[Levels, Triple]:
    """Return nnU-Net's levels, and the patch padded to what they divide by."""
    unlimited = 999_999
    _, windows, kernels, padded, _ = get_pool_and_conv_props(
        spacing_mm[::-1], patch[::-1], 4, unlimited
    )
    levels = Levels(
        # The first window is the image's: 1, 1, 1.
        pool_windows=tuple(triple(w[::-1]) for w in windows[1:]),
        kernels=tuple(triple(k[::-1]) for k in kernels),
    )
    return levels, triple(padded[::-1])


class PatchRecorder:
    """Records the patches that one of nnU-Net's planners tries."""

    estimate: Callable[[Triple], float] | None
    tried: list[Sequence[int]]
    determine_transpose: Callable[[], tuple[list[int], list[int]]]

    def static_estimate_VRAM_usage(self, patch_size, *args):
        self.tried.append(patch_size)
        if self.estimate is None:
            return ExperimentPlanner.static_estimate_VRAM_usage(patch_size, *args)
        _, backward = self.determine_transpose()
        return self.estimate(triple(in_our_order(patch_size, backward)))


@cache
def build_planner(preset: str) -> Any:
    """Return a planner of a dataset without cases: nnU-Net reads one from files only."""
    with TemporaryDirectory() as folder:
        raw, preprocessed = Path(folder, "raw", NAME), Path(folder, "preprocessed", NAME)
        for path, content in (
            (raw / "dataset.json", {"file_ending": ".nii.gz", "dataset": {}}),
            (preprocessed / "dataset_fingerprint.json", {}),
        ):
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(content))
        paths = {"nnUNet_raw": str(raw.parent), "nnUNet_preprocessed": str(preprocessed.parent)}
        with replaced.dict(os.environ, paths):
            return type("Planner", (PatchRecorder, PRESETS[preset]), {})(NAME)


def plan_with_nnunet(
    spacings: Sequence[Sequence[float]],
    shapes: Sequence[Sequence[int]],
    *,
    channels: int = 1,
    classes: int = 2,
    preset: str = "nnU-Net org",
    estimate: Callable[[Triple], float] | None = None,
) -> NnUnetPlan:
    """Plan for cropped cases with these spacings and shapes.

    `estimate` replaces nnU-Net's own estimate of a patch, which builds the network: for the 8 GB of
    "nnU-Net org" it has to be at most 560e6 (with a batch of two).
    """
    planner = copy(build_planner(preset))
    planner.estimate = estimate
    planner.tried = []
    planner.dataset_json = {
        "channel_names": {str(n): "MRI" for n in range(channels)},
        "labels": {"background": 0, **{f"class_{n}": n for n in range(1, classes)}},
        "numTraining": len(shapes),
    }
    planner.dataset_fingerprint = {
        "spacings": [s[::-1] for s in spacings],
        "shapes_after_crop": [n[::-1] for n in shapes],
        "median_relative_size_after_cropping": 1.0,
    }
    forward, backward = planner.determine_transpose()
    spacing = planner.determine_fullres_target_spacing()
    resampled = [
        compute_new_shape(tuple(n[::-1]), tuple(s[::-1]), spacing)
        for n, s in zip(shapes, spacings, strict=True)
    ]
    median = np.median(resampled, axis=0)
    plans = planner.get_plans_for_configuration(
        spacing[forward],
        median[forward],
        planner.generate_data_identifier("3d_fullres"),
        float(np.prod(median) * len(shapes)),
        {},
    )
    network = plans["architecture"]["arch_kwargs"]
    windows, kernels = (
        tuple(triple(in_our_order(size, backward)) for size in network[key])
        for key in ("strides", "kernel_sizes")
    )
    return NnUnetPlan(
        spacing_mm=tuple(map(float, spacing[::-1])),
        median=tuple(map(float, median[::-1])),
        patches=tuple(triple(in_our_order(p, backward)) for p in planner.tried),
        patch=triple(in_our_order(plans["patch_size"], backward)),
        levels=Levels(pool_windows=windows[1:], kernels=kernels),
        batch=plans["batch_size"],
        configuration=plans,
    )


def in_our_order(numbers: Sequence[float], backward: Sequence[int]) -> Sequence[float]:
    """Undo nnU-Net's transposition, and reverse the order of axes."""
    return [numbers[axis] for axis in backward][::-1]


def triple(numbers: Sequence[float]) -> Triple:
    """Return three Python ints."""
    d, h, w = (int(n) for n in numbers)
    return d, h, w
