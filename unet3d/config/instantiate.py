"""Single objects from their part of a config: the only readers of configs are here and beside."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from unet3d.config.allowed_targets import check_targets, get_target
from unet3d.config.compose import ComposedConfig
from unet3d.data.case import Case, Description, Source
from unet3d.data.layouts.groups import read_groups
from unet3d.data.preprocessing.background import Background, auto_background
from unet3d.data.preprocessing.fingerprint import (
    fingerprint_dataset,
    foreground_intensities,
    median_spacing,
)
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.machine.device import Precision

HALF_EPSILON = 1e-4
"""The least epsilon of an optimizer in pure fp16, where Adam's 1e-8 would be 0."""


def instantiate(node: DictConfig, **objects: Any) -> Any:
    """Call a node's `_target_` with its values and `objects`: here alone configs become code."""
    check_targets(node)
    where = str(node._get_full_key(None)) or node.get("_target_")
    factory = f"{where} (_target_: {node._target_})"
    partial = node.get("_partial_", False)
    try:
        made = hydra.utils.instantiate(node, _partial_=True, _convert_="all")
        return made if partial and not objects else made(**objects)
    except InstantiationException as error:
        raise UsageError(f"{factory}: {summarize_error(error.__cause__ or error)}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{factory}: {summarize_error(error)}") from error


def build_source(cfg: DictConfig) -> Source:
    """The data set's folder in its layout."""
    if OmegaConf.is_missing(cfg.data, "root"):
        raise UsageError("data.root must be given: the data set's folder")
    return instantiate(cfg.data.source)


def summarize_error(error: BaseException) -> str:
    """What an error says, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fill_from_dataset(cfg: DictConfig) -> None:
    """Ask the data set for the channels and classes that the config leaves to it.

    Whoever builds a network from a config calls this first. A config that says both is left alone,
    so that its data set need not be there.
    """
    if cfg.data.num_classes is None or cfg.data.in_channels is None:
        resolve_dataset_facts(cfg, build_source(cfg).describe())


def resolve_dataset_facts(
    cfg: DictConfig, said: Description
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fill in what the config leaves to the data set; name classes and channels."""
    if cfg.data.num_classes is None:
        cfg.data.num_classes = len(said.classes)
    if cfg.data.in_channels is None:
        cfg.data.in_channels = len(said.channels)
    if cfg.data.ignore_label is None:
        cfg.data.ignore_label = said.ignore_label
    if cfg.data.regions is None and said.regions is not None:
        cfg.data.regions = {name: list(labels) for name, labels in said.regions.items()}
    for key, least in (("num_classes", 2), ("in_channels", 1)):
        if not isinstance(cfg.data[key], int) or cfg.data[key] < least:
            raise UsageError(f"data.{key} must be an int >= {least}, got {cfg.data[key]}")
    if cfg.data.in_channels != len(said.channels):
        raise UsageError(
            f"data.in_channels={cfg.data.in_channels}, but the data set has {len(said.channels)}: "
            f"{', '.join(said.channels)}"
        )
    if len(set(said.classes)) < len(said.classes):
        raise UsageError(f"classes must have names of their own, got {', '.join(said.classes)}")
    unnamed = (f"class_{n}" for n in range(len(said.classes), cfg.data.num_classes))
    parse_regions(cfg)
    return (*said.classes, *unnamed)[: cfg.data.num_classes], tuple(said.channels)


def parse_regions(cfg: DictConfig) -> dict[str, tuple[int, ...]] | None:
    """The overlapping classes, each with its labels, as data.regions has them."""
    if cfg.data.regions is None:
        return None
    known = range(1, cfg.data.num_classes)
    if not isinstance(cfg.data.regions, DictConfig) or not cfg.data.regions:
        raise UsageError(
            "data.regions must be names with their labels, as in {whole: [1, 2], core: [2]}, "
            f"got {cfg.data.regions}"
        )
    found: dict[str, tuple[int, ...]] = {}
    for name, labels in cfg.data.regions.items():
        labels = [labels] if isinstance(labels, int) else list(labels)
        if not labels or any(label not in known for label in labels):
            raise UsageError(
                f"data.regions.{name} must be labels of 1..{cfg.data.num_classes - 1}, got {labels}"
            )
        found[str(name)] = tuple(labels)
    return found


def get_region_labels(regions: Mapping[str, Sequence[int]]) -> list[int]:
    """The label that a voxel of each region gets: the one of its labels that no later region has.

    >>> get_region_labels({"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]})
    [1, 2, 3]
    """
    labels, parts = [], list(regions.values())
    for number, (name, part) in enumerate(regions.items()):
        own = set(part).difference(*parts[number + 1 :])
        if len(own) != 1:
            raise UsageError(
                f"data.regions.{name} must have one label that no later region has (the outermost "
                f"comes first), it has {len(own)}: {sorted(own)}"
            )
        labels += own
    return labels


