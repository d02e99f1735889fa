"""What a checkpoint says of its network, looked at before anything is made of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.build.objects import first_line
from unet3d.data.preparation import Preparation
from unet3d.data.statistics import TrainingStatistics
from unet3d.machine.device import PRECISIONS
from unet3d.types import Misuse


def card_of(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card; Misuse if it lacks something or contradicts itself."""
    card = content.get("unet3d")
    if not isinstance(card, Mapping):
        raise Misuse(f"{path} is not a checkpoint of unet3d: it says nothing of its network")
    for name, good in (("config", is_config), ("classes", are_names), ("channels", are_names)):
        if not good(card.get(name)):
            raise bad(path, name, card.get(name))
    data = card["config"]["data"]
    for key, name in (("num_classes", "classes"), ("in_channels", "channels")):
        if data[key] != len(card[name]):
            raise bad(path, f"{name} for data.{key}={data[key]}", card[name])
    regions, said = card.get("regions"), data.get("regions")
    if not is_map(regions, or_none=True) or set(regions or ()) != set(said or ()):
        raise bad(path, f"regions for data.regions={said}", regions)
    largest = card.get("largest_component") or []
    if not isinstance(largest, list) or not set(map(str, largest)) <= set(card["classes"]):
        raise bad(path, "largest_component", largest)
    try:
        preparation = Preparation.of(card["preparation"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Misuse(f"{path}: its preparation cannot be used: {first_line(error)}") from error
    numbers = preparation.intensities
    if preparation.num_classes != len(card["classes"]) or (
        "ct" in preparation.normalize and (not numbers or len(numbers) != len(card["channels"]))
    ):
        raise bad(path, "preparation for its classes and channels", card["preparation"])
    if card.get("training") is not None:  # a checkpoint of an earlier version has none
        try:
            TrainingStatistics.of(card["training"], len(card["channels"]))
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise bad(path, f"training ({first_line(error)})", card["training"]) from error
    return card


def is_config(config: Any) -> bool:
    """Whether it has what a prediction reads."""
    if not is_map(config) or str(config.get("precision")) not in PRECISIONS:
        return False
    parts = [config.get(key) for key in ("model", "pool", "data")]
    if not all(map(is_map, parts)) or not is_map(parts[2].get("regions"), or_none=True):
        return False
    patch = parts[2].get("patch_size")
    sizes = [parts[2].get("num_classes"), parts[2].get("in_channels")]
    sizes += patch if isinstance(patch, list) and len(patch) == 3 else [None]
    return all(type(size) is int and size > 0 for size in sizes)


def is_map(value: Any, *, or_none: bool = False) -> bool:
    """Whether it has keys."""
    return isinstance(value, Mapping) or (or_none and value is None)


def are_names(value: Any) -> bool:
    """Whether they are words, each for itself."""
    good = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return good and 0 < len(value) == len(set(value))


def bad(path: Path, what: str, got: Any) -> Misuse:
    """In one line, however long the value is."""
    return Misuse(f"{path} is not a checkpoint as unet3d writes them: {what}: {str(got)[:200]}")
