"""Turn nnU-Net's plans into overrides: experiment=.../nnUNetPlans.json.

Keys and values were read in nnunetv2 2.8.1. Its plans hold data and network; what its trainer adds
(steps, optimizer, augmentation) is set as nnUNetTrainer has it.
"""

import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unet3d.data.augmentation.transforms import get_thin_axes
from unet3d.data.config import NORMALIZATIONS
from unet3d.data.formats.volumes import read_header
from unet3d.data.layouts.dataset_json import load_json_object
from unet3d.data.layouts.nnunet import NnUnet
from unet3d.errors import UsageError
from unet3d.model.foreign_weights import get_nnunet_axes

NETWORKS = {"PlainConvUNet": "unet_nnunet", "ResidualEncoderUNet": "unet_resenc"}
NORMS = {"InstanceNorm3d": "instance", "BatchNorm3d": "batch"}
ACTIVATIONS = {"LeakyReLU": "leaky_relu", "ReLU": "relu"}
METHODS = {scheme: method for method, scheme in NORMALIZATIONS.items()}
"""Our normalization, by nnU-Net's."""

STEPS_PER_EPOCH, EPOCHS = 250, 1000
STEPS_PER_VALIDATION = 5000
"""nnU-Net validates patches after each epoch, we whole volumes."""

RECIPE = ("augmentation=nnunet", "optimizer=sgd", "scheduler=poly", "scheduler.warmup=0")
"""How nnU-Net's trainer trains."""

TRAINER = (
    *RECIPE,
    "evaluation.tta=true",
    "precision=16",
    f"trainer.max_steps={STEPS_PER_EPOCH * EPOCHS}",
)

READERS = {"SimpleITKIO": None, "NibabelIO": None, "NibabelIOWithReorient": "RAS"}
"""The orientation that nnU-Net's readers give volumes; None: that of the file."""

PREPROCESSOR, RESAMPLING = "DefaultPreprocessor", "resample_data_or_seg_to_shape"
NO_RESAMPLING = "no_resampling_hack"
ORDERS = {"data": 3, "seg": 1, "probabilities": 1}
"""Of the interpolation; along thick slices it is 0."""

SUPPORTED = {
    "conv_bias": True,
    "norm_op_kwargs": {"eps": 1e-05, "affine": True},
    "dropout_op": None,
    "squeeze_excitation": False,
    "nonlin_first": False,
    "stem_channels": None,
    "bottleneck_channels": None,
    "stochastic_depth_p": 0.0,
    "block": "dynamic_network_architectures.building_blocks.residual.BasicBlockD",
}
"""Values of a network's arguments; others would be another network."""


def expand_plans(args: Sequence[str], log: Callable[[str], None]) -> list[str]:
    """Replace experiment=FILE.json[:CONFIGURATION] by what the file says.

    The other arguments come after it, so that they win. `log` gets what the file stands for.
    """
    pattern = r"experiment=['\"]?(.+\.json)(?::(\w+))?['\"]?"
    experiments = [arg for arg in args if arg.lstrip("+").startswith("experiment=")]
    found = re.fullmatch(pattern, experiments[0])
    if not found or len(experiments) > 1 or "," in found[1]:
        raise UsageError(
            "plans of nnU-Net are used as experiment=PATH/nnUNetPlans.json, one file and no other "
            f"experiment, got {' '.join(experiments)}"
        )
    roots = [arg.partition("=")[2].strip("'\"") for arg in args if arg.startswith("data.root=")]
    root = Path(roots[-1]).expanduser() if roots else None
    overrides = read_plans(Path(found[1]).expanduser(), found[2] or "3d_fullres", root)
    log(f"{found[1]} sets these options:")
    lines = textwrap.wrap(" ".join(overrides), 98, break_long_words=False, break_on_hyphens=False)
    log(textwrap.indent("\n".join(lines), "  "))
    return [*overrides, *(arg for arg in args if arg not in experiments)]


