"""Write a folder that nnUNetv2_predict reads, and run the network in it with nnU-Net's modules.

Keys of the files were read in nnunetv2 2.8.1.
"""

import json
from pathlib import Path
from pydoc import locate
from typing import Any, cast

import torch

from unet3d.data.config import NORMALIZATIONS
from unet3d.data.dataset import get_region_labels
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.files import read_json
from unet3d.inference.ensemble import TrainedNetwork
from unet3d.inference.heads import Network
from unet3d.model.foreign_weights import describe_architecture, permute_axes, to_nnunet_weights
from unet3d.text import join_first

CONFIGURATION = "3d_fullres"
CHECKPOINT = Path("fold_0") / "checkpoint_final.pth"


def write_model_folder(trained: TrainedNetwork, path: Path) -> str:
    """Write plans, dataset and checkpoint as nnU-Net's trainer leaves them; say what it is."""
    metadata = trained.metadata
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    plans, network = make_plans(trained, preprocessing), cast(Any, trained.network)
    (path / CHECKPOINT).parent.mkdir(parents=True)
    (path / "plans.json").write_text(json.dumps(plans, indent=1), "utf-8")
    (path / "dataset.json").write_text(json.dumps(make_dataset(trained), indent=1), "utf-8")
    flipped = metadata.get("mirroring_axes") or ()
    content = {
        "network_weights": to_nnunet_weights(network),
        "trainer_name": "nnUNetTrainer",
        "init_args": {"plans": plans, "configuration": CONFIGURATION, "fold": 0},
        # prediction may flip the axes that training flipped, in nnU-Net's order
        "inference_allowed_mirroring_axes": tuple(sorted(2 - axis for axis in flipped)) or None,
        "optimizer_state": None,
        "grad_scaler_state": None,
        "logging": {},
        "current_epoch": 0,
        "_best_ema": None,
    }
    with (path / CHECKPOINT).open("wb") as file:
        torch.save(content, file)
    stored = "in any orientation"
    if preprocessing.orientation != "RAS":
        stored = f"stored in {preprocessing.orientation} orientation (others are not checked)"
    files = f".nii.gz files (`file_ending` in dataset.json) {stored}"
    if preprocessing.label_values is not None:
        files += "; its predictions number the classes 0, 1, 2, ..."
    if kept := metadata.get("keep_largest_component"):
        files += f"; it keeps all components of {join_first(kept)}, `unet3d predict` the largest"
    if "zscore_nonzero" in trained.normalizations:
        files += (
            "; zscore_nonzero is that of voxels where any channel is not 0, with holes filled, so "
            "labels differ where a channel has zeros within them"
        )
    return f"nnU-Net 2.8 model folder for {files}"


def make_plans(trained: TrainedNetwork, preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the plans; axes are in reverse order, as SimpleITK reads them."""
    architecture = describe_architecture(trained.network)
    spacing = get_spacing(trained, preprocessing)[::-1]
    size, methods = list(trained.patch_size[::-1]), trained.normalizations
    if preprocessing.crop != "nonzero" or any(value != 0 for value in preprocessing.background):
        raise UsageError(
            "nnU-Net crops volumes to voxels other than 0: train with data.crop=nonzero and "
            "data.background=0"
        )
    resampling: dict[str, Any] = {}
    for name, is_seg, order in (("data", False, 3), ("seg", True, 1), ("probabilities", False, 1)):
        options = {"is_seg": is_seg, "order": order, "order_z": 0, "force_separate_z": None}
        if name == "probabilities":  # linear along thick slices, too, as predict resamples logits
            options["force_separate_z"] = False
        resampling[f"resampling_fn_{name}"] = "resample_data_or_seg_to_shape"
        resampling[f"resampling_fn_{name}_kwargs"] = options
    keys = ("mean", "std", "percentile_00_5", "percentile_99_5")
    known = preprocessing.intensities or [(0.0, 1.0, 0.0, 0.0)] * len(methods)  # only CT reads them
    intensities = {str(n): dict(zip(keys, values, strict=True)) for n, values in enumerate(known)}
    configuration = {
        "data_identifier": f"nnUNetPlans_{CONFIGURATION}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": int(trained.metadata["config"]["data"]["batch_size"]),
        "patch_size": size,
        "median_image_size_in_voxels": size,
        "spacing": spacing,
        "normalization_schemes": [NORMALIZATIONS[method][0] for method in methods],
        "use_mask_for_norm": [NORMALIZATIONS[method][1] for method in methods],
        **resampling,
        "architecture": architecture,
        "batch_dice": True,
    }
    reorients = preprocessing.orientation == "RAS"
    return {
        "dataset_name": "Dataset000_unet3d",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": spacing,
        "original_median_shape_after_transp": size,
        "image_reader_writer": "NibabelIOWithReorient" if reorients else "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {CONFIGURATION: configuration},
        "experiment_planner_used": "unet3d",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": intensities,
    }


def get_spacing(trained: TrainedNetwork, preprocessing: Preprocessing) -> list[float]:
    """Return the spacing that volumes are resampled to; nnU-Net cannot leave them as they are."""
    statistics = trained.metadata.get("training_statistics") or {"spacing_mm": [[0], [1]]}
    smallest, largest = statistics["spacing_mm"][0], statistics["spacing_mm"][-1]
    if preprocessing.spacing_mm is None and list(smallest) != list(largest):
        raise UsageError(
            "nnU-Net resamples all volumes to one spacing: train with data.spacing_mm=median"
        )
    return list(preprocessing.spacing_mm or smallest)


def make_dataset(trained: TrainedNetwork) -> dict[str, Any]:
    """Return the content of dataset.json."""
    metadata, regions = trained.metadata, trained.metadata.get("regions")
    labels: dict[str, Any] = {name: n for n, name in enumerate(metadata["classes"][1:], 1)}
    order = {}
    if regions is not None:
        labels = {name: list(part) for name, part in regions.items()}
        order["regions_class_order"] = get_region_labels(regions, metadata.get("region_labels"))
    return {
        "channel_names": {str(n): name for n, name in enumerate(trained.channels)},
        "labels": {"background": 0, **labels},
        **order,
        "numTraining": (metadata.get("training_statistics") or {}).get("cases", 0),
        "file_ending": ".nii.gz",
    }


def load_model_folder(path: Path) -> Network:
    """Build the network of a model folder of nnU-Net's modules, and run it on the CPU."""
    plans, dataset = read_json(path / "plans.json"), read_json(path / "dataset.json")
    architecture = plans["configurations"][CONFIGURATION]["architecture"]
    options = dict(architecture["arch_kwargs"])
    for key in architecture["_kw_requires_import"]:
        options[key] = options[key] and locate(options[key])
    kind: Any = locate(architecture["network_class_name"])
    has_regions = "regions_class_order" in dataset
    network = kind(
        input_channels=len(dataset["channel_names"]),
        num_classes=len(dataset["labels"]) - has_regions,
        deep_supervision=False,
        **options,
    )
    content = torch.load(path / CHECKPOINT, weights_only=True)
    network.load_state_dict(content["network_weights"])
    network.eval()
    return torch.inference_mode()(lambda batch: permute_axes(network(permute_axes(batch))))
