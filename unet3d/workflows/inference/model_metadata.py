"""Validate what a checkpoint says of its network before anything is built from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import TrainingStatistics
from unet3d.errors import UsageError, summarize_error
from unet3d.inference.regions import get_region_labels
from unet3d.text import are_unique_names
from unet3d.types import PRECISIONS


def validate_metadata(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's metadata; refuse what is incomplete or contradicts itself."""
    metadata = content.get("unet3d")
    if not isinstance(metadata, Mapping):
        raise UsageError(f"{path} is not a checkpoint of unet3d: it does not describe its network")
    validators = (
        ("config", is_valid_config),
        ("classes", is_list_of_names),
        ("channels", is_list_of_names),
    )
    for key, is_valid in validators:
        if not is_valid(metadata.get(key)):
            raise make_invalid_metadata_error(path, key, metadata.get(key))
    data = metadata["config"]["data"]
    for key, names in (("num_classes", "classes"), ("in_channels", "channels")):
        if data[key] != len(metadata[names]):
            description = f"{names} for data.{key}={data[key]}"
            raise make_invalid_metadata_error(path, description, metadata[names])
    regions, configured = metadata.get("regions"), data.get("regions")
    is_allowed = is_mapping(regions, or_none=True) and regions != {}
    if not is_allowed or set(regions or ()) != set(configured or ()):
        raise make_invalid_metadata_error(path, f"regions for data.regions={configured}", regions)
    labels = metadata.get("region_labels")
    if labels is not None and (
        not isinstance(labels, list) or not all(type(label) is int for label in labels)
    ):
        raise make_invalid_metadata_error(path, "region_labels", labels)
    if regions is not None:
        try:
            get_region_labels(regions, labels)
        except (TypeError, UsageError):
            raise make_invalid_metadata_error(path, "regions", regions) from None
    cleaned = metadata.get("keep_largest_component") or []
    if not isinstance(cleaned, list) or not set(map(str, cleaned)) <= set(metadata["classes"]):
        raise make_invalid_metadata_error(path, "keep_largest_component", cleaned)
    axes = metadata.get("mirroring_axes")
    if axes is not None and not is_list_of_axes(axes):
        raise make_invalid_metadata_error(path, "mirroring_axes", axes)
    try:
        preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: invalid preprocessing: {summarize_error(error)}") from error
    intensities = preprocessing.intensities
    channels = len(metadata["channels"])
    has_intensities = isinstance(intensities, list | tuple) and len(intensities) == channels
    if preprocessing.num_classes != len(metadata["classes"]) or (
        "ct" in preprocessing.normalize and not has_intensities
    ):
        description = "preprocessing for its classes and channels"
        raise make_invalid_metadata_error(path, description, metadata["preprocessing"])
    statistics = metadata.get("training_statistics")
    if statistics is not None:
        try:
            TrainingStatistics.from_dict(statistics, len(metadata["channels"]))
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            description = f"training_statistics ({summarize_error(error)})"
            raise make_invalid_metadata_error(path, description, statistics) from error
    return metadata


def is_valid_config(config: Any) -> bool:
    """Return whether a config has what inference reads."""
    if not is_mapping(config) or str(config.get("precision")) not in PRECISIONS:
        return False
    parts = [config.get(key) for key in ("model", "pool", "data")]
    if not all(map(is_mapping, parts)) or not is_mapping(parts[2].get("regions"), or_none=True):
        return False
    patch_size = parts[2].get("patch_size")
    sizes = [parts[2].get("num_classes"), parts[2].get("in_channels")]
    sizes += patch_size if isinstance(patch_size, list) and len(patch_size) == 3 else [None]
    return all(type(size) is int and size > 0 for size in sizes)


def find_mirroring_axes(metadata: Mapping[str, Any]) -> list[int] | None:
    """Return the axes of the network's input that training flipped; None if they are unknown.

    A checkpoint from before they were saved has them in its config.
    """
    axes = metadata.get("mirroring_axes")
    augmentation = metadata["config"].get("augmentation")
    if axes is None and is_mapping(augmentation) and "flip_p" in augmentation:
        axes = augmentation.get("flip_axes") if augmentation["flip_p"] else []
    return axes if is_list_of_axes(axes) else None


def is_list_of_axes(value: Any) -> bool:
    """Return whether a value is a list of the axes 0, 1 and 2."""
    return isinstance(value, list) and all(
        type(axis) is int and axis in (0, 1, 2) for axis in value
    )


def is_mapping(value: Any, *, or_none: bool = False) -> bool:
    """Return whether a value has keys."""
    return isinstance(value, Mapping) or (or_none and value is None)


def is_list_of_names(value: Any) -> bool:
    """Return whether a value is a list of different names."""
    return isinstance(value, list) and are_unique_names(value)


def make_invalid_metadata_error(path: Path, what: str, value: Any) -> UsageError:
    """Say in one line what is wrong, however long the value is."""
    return UsageError(f"{path} has invalid metadata: {what}: {str(value)[:200]}")
