"""Settings of the network: the config groups `model` and `pool`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from unet3d.config.allowed_targets import NETWORKS, check_saved_config
from unet3d.config.compose import Composition
from unet3d.config.instantiate import Factory, read_factory
from unet3d.config.values import BOOL
from unet3d.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The network and its pooling; `bind` replaces arguments that depend on the dataset."""

    model: Factory
    pool: Factory
    name: str = ""  # the option of the group `model`
    pool_is_chosen: bool = False  # on the command line or by an option other than the default
    prior_bias: bool = True

    def bind(self, *, in_channels: int, num_outputs: int) -> "NetworkSettings":
        """Return settings whose arguments no longer depend on the dataset."""
        sizes = {"data.in_channels": in_channels, "data.num_classes": num_outputs}
        return replace(self, model=self.model.bind_references(sizes))


def parse_network(config: DictConfig, composition: Composition) -> NetworkSettings:
    """Check and parse the groups `model` and `pool`."""
    if composition.is_overridden("model.channels") and any(
        composition.is_overridden(f"model.{key}") for key in ("depth", "width", "max_width")
    ):
        raise UsageError(
            "model.channels lists the channels of every level: remove model.depth, model.width and "
            "model.max_width"
        )
    model = read_factory(config, "model")
    arguments = dict(model.arguments)
    pool_is_default = composition.choices.get("pool", "max") == "max"
    return NetworkSettings(
        name=composition.choices.get("model", ""),
        prior_bias=BOOL.parse(arguments.pop("prior_bias", True), "model.prior_bias"),
        model=replace(model, arguments=arguments),
        pool=read_factory(config, "pool"),
        pool_is_chosen=composition.is_overridden("pool") or not pool_is_default,
    )


def parse_saved_network(
    saved: Mapping[str, Any], allow_targets: Sequence[str] | None
) -> NetworkSettings:
    """Parse the config in a checkpoint's metadata.

    It may name our networks and those of the packages of `allow_targets`, whatever it says itself;
    None allows any, for a checkpoint of this run.
    """
    model = {key: value for key, value in saved["model"].items() if key != "prior_bias"}
    if allow_targets is not None:
        for key, values in (("model", model), ("pool", saved["pool"])):
            check_saved_config(values, key, packages=NETWORKS, allow_targets=allow_targets)
    return NetworkSettings(model=Factory("model", model), pool=Factory("pool", saved["pool"]))
