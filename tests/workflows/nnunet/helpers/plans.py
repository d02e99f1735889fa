"""A dataset as nnU-Net 2.8 leaves it: raw, and preprocessed with plans and splits."""

import json
from pathlib import Path
from typing import Any

from tests.data.helpers.datasets import write_nnunet

NAME = "Dataset004_Hippocampus"


def make_configuration(**options: Any) -> dict[str, Any]:
    """Return a 3D configuration whose axes differ from each other."""
    network = {
        "n_stages": 3,
        "features_per_stage": [4, 8, 8],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 1]],
        "n_conv_per_stage": [2, 2, 2],
        "n_conv_per_stage_decoder": [2, 2],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    architecture = "dynamic_network_architectures.architectures.unet.PlainConvUNet"
    return {
        "batch_size": 3,
        "patch_size": [8, 16, 12],
        "spacing": [3.0, 1.0, 2.0],
        "normalization_schemes": ["ZScoreNormalization", "CTNormalization"],
        "use_mask_for_norm": [True, False],
        "architecture": {"network_class_name": architecture, "arch_kwargs": network},
        "batch_dice": True,
        **options,
    }


def write_plans(root: Path, *, transpose=(0, 1, 2), change=lambda sizes: None) -> Path:
    """Write the folders of a dataset of five cases; return the path of its plans."""
    raw, preprocessed = root / "nnUNet_raw" / NAME, root / "nnUNet_preprocessed" / NAME
    write_nnunet(raw, 5)
    preprocessed.mkdir(parents=True)
    (preprocessed / "dataset.json").write_bytes((raw / "dataset.json").read_bytes())
    sizes = make_configuration()
    change(sizes)
    plans = {
        "dataset_name": NAME,
        "transpose_forward": list(transpose),
        "configurations": {
            "2d": {},
            "3d_fullres": sizes,
            "3d_lowres": {"inherits_from": "3d_fullres", "spacing": [6.0, 2.0, 4.0]},
            "3d_cascade_fullres": {"inherits_from": "3d_fullres"},
        },
    }
    names = [f"case_{n:02d}" for n in range(5)]
    splits = [{"train": names[:3], "val": names[3:]}, {"train": names[2:], "val": names[:2]}]
    (preprocessed / "splits_final.json").write_text(json.dumps(splits))
    path = preprocessed / "nnUNetPlans.json"
    path.write_text(json.dumps(plans))
    return path
