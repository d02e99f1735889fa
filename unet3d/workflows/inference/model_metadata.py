"""What a checkpoint says of its network, looked at before anything is made of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.config.instantiate import summarize_error
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import TrainingStatistics
from unet3d.errors import UsageError
from unet3d.machine.device import PRECISIONS


def validate_metadata(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card; Misuse if it lacks something or contradicts itself."""
    card = content.get("unet3d")
    if not isinstance(card, Mapping):
        raise UsageError(f"{path} is not a checkpoint of unet3d: it says nothing of its network")
    for name, good in (
        ("config", is_valid_config),
        ("classes", are_unique_names),
        ("channels", are_unique_names),
    ):
        if not good(card.get(name)):
            raise invalid_metadata_error(path, name, card.get(name))
    data = card["config"]["data"]
    for key, name in (("num_classes", "classes"), ("in_channels", "channels")):
        if data[key] != len(card[name]):
            raise invalid_metadata_error(path, f"{name} for data.{key}={data[key]}", card[name])
    regions, said = card.get("regions"), data.get("regions")
    if not is_mapping(regions, or_none=True) or set(regions or ()) != set(said or ()):
        raise invalid_metadata_error(path, f"regions for data.regions={said}", regions)
    largest = card.get("largest_component") or []
    if not isinstance(largest, list) or not set(map(str, largest)) <= set(card["classes"]):
        raise invalid_metadata_error(path, "largest_component", largest)
    try:
        preparation = Preprocessing.from_dict(card["preparation"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: its preparation cannot be used: {summarize_error(error)}"
        ) from error
    numbers = preparation.intensities
    if preparation.num_classes != len(card["classes"]) or (
        "ct" in preparation.normalize and (not numbers or len(numbers) != len(card["channels"]))
    ):
        raise invalid_metadata_error(
            path, "preparation for its classes and channels", card["preparation"]
        )
    if card.get("training") is not None:  # a checkpoint of an earlier version has none
        try:
            TrainingStatistics.from_dict(card["training"], len(card["channels"]))
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise invalid_metadata_error(
                path, f"training ({summarize_error(error)})", card["training"]
            ) from error
    return card


def is_valid_config(config: Any) -> bool:
    """Whether it has what a prediction reads."""
    if not is_mapping(config) or str(config.get("precision")) not in PRECISIONS:
        return False
    parts = [config.get(key) for key in ("model", "pool", "data")]
    if not all(map(is_mapping, parts)) or not is_mapping(parts[2].get("regions"), or_none=True):
        return False
    patch = parts[2].get("patch_size")
    sizes = [parts[2].get("num_classes"), parts[2].get("in_channels")]
    sizes += patch if isinstance(patch, list) and len(patch) == 3 else [None]
    return all(type(size) is int and size > 0 for size in sizes)


def is_mapping(value: Any, *, or_none: bool = False) -> bool:
    """Whether it has keys."""
    return isinstance(value, Mapping) or (or_none and value is None)


def are_unique_names(value: Any) -> bool:
    """Whether they are words, each for itself."""
    good = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return good and 0 < len(value) == len(set(value))


def invalid_metadata_error(path: Path, what: str, got: Any) -> UsageError:
    """In one line, however long the value is."""
    return UsageError(f"{path} is not a checkpoint as unet3d writes them: {what}: {str(got)[:200]}")