def build_preprocessing(
    cfg: DictConfig, cases: Sequence[Case], channels: Sequence[str]
) -> Preprocessing:
    """How volumes are made ready; what is the data set's own is looked up in all of its cases."""
    data = cfg.data
    spacing = data.spacing_mm
    if spacing == "median":
        spacing = median_spacing(cases, data.orientation)
    asked = [data.normalize] if isinstance(data.normalize, str) else list(data.normalize)
    if len(asked) not in (1, len(channels)):
        raise UsageError(
            f"data.normalize must be one word or one for each of the {len(channels)} channels, "
            f"got {asked}"
        )
    background = parse_background(cfg)
    if asked == ["auto"]:
        usual = "zscore" if set(background) == {0} else "zscore_nonzero"
        asked = ["ct" if name.upper() == "CT" else usual for name in channels]
    elif len(asked) == 1:
        asked *= len(channels)
    prints = None
    if "ct" in asked:
        by_name = auto_background(channels)  # as a plan has read it
        prints = fingerprint_dataset(cases, data.orientation, Path(data.cache), by_name)
    return Preprocessing(
        num_classes=data.num_classes,
        orientation=data.orientation,
        spacing_mm=None if spacing is None else parse_spacing(spacing),
        background=background,
        crop=data.crop,
        normalize=tuple(asked),
        intensities=None if prints is None else foreground_intensities(prints),
        ignore_label=data.ignore_label,
    )


def parse_background(cfg: DictConfig) -> Background:
    """What data.background says: one value for all channels or a list with one for each."""
    asked = cfg.data.background
    return (asked,) if isinstance(asked, int | float | str) else tuple(asked or ())


def parse_spacing(spacing: Any) -> tuple[float, float, float]:
    """A spacing that a config gives as numbers."""
    good = isinstance(spacing, Sequence) and not isinstance(spacing, str) and len(spacing) == 3
    if not good or not all(isinstance(s, int | float) and s > 0 for s in spacing):
        raise UsageError(
            f"data.spacing_mm must be three numbers above 0, median or null, got {spacing}"
        )
    d, h, w = (float(s) for s in spacing)
    return d, h, w


def expand_paths(asked: Any) -> list[Path]:
    """A path or a pattern, several with commas between them, or a list."""
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        words = [str(word) for word in asked]
    elif Path(str(asked)).exists():
        return [Path(str(asked))]
    else:
        text = str(asked).strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        words = [word.strip().strip("'\"") for word in text.split(",")]
    return [path for word in words for path in _matching(word)]


def _matching(word: str) -> list[Path]:
    path = Path(word)
    if path.exists() or not set(word) & set("*?["):
        return [path]
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise UsageError(f"there is nothing that {word} matches")
    return found


def parse_fold(cfg: DictConfig) -> int | None:
    """The number of a fold, or None for `none`."""
    if cfg.fold in (None, "none"):
        return None
    if type(cfg.fold) is not int:
        raise UsageError(f"fold must be 0..4 or none, got {cfg.fold!r}")
    return cfg.fold


def read_case_groups(cfg: DictConfig, cases: Sequence[Case]) -> dict[str, str] | None:
    """The group of every case, as data.group_by has them."""
    if cfg.data.group_by is None:
        return None
    return read_groups(cfg.data.group_by, [case.name for case in cases])


def parse_seed(cfg: DictConfig) -> int:
    """The seed, which must be an int that numpy and torch both take."""
    if type(cfg.seed) is not int or not 0 <= cfg.seed < 2**32:
        raise UsageError(f"seed must be an int in 0..2^32 - 1, got {cfg.seed!r}")
    return cfg.seed


def build_network(request: ComposedConfig) -> nn.Module:
    """The network with its pooling; a choice that it would ignore is refused."""
    cfg = request.config
    fill_from_dataset(cfg)
    if request.is_overridden("model.channels") and any(
        request.is_overridden(f"model.{key}") for key in ("depth", "width", "max_width")
    ):
        raise UsageError(
            "model.channels says the channels exactly: leave out model.depth and model.width"
        )
    cfg = with_output_channels(cfg)
    model = cfg.model.copy()
    with open_dict(model):
        model.pop("prior_bias", None)  # of the beginning of a training: build/prior.py
    parameters = inspect.signature(get_target(cfg.model)).parameters
    if "pool" in parameters:
        return instantiate(model, pool=instantiate(cfg.pool))
    if request.is_overridden("pool") or request.choices.get("pool", "max") != "max":
        raise UsageError(
            f"model={request.choices.get('model')} has its own pooling: "
            f"leave out pool={request.choices.get('pool')}"
        )
    return instantiate(model)


def with_output_channels(cfg: DictConfig) -> DictConfig:
    """The config as the network sees it: regions have an output each, the background has none."""
    regions = parse_regions(cfg)
    if regions is not None:
        cfg = cfg.copy()
        cfg.data.num_classes = len(regions)
    return cfg


def build_network_from_metadata(
    card: Mapping[str, Any], allow_targets: Sequence[str] = ()
) -> nn.Module:
    """The network that a checkpoint's card describes, without its weights.

    What code it may name, the card itself has no say in.
    """
    config = OmegaConf.create({**card["config"], "allow_targets": list(allow_targets)})
    assert isinstance(config, DictConfig)
    return build_network(ComposedConfig(config, choices={}))


def make_optimizer_factory(cfg: DictConfig, used: Precision) -> Any:
    """Parameters -> optimizer, with an epsilon that the weights' precision can hold.

    Fused where it can be: one kernel, which makes no second copy of the parameters.
    """
    if "fused" in cfg.optimizer and cfg.optimizer.fused is None:
        # With a scaler Lightning does not clip for an optimizer that may unscale by itself.
        clipped = used.used == "16" and cfg.trainer.gradient_clip_val is not None
        cfg.optimizer.fused = None if clipped else True
    epsilon = cfg.optimizer.get("eps")
    if used.used == "16-true" and epsilon is not None:
        cfg.optimizer.eps = max(epsilon, HALF_EPSILON)

    def factory(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return instantiate(cfg.optimizer, params=list(parameters))

    factory([nn.Parameter(torch.zeros(1))])  # bad values are found before the data is read
    return factory


def to_plain_dict(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain values."""
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def count_parameters(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
