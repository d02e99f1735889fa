"""Settings of the network: the config groups `model` and `pool`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unet3d.config.compose import Composition, Config
from unet3d.config.fields import BOOL
from unet3d.config.instantiate import (
    Factory,
    check_saved_config,
    read_factory,
    read_option,
)
from unet3d.config.names import rename_saved_keys
from unet3d.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network and its pooling; `bind` replaces arguments that depend on the dataset."""

    model: Factory
    pool: Factory
    name: str = ""  # the option of the group `model`
    pool_name: str = ""  # the option of the group `pool`
    pool_is_chosen: bool = False  # on the command line or by an option other than the default
    prior_bias: bool = True

    def bind(self, *, in_channels: int, num_outputs: int) -> NetworkConfig:
        """Return settings whose arguments no longer depend on the dataset."""
        sizes = {"data.in_channels": in_channels, "data.num_classes": num_outputs}
        return replace(self, model=self.model.bind_references(sizes))

    def vary(self, group: str, argument: str, value: Any) -> NetworkConfig:
        """Return settings with another option of `model` or `pool`, or another argument of it."""
        if argument:
            return replace(self, **{group: getattr(self, group).bind(**{argument: value})})
        option = read_option(group, value)
        if group == "pool":
            return replace(self, pool=option, pool_name=value, pool_is_chosen=True)
        own = {k: v for k, v in option.arguments.items() if k != "prior_bias"}
        return replace(self, model=replace(option, arguments=own), name=value)

    def build(self) -> nn.Module:
        """Build the network once its sizes are known; refuse a pool= that it would ignore."""
        if "pool" in inspect.signature(self.model.target).parameters:
            return self.model(pool=self.pool())
        if self.pool_is_chosen:
            raise UsageError(f"model={self.name} does not use pool=: remove it")
        return self.model()


def parse_network_config(config: Config, composition: Composition) -> NetworkConfig:
    """Read the groups `model` and `pool`."""
    if composition.is_overridden("model.channels") and any(
        composition.is_overridden(f"model.{key}") and key in config.model
        for key in ("depth", "width", "max_width")
    ):
        raise UsageError(
            "model.channels lists the channels of every level: remove model.depth, model.width and "
            "model.max_width"
        )
    model = read_factory(config, "model")
    arguments = dict(model.arguments)
    pool_name = composition.choices.get("pool", "max")
    return NetworkConfig(
        name=composition.choices.get("model", ""),
        prior_bias=BOOL.parse(arguments.pop("prior_bias", True), "model.prior_bias"),
        model=replace(model, arguments=arguments),
        pool=read_factory(config, "pool"),
        pool_name=pool_name,
        pool_is_chosen=composition.is_overridden("pool") or pool_name != "max",
    )


def parse_saved_network(
    saved: Mapping[str, Any], allow_targets: Sequence[str] | None
) -> NetworkConfig:
    """Read the config in a checkpoint's metadata.

    It may name our networks and those of the packages of `allow_targets`, whatever it says itself;
    None allows any, for a checkpoint of this run.
    """
    saved = rename_saved_keys(saved)
    model = {key: value for key, value in saved["model"].items() if key != "prior_bias"}
    if allow_targets is not None:
        for key, values in (("model", model), ("pool", saved["pool"])):
            check_saved_config(values, key, allow_targets)
    return NetworkConfig(model=Factory("model", model), pool=Factory("pool", saved["pool"]))