def read_plans(path: Path, configuration: str, root: Path | None) -> list[str]:
    """Return the overrides of a configuration of nnUNetPlans.json.

    `root` is the raw dataset; None: in nnUNet_raw, or beside the preprocessed ones. One of another
    name is another dataset, with its own regions, number of cases and folds.
    """
    plans = load_json_object(path, f"no file {path.absolute()}")
    sizes = _get_configuration(plans, configuration, path)
    homes = [os.environ.get("nnUNet_raw"), path.absolute().parents[2] / "nnUNet_raw"]  # noqa: SIM112
    try:
        axes = get_nnunet_axes(plans)
        names = [] if root is None else [root.absolute().name, root.resolve().name]
        is_other = bool(names) and plans["dataset_name"] not in names
        folders = [Path(home, plans["dataset_name"]) for home in homes if home]
        root = root or next((raw for raw in folders if (raw / "dataset.json").exists()), None)
        schemes = list(zip(sizes["normalization_schemes"], sizes["use_mask_for_norm"], strict=True))
        if unknown := [scheme for scheme in schemes if scheme not in METHODS]:
            raise UsageError(f"nnU-Net's {unknown[0][0]} is not available here")
        overrides = [
            "data=nnunet",
            *_describe_patches(sizes, axes),
            f"data.normalize={_list(METHODS[scheme] for scheme in schemes)}",
            *_describe_network(sizes["architecture"], axes),
            f"loss.batch_dice={str(sizes['batch_dice']).lower()}",
            *TRAINER,
        ]
        if any(sizes["use_mask_for_norm"]):
            overrides.append("augmentation.keep_zeros=true")
        dataset = NnUnet(str(root if is_other else path.parent))
        description = dataset.describe()
        if description.regions and description.ignore_labels:  # then nnU-Net sums over regions
            overrides.append(f"loss.ce={len(description.regions)}")
        if root is not None:
            reader = plans.get("image_reader_writer", "SimpleITKIO")
            if reader not in READERS:
                raise UsageError(
                    f"{path}: nnU-Net's reader {reader} is not available here: train on the raw "
                    "dataset with data=nnunet"
                )
            first = NnUnet(str(root)).list_cases()[0].images[0]
            orientation = READERS[reader] or read_header(first).orientation
            overrides += [f"data.root={root}", f"data.orientation={orientation}"]
        elif description.regions is None:  # enough for an estimate
            overrides += [f"data.in_channels={len(description.channels)}"]
            overrides += [f"data.num_classes={len(description.classes)}"]
        training_cases = max(1, round(0.8 * dataset.content["numTraining"]))
        patches = math.ceil(STEPS_PER_EPOCH * sizes["batch_size"] / training_cases)
        steps_per_epoch = math.ceil(patches * training_cases / sizes["batch_size"])
        epochs = max(1, round(STEPS_PER_VALIDATION / steps_per_epoch))
        overrides += [f"data.patches_per_case={patches}"]
        overrides += [f"trainer.check_val_every_n_epoch={epochs}"]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} does not describe {configuration} as nnU-Net 2.8 does "
            f"({type(error).__name__}: {error}): plan again with nnUNetv2_plan_experiment"
        ) from None
    splits = path.with_name("splits_final.json")
    has_folds = splits.is_file() and not is_other
    return [*overrides, f"data.splits={splits}"] if has_folds else overrides


