"""From checkpoints to networks that predict together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.config.instantiate import build_network_from_metadata, summarize_error
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import TrainingStatistics
from unet3d.errors import UsageError
from unet3d.lit.resume import extract_weights, load_checkpoint
from unet3d.types import Triple
from unet3d.workflows.inference.model_metadata import validate_metadata


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Networks that take the same channels and give the same classes."""

    networks: tuple[nn.Module, ...]
    channels: tuple[str, ...]
    classes: tuple[str, ...]  # of the labels 0, 1, 2, ...
    regions: dict[str, list[int]] | None  # what the networks give instead, if they overlap
    largest: tuple[str, ...]  # classes of which all members keep the largest piece alone
    preparation: Preprocessing
    patch: Triple
    precision: str  # of the training
    training: tuple[TrainingStatistics, ...] = ()  # of the members that know their training cases


def load_ensemble(paths: Sequence[Path], allow_targets: Sequence[str] = ()) -> Ensemble:
    """The networks of checkpoints; what they must have in common and do not is named."""
    cards: list[Mapping[str, Any]] = []
    networks = []
    for path in paths:
        content = load_checkpoint(path)
        card, weights = validate_metadata(path, content), extract_weights(path, content)
        if cards:
            check_compatible(paths[0], cards[0], path, card)
        cards.append(card)
        networks.append(load_network(path, card, weights, allow_targets))
    card = cards[0]
    d, h, w = card["config"]["data"]["patch_size"]
    chosen = [card.get("largest_component") or () for card in cards]
    return Ensemble(
        networks=tuple(networks),
        channels=tuple(card["channels"]),
        classes=tuple(card["classes"]),
        regions=card.get("regions"),
        largest=tuple(name for name in chosen[0] if all(name in other for other in chosen)),
        preparation=Preprocessing.from_dict(card["preparation"]),
        patch=(d, h, w),
        precision=str(card["config"]["precision"]),
        training=tuple(
            TrainingStatistics.from_dict(card["training"], len(card["channels"]))
            for card in cards
            if card.get("training") is not None
        ),
    )


def load_network(
    path: Path, card: Mapping[str, Any], weights: Mapping[str, Any], allow_targets: Sequence[str]
) -> nn.Module:
    """The network of a card, with its weights, ready to predict."""
    own = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
    try:
        check_shapes(card, own, allow_targets)
        network = build_network_from_metadata(card, allow_targets)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:  # what a card says may be anything
        raise UsageError(f"{path}: its network cannot be made: {summarize_error(error)}") from error
    try:
        network.load_state_dict(own)
    except RuntimeError as error:
        raise UsageError(
            f"{path}: its weights are not its network's: {summarize_error(error)}"
        ) from error
    return network.eval().requires_grad_(False)


def check_shapes(
    card: Mapping[str, Any], weights: Mapping[str, Any], allow_targets: Sequence[str]
) -> None:
    """Refuse weights that are not the network's, before that takes any memory."""
    try:
        with FakeTensorMode():
            wanted = build_network_from_metadata(card, allow_targets).state_dict()
    except UsageError:
        raise
    except Exception:  # it looks at values as it is made
        return
    for name in sorted(wanted.keys() | weights.keys()):
        sizes = [list(w[name].shape) if name in w else "not there" for w in (wanted, weights)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"its weights are not its network's: {name} should be {sizes[0]}, it is {sizes[1]}"
            )


def check_compatible(
    first: Path, one: Mapping[str, Any], second: Path, other: Mapping[str, Any]
) -> None:
    """Refuse an ensemble whose members differ in what a prediction depends on."""
    for what in ("channels", "classes", "regions", "preparation"):
        if one.get(what) != other.get(what):
            raise UsageError(
                f"{first} and {second} differ in their {what}: {one.get(what)} and "
                f"{other.get(what)}; an ensemble's must be equal"
            )
    patches = [card["config"]["data"]["patch_size"] for card in (one, other)]
    if patches[0] != patches[1]:
        raise UsageError(
            f"{first} and {second} differ in data.patch_size: {patches[0]} and {patches[1]}; an "
            "ensemble's must be equal"
        )