def _get_configuration(plans: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Return a configuration, complete with those that it inherits from."""
    configurations = plans.get("configurations")
    if not isinstance(configurations, dict):
        raise UsageError(f"{path} has no configurations: it is not a file of plans of nnU-Net 2")
    usable = [key for key in configurations if key.startswith("3d") and "cascade" not in key]
    if name not in usable:
        raise UsageError(
            f"{path}: {name} cannot be trained here, use one of {', '.join(usable) or 'none'}"
        )
    sizes = dict(configurations[name])
    for _ in configurations:
        parent = sizes.pop("inherits_from", None)
        sizes = {**configurations.get(parent, {}), **sizes}
    return sizes


def _describe_patches(sizes: Mapping[str, Any], axes: Sequence[int]) -> list[str]:
    batch = int(sizes["batch_size"])
    in_plane, *_ = get_thin_axes(sizes["patch_size"])  # rotations are by up to 180 degrees then
    return [
        *(["augmentation.rotation_degrees=[180,180,180]"] if in_plane else []),
        f"data.foreground_fraction={compute_foreground_fraction(batch):.4g}",
        f"data.spacing_mm={_describe_spacing(sizes, axes)}",
        f"data.patch_size={_list(int(sizes['patch_size'][axis]) for axis in axes)}",
        f"data.batch_size={batch}",
    ]


def _describe_spacing(sizes: Mapping[str, Any], axes: Sequence[int]) -> str:
    name = sizes.get("preprocessor_name", PREPROCESSOR)
    resampling = {sizes.get(f"resampling_fn_{what}", RESAMPLING) for what in ORDERS}
    if name == PREPROCESSOR and resampling == {NO_RESAMPLING}:
        return "null"
    odd = sorted(resampling - {RESAMPLING})
    for what, order in ORDERS.items():
        options = sizes.get(f"resampling_fn_{what}_kwargs") or {}
        usual = {"order": order, "order_z": 0, "force_separate_z": None}
        odd += [f"{key}={options[key]}" for key, n in usual.items() if options.get(key, n) != n]
    if name != PREPROCESSOR or odd:
        raise UsageError(
            f"nnU-Net's {name} with {' '.join(odd) or RESAMPLING} is not available here: plan with "
            f"{PREPROCESSOR} and {RESAMPLING} or {NO_RESAMPLING}, as ExperimentPlanner does"
        )
    return _list(float(sizes["spacing"][axis]) for axis in axes)


def compute_foreground_fraction(batch_size: int) -> float:
    """Return the fraction of a batch that nnU-Net centers on foreground: a third, its last patches.

    >>> compute_foreground_fraction(2), compute_foreground_fraction(4)
    (0.5, 0.25)
    """
    return (batch_size - round(batch_size * (1 - 0.33))) / batch_size


def _describe_network(architecture: Mapping[str, Any], axes: Sequence[int]) -> list[str]:
    name = architecture["network_class_name"].rpartition(".")[2]
    options = architecture["arch_kwargs"]
    norm = NORMS.get(str(options["norm_op"]).rpartition(".")[2])
    activation = ACTIVATIONS.get(str(options["nonlin"]).rpartition(".")[2])
    odd = [key for key, value in SUPPORTED.items() if options.get(key, value) != value]
    odd += [key for key, value in {"norm_op": norm, "nonlin": activation}.items() if value is None]
    if name not in NETWORKS or odd:
        described = ", ".join(f" with {key}={options[key]}" for key in odd)
        raise UsageError(
            f"nnU-Net's {name}{described} is not available here: use PlainConvUNet or "
            "ResidualEncoderUNet with biases, instance or batch norm, LeakyReLU or ReLU, and no "
            "dropout"
        )
    strides = [[int(stride[axis]) for axis in axes] for stride in options["strides"]]
    kernels = [[int(kernel[axis]) for axis in axes] for kernel in options["kernel_sizes"]]
    decoder = list(options["n_conv_per_stage_decoder"])[::-1]  # nnU-Net: coarsest first
    if name == "ResidualEncoderUNet":
        convs, blocks = [*decoder, 1], list(options["n_blocks_per_stage"])
    else:
        convs, blocks = list(options["n_conv_per_stage"]), None
    if strides[0] != [1, 1, 1] or (blocks is None and convs[:-1] != decoder):
        raise UsageError(
            "networks of nnU-Net with a stride in the first stage, or with another number of "
            "convolutions in the decoder, are not available here"
        )
    return [
        f"model={NETWORKS[name]}",
        "pool=strided",
        f"model.channels={_list(options['features_per_stage'])}",
        f"model.kernel_size={_list(map(_list, kernels))}",
        f"model.pool_kernel={_list(map(_list, strides[1:]))}",
        f"model.convs_per_level={_list(convs)}",
        *([] if blocks is None else [f"model.residual_blocks={_list(blocks)}"]),
        f"model.norm={norm}",
        f"model.activation={activation}",
        *(["model.deep_supervision=false"] if len(options["features_per_stage"]) < 4 else []),
        f"model.negative_slope={(options['nonlin_kwargs'] or {}).get('negative_slope', 0.01)}",
    ]


def _list(values: Any) -> str:
    """Return a list as Hydra reads it.

    >>> _list([1, 2.5, "zscore"])
    '[1,2.5,zscore]'
    """
    return f"[{','.join(map(str, values))}]"
